"""Generation defaults of artifacts: read the end tokens and the sampling parameters that model files contain.

Chat models have several end tokens, and files name only some of them. Sampling defaults have the names of
`Artifact.sampling_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import CorruptArtifactError
from lockstep.option_fields import OptionType, Range

MAX_TEMPERATURE = 1e6
"""Maximum temperature. Above it, all tokens are equally likely and float32 overflows."""
TEMPERATURE = Range(0, MAX_TEMPERATURE)
TOP_K = Range(-1)
TOP_P = Range(0, 1, above_low=True)
MIN_P = Range(0, 1)
REPETITION_PENALTY = Range(1e-6, 1e6)
"""Range for which scaled logits stay finite in float32."""
_KNOWN: Mapping[str, tuple[str, OptionType]] = {
    "temperature": ("general.sampling.temp", OptionType(float, TEMPERATURE)),
    "top_k": ("general.sampling.top_k", OptionType(int, TOP_K)),
    "top_p": ("general.sampling.top_p", OptionType(float, TOP_P)),
    "min_p": ("general.sampling.min_p", OptionType(float, MIN_P)),
    "repetition_penalty": ("general.sampling.penalty_repeat", OptionType(float, REPETITION_PENALTY)),
}
"""By parameter name (as in generation_config.json): the GGUF key, which llama.cpp's converter writes, and the allowed
values.

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
    "<turn|>",
    "<|tool_response>",
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
"""Texts of tokens that end a turn or a text in models of the supported architectures, as listed by llama.cpp."""
MARKER_TEXTS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
"""Further texts of tokens that llama.cpp always treats as control tokens, whatever their type in the file."""


def from_generation_config(config: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """Return the values that are set.

    As in vLLM, ``do_sample`` has no effect: the temperature in the file is the default, and a request sets
    ``temperature: 0`` for greedy decoding.
    """
    return _checked({name: config.get(name) for name in _KNOWN}, path)


def from_gguf(metadata: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """Return the values that are set."""
    return _checked({name: metadata.get(key) for name, (key, _) in _KNOWN.items()}, path)


def end_token_ids(named: Iterable[int], special_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sorted ids of all end tokens: those that the artifact names, and special tokens with a known text.

    Args:
        named: ids that the artifact names as eos, eot or eom.
        special_tokens: ids of control tokens by text.
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
