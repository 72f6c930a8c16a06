"""Log-probabilities: convert them to the formats of the APIs, with the text and offset of each token.

The entries of a choice cover its text. There is no entry for an end token that is not part of the text, nor for tokens
after the position at which a stop string cut the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.logits import TokenLogprobs
from lockstep.server.fields import Shape

LEAST_LOGPROB = -9_999.0
"""Lower bound of log-probabilities, as in vLLM. JSON cannot represent infinity."""


class Alternative(msgspec.Struct, frozen=True):
    """A token that was generated or could have been."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True):
    """A token of the text, with the most likely alternatives."""

    chosen: Alternative
    top: tuple[Alternative, ...]
    offset: int
    """Number of characters of the text before the token."""
    is_known: bool = True
    """False for the first token of a prompt, which has no probability."""


class Logprob(Shape):
    token: str
    logprob: float
    bytes: Sequence[int]


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Mapping[str, float] | None]
    text_offset: list[int]


class TokenTexts:
    """Texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int) -> bytes:
        """The bytes of a token; for a special token, its name."""
        special = self._tokenizer.special_text(token_id)
        if special:
            return special.encode()
        table = self._tokenizer.token_bytes
        if table is not None:
            return table.of(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def alternative(self, token_id: int, logprob: float) -> Alternative:
        data = self.data(token_id)
        return Alternative(data.decode("utf-8", "replace"), max(logprob, LEAST_LOGPROB), tuple(data))


class Tracer:
    """Assigns texts and offsets to the tokens of one choice.

    Args:
        after: last token of the prompt.
        verbatim: the answer is constrained, so it keeps the leading space of its first token.
        shown_specials: special tokens that are part of the text; None: all of them.
    """

    def __init__(
        self, tokenizer: Tokenizer, after: int | None, *, verbatim: bool, shown_specials: Sequence[str] | None = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._verbatim = verbatim
        self._texts = TokenTexts(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, after=after, verbatim=verbatim)
        self._specials = None if shown_specials is None else frozenset(shown_specials)
        self.num_chars = 0
        """Number of characters of the text so far."""

    def follow(self, after: int) -> None:
        """Set the last token of the prompt if it was not known before. Must be called before the first `entry`."""
        self._detokenizer = Detokenizer(self._tokenizer, after=after, verbatim=self._verbatim)

    def entry(self, token_id: int, logprobs: TokenLogprobs | None) -> Entry:
        """Return the entry of the next token. Without log-probabilities, only text and offset are known."""
        piece = self._detokenizer.append(token_id)
        if not piece:
            special = self._detokenizer.special_text(token_id)
            piece = special if self._specials is None or special in self._specials else ""
        chosen = self._texts.alternative(token_id, 0.0 if logprobs is None else logprobs.logprob)
        if piece and piece != chosen.token and chosen.token.endswith(piece):  # without the leading space
            chosen = Alternative(piece, chosen.logprob, tuple(piece.encode()))
        top = () if logprobs is None else tuple(self._texts.alternative(*pair) for pair in logprobs.top)
        entry = Entry(chosen, top, self.num_chars, logprobs is not None)
        self.num_chars += len(piece)
        return entry


def chat_logprobs(entries: Sequence[Entry]) -> ChatLogprobs:
    """Create `choices[].logprobs` of chat completions."""
    content: list[TokenLogprob] = [
        {**_logprob(entry.chosen), "top_logprobs": [_logprob(alternative) for alternative in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _logprob(alternative: Alternative) -> Logprob:
    return {"token": alternative.token, "logprob": alternative.logprob, "bytes": alternative.bytes}


def completion_logprobs(entries: Sequence[Entry], shift: int = 0) -> CompletionLogprobs:
    """Create `choices[].logprobs` of completions. ``shift`` is the number of prompt characters before the text."""
    return {
        "tokens": [entry.chosen.token for entry in entries],
        "token_logprobs": [entry.chosen.logprob if entry.is_known else None for entry in entries],
        "top_logprobs": [_map(entry) if entry.is_known else None for entry in entries],
        "text_offset": [entry.offset + shift for entry in entries],
    }


def _map(entry: Entry) -> Mapping[str, float]:
    """Log-probabilities of the most likely tokens and the chosen one, by text. Of equal texts, the first is kept."""
    logprobs: dict[str, float] = {}
    for alternative in (*entry.top, entry.chosen):
        logprobs.setdefault(alternative.token, alternative.logprob)
    return logprobs


def prompt_entries(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[Entry]:
    """Create the entries of an echoed prompt."""
    tracer = Tracer(tokenizer, None, verbatim=False)
    return [tracer.entry(*pair) for pair in zip(prompt_ids, logprobs, strict=True)]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Create vLLM's `prompt_logprobs`: for each token, log-probabilities by token id, its own first; null for the
    first."""
    texts = TokenTexts(tokenizer)
    return [
        None
        if of_token is None
        else {
            str(i): {"logprob": max(logprob, LEAST_LOGPROB), "decoded_token": texts.alternative(i, logprob).token}
            for i, logprob in {token_id: of_token.logprob, **dict(of_token.top)}.items()
        }
        for token_id, of_token in zip(prompt_ids, logprobs, strict=True)
    ]
