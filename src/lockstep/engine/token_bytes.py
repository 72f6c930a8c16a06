"""Bytes that each token stands for: the table from which text is rebuilt, and a bound of how much text that is.

Decoders of `tokenizers` work on whole lists. The two families that language models use can be said per token:
byte-level BPE (every character of a token is a byte, after R. Sennrich's BPE on GPT-2's byte alphabet) and
SentencePiece ("▁" is a space, ``<0x0A>`` is a byte, one space at the beginning of a text is dropped). Any other
decoder has no table.

Where bytes are not UTF-8 each faulty part becomes U+FFFD, as Python's and Rust's lossy decoding have it. `tokenizers`
does so for byte-level BPE; for SentencePiece it spoils the valid neighbours too, which a stream cannot take back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder of one of the two families, as data."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    """In order, within a token."""
    byte_tokens: bool = False
    """Whether ``<0x0A>`` stands for a byte."""
    strip_first: str = ""
    """Dropped once from the beginning of the text."""
    blank_first: str = ""
    """Dropped wherever it occurs in the first token."""


@dataclass(slots=True)
class TokenBytes:
    """The table, filled as tokens are met. Shared by all sequences of a model."""

    tokenizer: Tokenizer
    rules: DecoderRules
    skipped: frozenset[int]
    """Special tokens: no text."""
    alphabet: dict[str, int] = field(default_factory=lambda: byte_alphabet())
    known: dict[int, bytes] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    """Of tokens that were met and are whole characters, wherever in a text they stand but at its beginning."""

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        data = self.known.get(token_id)
        if data is None:
            data = self.known[token_id] = self._of_text(self.tokenizer.id_to_token(token_id) or "")
        return data

    def of_first(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text, before `strip_first`."""
        blank = self.rules.blank_first
        if not blank:
            return self.of(token_id)
        return self._of_text((self.tokenizer.id_to_token(token_id) or "").replace(blank, ""))

    def _of_text(self, token: str) -> bytes:
        rules = self.rules
        if rules.byte_level:
            if all(char in self.alphabet for char in token):
                return bytes(self.alphabet[char] for char in token)
            return token.encode("utf-8", "replace")
        for old, new in rules.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if rules.byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.encode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself where it is printable, else the next free from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in printable):
        alphabet[chr(0x100 + offset)] = byte
    return alphabet


def decoder_rules(tokenizer: Tokenizer) -> DecoderRules | None:
    """Read a tokenizer's decoder; None: it is of another family."""
    if tokenizer.decoder is None:
        return None
    steps = _flat(json.loads(tokenizer.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderRules(byte_level=True)
    replacements: list[tuple[str, str]] = []
    strip = blank = ""
    for index, step in enumerate(steps):
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            blank = step["replacement"] if step["prepend_scheme"] != "never" else ""
        elif step["type"] == "Strip" and "Fuse" in kinds[:index] and step["stop"] == 0:
            strip = step["content"] * step["start"]
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return None
    if len(strip) > 1 or (kinds.index("Fuse") if "Fuse" in kinds else len(kinds)) < len(kinds) - 1 - bool(strip):
        return None
    return DecoderRules(False, tuple(replacements), "ByteFallback" in kinds, strip, blank)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


MAX_COMPOSED = 4
"""Characters that a composing normal form of Unicode makes one of, at most: none decomposes into more."""
_GROWING = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Steps that cut a text and drop nothing of it."""
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""What Unicode calls white space, and an added token may take in beside it."""


class TokenReach:
    """How much text a token can stand for: tells from a text's length alone that no context holds it.

    A tokenizer is a chain of steps, each of which says how many characters it may make one of. Where a step may swallow
    text without a bound (blanks that are dropped, unknown characters that become one token together) nothing follows
    from a length, and nothing is claimed. Making one reads the whole vocabulary, for some tenths of a second.
    """

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
