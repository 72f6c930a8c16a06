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

import msgspec

from lockstep.bench.chunks import Chunk, ChunkReader, Usage, error_message
from lockstep.bench.client import Exchange

OK = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is measured of one request; durations in seconds."""

    is_success: bool
    start_s: float
    """On the clock of `time.perf_counter`: when it was due, or sent where nothing is due. Latencies count from here."""
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
    error = exchange.error
    if not error and exchange.status != OK:
        error = f"HTTP {exchange.status}: {_reason(exchange)}"
    if not error:
        try:
            return _measure(exchange, start_s, prompt_tokens, delay_s)
        except ValueError as fault:
            error = str(fault)
    return Outcome(False, start_s, error=error, send_delay_s=delay_s)


def _measure(exchange: Exchange, start_s: float, prompt_tokens: int | None, delay_s: float) -> Outcome:
    """Of a whole stream; ValueError: it says or shows that the answer is not whole."""
    tokens_s: list[float] = []
    text: list[str] = []
    last_s: float | None = None
    usage = Usage()
    for at_s, chunk in _chunks(exchange):
        if chunk.error is not None:
            raise ValueError(f"in mid-stream: {error_message(chunk.error)}")
        usage = chunk.usage or usage
        if chunk.choices:
            last_s = at_s
            text += [choice.thoughts + choice.content for choice in chunk.choices]
            if any(choice.brings_tokens for choice in chunk.choices):
                tokens_s.append(at_s)
    if last_s is None:
        raise ValueError("the answer holds no completion chunk")
    if not tokens_s:  # tokens without text, as of half a character: the chunk that ended it counts
        tokens_s.append(last_s)
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


def _chunks(exchange: Exchange) -> Iterator[tuple[float, Chunk]]:
    """Each event with the time of the read that completed it; ValueError: an event of another kind."""
    reader = ChunkReader()
    rest = b""
    for at_s, piece in [*exchange.reads, (exchange.ended_s, b"\n")]:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            chunk = reader.read(line)
            if chunk is not None:
                yield at_s, chunk


def _reason(exchange: Exchange) -> str:
    """Why a server refused, from whatever body it sent."""
    body = b"".join(piece for _, piece in exchange.reads)
    try:
        return error_message(msgspec.json.decode(body))
    except ValueError:
        return error_message(body.decode("utf-8", "replace")) or "no reason given"
