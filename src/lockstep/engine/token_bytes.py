"""What each token stands for, in bytes: the table from which text is rebuilt, token by token or at once.

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
