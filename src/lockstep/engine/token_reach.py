"""How much text a token can stand for: what tells from a text's length alone that no context holds it.

A tokenizer is a chain of steps, each of which says how many characters it may make one of. Where a step may swallow
text without a bound (blanks that are dropped, unknown characters that become one token together) nothing follows from
a length, and nothing is claimed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.engine.token_bytes import byte_alphabet

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_COMPOSED = 4
"""Characters that a composing normal form of Unicode makes one of, at most: none decomposes into more."""
_GROWING = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Steps that cut a text and drop nothing of it."""
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""What Unicode calls white space, and an added token may take in beside it."""


class TokenReach:
    """What is known of one tokenizer. Making one reads its whole vocabulary, for some tenths of a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._absorbs_blanks = any(token.lstrip or token.rstrip for token in added)
        composed = _composed(_steps(tokenizer.normalizer, "normalizers"))
        is_lossless = _cuts_only(_steps(tokenizer.pre_tokenizer, "pretokenizers")) and _knows_all(tokenizer)
        self._chars_per_token = 0
        if composed and is_lossless:
            longest = max(map(len, (*tokenizer.get_vocab(), *(token.content for token in added))), default=1)
            self._chars_per_token = composed * longest

    def exceeds(self, texts: Sequence[str], num_tokens: int) -> bool:
        """Whether texts have more than so many tokens together for certain."""
        num_chars, most = sum(map(len, texts)), num_tokens * self._chars_per_token
        if not self._chars_per_token or num_chars <= most:
            return False
        if self._absorbs_blanks:
            num_chars -= sum(text.count(blank) for text in texts for blank in _BLANKS)
        return num_chars > most


def _steps(part: Any, members: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its steps, sequences within each other laid out."""
    if part is None:
        return []

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for inner in step[members] for each in flat(inner)] if step["type"] == "Sequence" else [step]

    return flat(json.loads(part.__getstate__()))


def _composed(steps: list[dict[str, Any]]) -> int:
    """Characters of the text that may become one of the normal text; 0: there is no bound."""
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


def _knows_all(tokenizer: Tokenizer) -> bool:
    """Whether every character becomes at least a token of its own, known or not."""
    from tokenizers import models

    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    kinds = {step["type"] for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")} | {
        step["type"] for step in _steps(tokenizer.normalizer, "normalizers")
    }
    if "ByteLevel" in kinds:
        needed = list(byte_alphabet())
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return model.unk_token is not None and not model.fuse_unk
    return all(model.token_to_id(token) is not None for token in needed)
