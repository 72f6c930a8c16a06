"""Text from tokens as they come: every piece ends at a character, and the pieces together are the whole decode."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.engine.token_bytes import TokenBytes
    from lockstep.engine.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_MAX_WINDOW_TOKENS = 64
"""For decoders without a byte table: how many tokens may be held before they are shown as they are."""


class Detokenizer:
    """The text of one sequence's output. `append` costs a table look-up and the decoding of the token's bytes.

    Args:
        after: the token before the first one, usually the prompt's last. None or a special token: a new text begins,
            and SentencePiece models drop its leading space; otherwise the text goes on, and the space stays.
        verbatim: the space stays in either case, because a constraint asked for it.
        shown: special tokens that are text here.
    """

    __slots__ = ("_decoder", "_first", "_read", "_shown", "_strip", "_table", "_tokenizer", "_whole", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
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
        self._whole: dict[int, str] = {}
        """Tokens whose text is known without a look at what is open: the table's, where nothing is."""
        self._strip = rules.strip_first if rules is not None and begins else ""
        self._window: list[int] = [] if begins or after is None else [after]
        self._read = len(self._window)
        """How much of the window is only context, its text already shown."""

    def special_text(self, token_id: int) -> str:
        """How a special token, whose text `append` leaves out, is written; empty for any other."""
        return self._tokenizer.special_text(token_id)

    def append(self, token_id: int) -> str:
        """The text that is complete now; empty when a character is still open or the token special and not shown."""
        text = self._whole.get(token_id)
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
        """The text of a token behind others."""
        was_open = self._decoder.getstate()[0]
        text = self._decoder.decode(table.of(token_id))
        is_open = self._decoder.getstate()[0]
        self._whole = {} if is_open else table.texts
        if not (was_open or is_open):
            table.texts[token_id] = text
        return text

    def flush(self) -> str:
        """What an unfinished character leaves when no more tokens come: U+FFFD, or nothing."""
        if self._table is None:
            text = self._new_text()
            self._read = len(self._window)
            return text
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip else text

    def _show(self, token_id: int) -> str:
        """The text of a special token, after what the tokens before it left open."""
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
        """Decode a short window twice and show the difference, for decoders that only know whole lists."""
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
