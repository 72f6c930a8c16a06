"""Which tokens end a sequence. A set: chat models have several, and files name only some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
"""Spellings that llama.cpp takes for control tokens, whatever the file says, as it does with those above."""


def end_token_ids(named: Iterable[int], special_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Sorted ids: those that the artifact names, and its special tokens with a known spelling.

    Args:
        named: ids that the artifact calls eos, eot or eom.
        special_tokens: text and id of its control tokens.
    """
    known = (special_tokens[text] for text in END_TEXTS if text in special_tokens)
    return tuple(sorted({*named, *known}))
