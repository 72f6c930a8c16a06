"""From the bytes of an answer to what is measured of it. Pure, and run after the load is over.

Tokens come in chunks; a chunk is one reading of the clock. As in `vllm bench serve`, the latency between tokens (ITL)
is that between chunks, however many tokens one brings, and chunks of one read are 0 apart; the time per output token
(TPOT) divides by the count that the server's ``usage`` states. Unlike there, a chunk that only carries the role is no
token: a server that sends it early does not have a short time to first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from lockstep.bench.client import Exchange

OK = 200
MAX_REASON_CHARS = 300
_DATA = b"data:"
_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is measured of one request; durations in seconds."""

    is_success: bool
    start_s: float
    """On the clock of the run: when it was due (open loop) or sent (closed loop). Latencies count from here."""
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    e2el_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""
    send_delay_s: float = 0.0
    """How long after its start it was really sent."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 where there is none."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def read_exchange(exchange: Exchange, start_s: float, prompt_tokens: int | None) -> Outcome:
    """Measure one exchange.

    Args:
        start_s: from when latencies count, on the exchange's clock.
        prompt_tokens: what was asked for, where the server does not say.
    """
    delay_s = max(0.0, exchange.sent_s - start_s)
    if exchange.error:
        return Outcome(False, start_s, error=exchange.error, send_delay_s=delay_s)
    if exchange.status != OK:
        return Outcome(False, start_s, error=f"HTTP {exchange.status}: {_reason(exchange)}", send_delay_s=delay_s)
    tokens_s: list[float] = []
    text: list[str] = []
    last_s = 0.0
    usage = _Usage()
    for at_s, chunk in _chunks(exchange):
        if chunk is None:
            return Outcome(
                False, start_s, error="an event of the stream is not a completion chunk", send_delay_s=delay_s
            )
        if chunk.error is not None:
            return Outcome(False, start_s, error=f"in mid-stream: {_message(chunk.error)}", send_delay_s=delay_s)
        usage = chunk.usage or usage
        if chunk.choices:
            last_s = at_s
            added = [_text(choice) for choice in chunk.choices]
            if any(piece is not None for piece in added):
                tokens_s.append(at_s)
                text += [piece for piece in added if piece]
    if not tokens_s and last_s:  # tokens without text, as of half a character: the chunk that ended it counts
        tokens_s.append(last_s)
    if not tokens_s:
        return Outcome(False, start_s, error="the answer holds no completion chunk", send_delay_s=delay_s)
    return Outcome(
        True,
        start_s,
        ttft_s=tokens_s[0] - start_s,
        itl_s=tuple(after - before for before, after in pairwise(tokens_s)),
        e2el_s=last_s - start_s,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else prompt_tokens or 0,
        output_tokens=usage.completion_tokens if usage.completion_tokens is not None else len(tokens_s),
        text="".join(text),
        send_delay_s=delay_s,
    )


def _text(choice: _Choice) -> str | None:
    """Text that a choice brings; None: it brings none. Thoughts and tool calls are tokens too."""
    if choice.delta is None:
        return choice.text or None
    delta = choice.delta
    thoughts = delta.reasoning_content or delta.reasoning or ""
    if delta.tool_calls is not None and bytes(delta.tool_calls) not in (b"null", b"[]"):
        return thoughts + (delta.content or "")
    return thoughts + (delta.content or "") or None


def _chunks(exchange: Exchange) -> Iterator[tuple[float, _Chunk | None]]:
    """Each event with the time of the read that completed it; None: not a chunk."""
    decoder = msgspec.json.Decoder(_Chunk)
    rest = b""
    for at_s, piece in [*exchange.reads, (exchange.ended_s, b"\n")]:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                content = line[len(_DATA) :].strip()
                if content == _DONE:
                    return
                try:
                    yield at_s, decoder.decode(content)
                except msgspec.DecodeError:
                    yield at_s, None


def _reason(exchange: Exchange) -> str:
    """Why a server refused, from whatever body it sent."""
    body = b"".join(piece for _, piece in exchange.reads)
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return " ".join(body.decode("utf-8", "replace").split())[:MAX_REASON_CHARS] or "no reason given"
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(error: Any) -> str:
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_REASON_CHARS]
