"""Incremental detokenizer: converts tokens to text one by one, using a table of each token's bytes.

Decoders of Hugging Face's `tokenizers` work on whole lists. Two families of them can be applied per token: byte-level
BPE (every character of a token is a byte, after R. Sennrich's BPE on GPT-2's byte alphabet) and SentencePiece ("▁" is a
space, ``<0x0A>`` is a byte, one space at the beginning of a text is dropped). For any other decoder there is no table:
a short window of tokens is decoded again with each token.

If bytes are not valid UTF-8, each invalid part becomes U+FFFD, as in the lossy decoding of Python and Rust.
`tokenizers` does the same for byte-level BPE. For SentencePiece it also replaces valid neighbours, which a stream could
not undo.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_MAX_WINDOW_TOKENS = 64
"""Maximum number of tokens that are held back while their text ends in U+FFFD. For decoders without a byte table."""


class Detokenizer:
    """Text of one sequence, piece by piece.

    Every piece ends at a whole character, and the pieces together are the text of all tokens. `append` costs a table
    look-up and the decoding of the token's bytes.

    Args:
        after: the token before the first one, usually the prompt's last. With None or a special token, a new text
            begins, and SentencePiece models drop its leading space; otherwise the text continues, and the space stays.
        verbatim: the space always stays, because a constraint requires it.
        shown: ids of special tokens whose text is shown; the text of all others is left out.
    """

    __slots__ = ("_decoder", "_first", "_read", "_shown", "_strip", "_table", "_texts", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        after: int | None = None,
        verbatim: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes
        self._shown = shown
        self._decoder = _utf8("replace")
        begins = not verbatim and (after is None or after in tokenizer.special_token_ids)
        rules = None if self._table is None else self._table.rules
        self._first = begins
        self._texts: dict[int, str] = {}
        """Known texts by token: those of the table; empty while a character is incomplete or before the first token."""
        self._strip = rules.strip_first if rules is not None and begins else ""
        self._window: list[int] = [] if begins or after is None else [after]
        self._read = len(self._window)
        """Number of tokens in the window that are only context, because their text was already shown."""

    def special_text(self, token_id: int) -> str:
        """Text of a special token, which `append` leaves out; empty for other tokens."""
        return self._tokenizer.special_text(token_id)

    def append(self, token_id: int) -> str:
        """Append a token and return the text that is complete now.

        Empty while a character is incomplete, or for a special token that is not shown.
        """
        text = self._texts.get(token_id)
        return self._append(token_id) if text is None else text

    def _append(self, token_id: int) -> str:
        table = self._table
        if token_id in self._shown:
            return self._show(token_id)
        if table is None:
            return self._append_to_window(token_id)
        if token_id in table.skipped:
            return ""
        if not self._first:
            return self._decoded(table, token_id)
        self._first = bool(self._strip)
        text = self._decoder.decode(table.of_first(token_id))
        return self._stripped(text) if self._strip else text

    def _decoded(self, table: TokenBytes, token_id: int) -> str:
        """Text of a token that is not the first of a text."""
        was_open = self._decoder.getstate()[0]
        text = self._decoder.decode(table.of(token_id))
        is_open = self._decoder.getstate()[0]
        self._texts = {} if is_open else table.texts
        if not (was_open or is_open):
            table.texts[token_id] = text
        return text

    def flush(self) -> str:
        """End the text and return the rest of an incomplete character: U+FFFD, or nothing."""
        if self._table is None:
            text = self._new_text()
            self._read = len(self._window)
            return text
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip else text

    def _show(self, token_id: int) -> str:
        """Text of a special token, after the rest of the tokens before it."""
        text = self.flush() + self.special_text(token_id)
        self._window, self._read = [], 0
        self._strip, self._first = "", False
        return text

    def _stripped(self, text: str) -> str:
        if not text:
            return text
        text, self._strip, self._first = text.removeprefix(self._strip), "", False
        return text

    def _append_to_window(self, token_id: int) -> str:
        """Decode a short window twice and return the difference, for decoders that only work on whole lists."""
        self._window.append(token_id)
        text = self._new_text()
        pending = len(self._window) - self._read
        if not text or (text.endswith(_REPLACEMENT) and pending < _MAX_WINDOW_TOKENS):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._read])
        whole = self._tokenizer.decode(self._window)
        return whole[len(before) :]


class TokenDecoder(Protocol):
    """The decoding interface of a tokenizer."""

    @property
    def token_bytes(self) -> TokenBytes | None:
        """None: only whole lists of tokens can be decoded."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def special_text(self, token_id: int) -> str:
        """Text of a special token; empty for other tokens."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """Rules of a byte-level or SentencePiece decoder."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    """Replacements within a token, in order."""
    byte_tokens: bool = False
    """True if ``<0x0A>`` stands for a byte."""
    strip_first: str = ""
    """Prefix that is dropped once from the beginning of the text."""
    blank_first: str = ""
    """Text that is dropped wherever it occurs in the first token."""


@dataclass(slots=True)
class TokenBytes:
    """Table of each token's bytes, filled on first use. Shared by all sequences of a model."""

    tokenizer: Tokenizer
    rules: DecoderRules
    skipped: frozenset[int]
    """Special tokens, which have no text."""
    alphabet: dict[str, int] = field(default_factory=lambda: byte_alphabet())
    known: dict[int, bytes] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    """Texts of tokens that are whole characters by themselves. Not valid for the first token of a text."""

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; empty for an id outside the vocabulary."""
        data = self.known.get(token_id)
        if data is None:
            data = self.known[token_id] = self._of_text(self.tokenizer.id_to_token(token_id) or "")
        return data

    def of_first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text, before `DecoderRules.strip_first` is applied."""
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
    """GPT-2's printable character for each byte: the byte's own character if printable, else the next free one from
    U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in printable):
        alphabet[chr(0x100 + offset)] = byte
    return alphabet


def decoder_rules(tokenizer: Tokenizer) -> DecoderRules | None:
    """Read the rules of a tokenizer's decoder; None: it belongs to neither family, and has no byte table."""
    if tokenizer.decoder is None:
        return None
    steps = steps_of(tokenizer.decoder, "decoders")
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


def steps_of(part: Any, members: str) -> list[dict[str, Any]]:
    """Steps of a decoder, normalizer or pre-tokenizer, with nested sequences flattened; empty for None.

    Args:
        members: key of the list of steps in a sequence of this kind, e.g. ``decoders``.
    """
    if part is None:
        return []

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for inner in step[members] for each in flat(inner)] if step["type"] == "Sequence" else [step]

    return flat(json.loads(part.__getstate__()))
