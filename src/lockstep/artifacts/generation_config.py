"""Generation defaults that an artifact carries: which tokens end a sequence, and its sampling parameters.

End tokens are a set: chat models have several, and files name only some of them. Sampling defaults bear the names of
`Artifact.sampling_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import CorruptArtifactError
from lockstep.option_fields import OptionType, Range

MAX_TEMPERATURE = 1e6
"""Beyond it every token is as likely as the next, and float32 overflows."""
TEMPERATURE = Range(0, MAX_TEMPERATURE)
TOP_K = Range(-1)
TOP_P = Range(0, 1, above_low=True)
MIN_P = Range(0, 1)
REPETITION_PENALTY = Range(1e-6, 1e6)
"""It divides and multiplies logits; what they become stays finite in float32."""
_KNOWN: Mapping[str, tuple[str, OptionType]] = {
    "temperature": ("general.sampling.temp", OptionType(float, TEMPERATURE)),
    "top_k": ("general.sampling.top_k", OptionType(int, TOP_K)),
    "top_p": ("general.sampling.top_p", OptionType(float, TOP_P)),
    "min_p": ("general.sampling.min_p", OptionType(float, MIN_P)),
    "repetition_penalty": ("general.sampling.penalty_repeat", OptionType(float, REPETITION_PENALTY)),
}
"""By our name, which is generation_config.json's: GGUF's key, which llama.cpp's converter copies, and the values.

Requests have the same ranges (`executors.sampling_params`)."""
END_TEXTS = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "[EOS]",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
"""Spellings with which models of the known architectures close a turn or a text, as llama.cpp lists them."""
MARKER_TEXTS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
"""Spellings that llama.cpp takes for control tokens, whatever the file states, as it does with those above."""


def from_generation_config(config: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """The values that are present. As in vLLM, ``do_sample`` has no effect: a temperature in the file is the default,
    and a request sets ``temperature: 0`` for greedy decoding.
    """
    return _checked({name: config.get(name) for name in _KNOWN}, path)


def from_gguf(metadata: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """The values that are present."""
    return _checked({name: metadata.get(key) for name, (key, _) in _KNOWN.items()}, path)


def end_token_ids(named: Iterable[int], special_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Sorted ids: those that the artifact names, and its special tokens with a known spelling.

    Args:
        named: ids that the artifact calls eos, eot or eom.
        special_tokens: text and id of its control tokens.
    """
    known = (special_tokens[text] for text in END_TEXTS if text in special_tokens)
    return tuple(sorted({*named, *known}))


def _checked(values: Mapping[str, object], path: Path) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for name, value in values.items():
        if value is None:
            continue
        type_ = _KNOWN[name][1]
        if type_.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not type_.fits(value):
            raise CorruptArtifactError(
                f"sampling default {name!r} is {value!r}; it must be {type_.right(value)}", path=path
            )
        defaults[name] = type_.kind(value)
    return defaults
