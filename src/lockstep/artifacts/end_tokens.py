"""Which tokens end a sequence. A set: chat models have several, and files name only some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

END_TEXTS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endofturn|>",
    "<|end_of_text|>",
    "<EOT>",
    "<|eot|>",
)
"""Spellings of the tokens with which chat templates close a turn or a text; a model that emits one is done."""


def end_token_ids(named: Iterable[int], special_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Sorted ids: those that the artifact names, and its special tokens with a known spelling.

    Args:
        named: ids that the artifact calls eos, eot or eom.
        special_tokens: text and id of its control and added tokens.
    """
    known = (special_tokens[text] for text in END_TEXTS if text in special_tokens)
    return tuple(sorted({*named, *known}))
