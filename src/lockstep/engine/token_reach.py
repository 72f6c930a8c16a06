"""Token reach: a lower bound for the number of tokens of a text, by which long texts are refused without tokenising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.engine.detokenizer import byte_alphabet, steps_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_COMPOSED = 4
"""Maximum number of characters that a composing normal form of Unicode turns into one: none decomposes into more."""
_GROWING = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Steps that split a text and drop no part of it."""
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's white space, which an added token may absorb on its sides."""


class TokenReach:
    """Lower bound for the number of tokens of a text, from its length alone: rejects texts that cannot fit the context.

    A tokenizer is a chain of steps, and for each step there is a maximum number of characters that it turns into one.
    If a step can absorb any amount of text (dropped blanks, or unknown characters merged into one token), there is no
    bound, and no text is rejected. Creating this reads the whole vocabulary, which takes some tenths of a second.
    """

    def __init__(self, tokenizer: Library) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._absorbs_blanks = any(token.lstrip or token.rstrip for token in added)
        composed = _composed(steps_of(tokenizer.normalizer, "normalizers"))
        is_lossless = _cuts_only(steps_of(tokenizer.pre_tokenizer, "pretokenizers")) and _covers_all_characters(
            tokenizer
        )
        self._chars_per_token = 0
        if composed and is_lossless:
            longest = max(map(len, (*tokenizer.get_vocab(), *(token.content for token in added))), default=1)
            self._chars_per_token = composed * longest

    def exceeds(self, texts: Sequence[str], num_tokens: int) -> bool:
        """True if the texts together certainly have more than this many tokens."""
        num_chars, most = sum(map(len, texts)), num_tokens * self._chars_per_token
        if not self._chars_per_token or num_chars <= most:
            return False
        if self._absorbs_blanks:
            num_chars -= sum(text.count(blank) for text in texts for blank in _BLANKS)
        return num_chars > most


def _composed(steps: list[dict[str, Any]]) -> int:
    """Maximum number of characters of the text that become one character of the normalised text; 0: there is no
    bound."""
    factor = 1
    for step in steps:
        if step["type"] in _COMPOSING:
            factor *= MAX_COMPOSED
        elif step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
            continue
        elif step["type"] not in _GROWING:
            return 0
    return factor


def _cuts_only(steps: list[dict[str, Any]]) -> bool:
    return all(
        step["type"] in _SPLITTING
        or (step["type"] in ("Split", "Punctuation") and step.get("behavior", "Removed") != "Removed")
        for step in steps
    )


def _covers_all_characters(tokenizer: Library) -> bool:
    """True if every character becomes at least one token of its own, known or unknown."""
    from tokenizers import models

    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    kinds = {step["type"] for step in steps_of(tokenizer.pre_tokenizer, "pretokenizers")} | {
        step["type"] for step in steps_of(tokenizer.normalizer, "normalizers")
    }
    if "ByteLevel" in kinds:
        needed = list(byte_alphabet())
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return model.unk_token is not None and not model.fuse_unk
    return all(model.token_to_id(token) is not None for token in needed)
