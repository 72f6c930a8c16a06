"""What is measured of an answer, against values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.client import TimedExchange, read_exchange

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
A = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm "}}]}\n\n'
CALL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"text":"b"}]}\r\n\r\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


def exchange(*reads: tuple[float, bytes], status: int = 200, error: str = "") -> TimedExchange:
    return TimedExchange(sent_s=10.5, status=status, reads=list(reads), ended_s=99.0, error=error)


def test_latencies_count_from_the_start_that_is_given() -> None:
    """Due at 10, sent at 10.5; tokens at 11, 11.2 and twice at 11.6; the end at 11.7: by hand."""
    outcome = read_exchange(
        exchange((10.9, ROLE), (11.0, THOUGHT), (11.2, A), (11.6, A + CALL), (11.7, END + USAGE), (11.8, DONE)), 10.0, 3
    )
    assert outcome.is_success
    assert outcome.ttft_s == pytest.approx(1.0)
    assert outcome.itl_s == pytest.approx((0.2, 0.4, 0.0))
    assert outcome.e2el_s == pytest.approx(1.7)
    assert outcome.tpot_s == pytest.approx(0.7 / 4)
    assert outcome.send_delay_s == pytest.approx(0.5)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (12, 5, "hm aa")


def test_without_usage_chunks_are_counted_and_the_requested_prompt_length_is_used() -> None:
    outcome = read_exchange(exchange((11.0, TEXT), (12.0, TEXT), (12.0, DONE)), 10.0, 3)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (3, 2, "bb")
    assert outcome.tpot_s == pytest.approx(1.0)


def test_tokens_without_text_end_in_a_time_to_first_token_all_the_same() -> None:
    outcome = read_exchange(exchange((10.9, ROLE), (11.0, END + USAGE + DONE)), 10.0, 3)
    assert (outcome.is_success, outcome.itl_s) == (True, ())
    assert outcome.ttft_s == pytest.approx(1.0)


@given(st.data())
def test_how_the_network_cuts_a_stream_changes_no_text(data: st.DataObject) -> None:
    stream = ROLE + A + THOUGHT + TEXT + b": ping\n\n" + END + USAGE + DONE
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    outcome = read_exchange(exchange(*((11.0 + i, part) for i, part in enumerate(parts))), 10.0, 3)
    assert (outcome.is_success, outcome.text, outcome.output_tokens) == (True, "ahm b", 5)
    assert len(outcome.itl_s) == 2


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (exchange(error="connection: reset"), "connection: reset"),
        (exchange((11.0, b'{"error":{"message":"the queue\\n is full"}}'), status=429), "HTTP 429: the queue is full"),
        (exchange((11.0, b'{"detail":"Not Found"}'), status=404), "Not Found"),
        (exchange((11.0, b"<h1>Bad Gateway</h1>"), status=502), "HTTP 502: <h1>Bad Gateway</h1>"),
        (exchange(status=500), "HTTP 500: no reason given"),
        (
            exchange((11.0, A), (12.0, b'data: {"error":{"message":"lost"}}\n\n' + DONE)),
            "error within the stream: lost",
        ),
        (exchange((11.0, DONE)), "no completion chunk"),
        (exchange((11.0, b"data: {nonsense\n\n")), "malformed"),
    ],
)
def test_a_failed_exchange_reports_the_reason(seen: TimedExchange, reason: str) -> None:
    outcome = read_exchange(seen, 10.0, 3)
    assert not outcome.is_success
    assert reason in outcome.error
