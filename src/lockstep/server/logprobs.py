"""Log-probabilities in the shapes that clients read, with the text and the place of each token.

The entries of a choice cover its text: the token that ends the answer without being text has none, nor have tokens
behind the place where a stop string cut it.
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
"""JSON has no infinity; vLLM's floor."""


class Alternative(msgspec.Struct, frozen=True):
    """A token that might have come, or did."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True):
    """A token of the text, and what else was likely in its place."""

    chosen: Alternative
    top: tuple[Alternative, ...]
    offset: int
    """Characters of the text before it."""
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
    """Tokens as people read them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def data(self, token_id: int) -> bytes:
        """A token's bytes; a special token's name."""
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
    """Gives the tokens of one choice their texts and offsets.

    Args:
        after: the prompt's last token.
        verbatim: the answer is constrained, and begins with the space that its first token has.
        shown_specials: special tokens that are text; None: all of them.
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
        """Of the text so far."""

    def follow(self, after: int) -> None:
        """The prompt's last token, where it is known only now; before the first `entry`."""
        self._detokenizer = Detokenizer(self._tokenizer, after=after, verbatim=self._verbatim)

    def entry(self, token_id: int, logprobs: TokenLogprobs | None) -> Entry:
        """The next token; without log-probabilities only its text and place are known."""
        piece = self._detokenizer.append(token_id)
        if not piece:
            special = self._detokenizer.special_text(token_id)
            piece = special if self._specials is None or special in self._specials else ""
        chosen = self._texts.alternative(token_id, 0.0 if logprobs is None else logprobs.logprob)
        if piece and piece != chosen.token and chosen.token.endswith(piece):  # a leading space that is no text
            chosen = Alternative(piece, chosen.logprob, tuple(piece.encode()))
        top = () if logprobs is None else tuple(self._texts.alternative(*pair) for pair in logprobs.top)
        entry = Entry(chosen, top, self.num_chars, logprobs is not None)
        self.num_chars += len(piece)
        return entry


def chat_logprobs(entries: Sequence[Entry]) -> ChatLogprobs:
    """`choices[].logprobs` of chat completions."""
    content: list[TokenLogprob] = [
        {**_logprob(entry.chosen), "top_logprobs": [_logprob(alternative) for alternative in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _logprob(alternative: Alternative) -> Logprob:
    return {"token": alternative.token, "logprob": alternative.logprob, "bytes": alternative.bytes}


def completion_logprobs(entries: Sequence[Entry], shift: int = 0) -> CompletionLogprobs:
    """`choices[].logprobs` of completions; ``shift`` characters of prompt stand before the text."""
    return {
        "tokens": [entry.chosen.token for entry in entries],
        "token_logprobs": [entry.chosen.logprob if entry.is_known else None for entry in entries],
        "top_logprobs": [_map(entry) if entry.is_known else None for entry in entries],
        "text_offset": [entry.offset + shift for entry in entries],
    }


def _map(entry: Entry) -> Mapping[str, float]:
    """The most likely tokens, and the chosen one; of tokens that read the same, the likelier counts."""
    logprobs: dict[str, float] = {}
    for alternative in (*entry.top, entry.chosen):
        logprobs.setdefault(alternative.token, alternative.logprob)
    return logprobs


def prompt_entries(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[Entry]:
    """The tokens of a prompt that is echoed."""
    tracer = Tracer(tokenizer, None, verbatim=False)
    return [tracer.entry(*pair) for pair in zip(prompt_ids, logprobs, strict=True)]


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token a map of ids, its own first, to log-probabilities; null for the first."""
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
