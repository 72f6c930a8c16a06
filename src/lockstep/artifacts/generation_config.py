"""Generation defaults that an artifact carries: which tokens end a sequence, and its sampling parameters.

End tokens are a set: chat models have several, and files name only some of them. Sampling defaults bear the names of
`Artifact.sampling_defaults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lockstep.errors import CorruptArtifactError

# Our name, which is generation_config.json's too: GGUF's key (llama.cpp's converter copies them), what it may be.
_KNOWN: Mapping[str, tuple[str, Callable[[float], bool], str]] = {
    "temperature": ("general.sampling.temp", lambda value: value >= 0, "at least 0"),
    "top_k": ("general.sampling.top_k", lambda value: value >= -1 and value == int(value), "a whole number from -1 up"),
    "top_p": ("general.sampling.top_p", lambda value: 0 < value <= 1, "above 0, at most 1"),
    "min_p": ("general.sampling.min_p", lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": ("general.sampling.penalty_repeat", lambda value: value > 0, "above 0"),
}
_LARGEST = 1e30
"""Neither infinity nor an integer beyond floats is a sampling parameter."""
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
    """The values that are present. ``do_sample`` is not consulted, as in vLLM: a file that sets a temperature means it,
    and a request that wants greedy decoding says ``temperature: 0``.
    """
    return _checked({name: config.get(name) for name in _KNOWN}, path)


def from_gguf(metadata: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """The values that are present."""
    return _checked({name: metadata.get(key) for name, (key, _, _) in _KNOWN.items()}, path)


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
        _, fits, expected = _KNOWN[name]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (abs(value) <= _LARGEST and fits(value))
        ):
            raise CorruptArtifactError(f"sampling default {name!r} is {value!r}; {expected} is expected", path=path)
        defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults
