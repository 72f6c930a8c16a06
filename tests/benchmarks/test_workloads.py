"""Figures of a piece of work, and the requests that it is made of."""

from __future__ import annotations

import pytest

from benchmarks.comparison.workloads import NUM_LONG, SHORT, SHORT_PER_LONG, Answer, Done, Workload, figures
from lockstep.bench.prompts import Units, prompt_of


def test_decoding_is_counted_while_every_stream_is_in_it() -> None:
    """Stream 1 has tokens at 1, 2, ... 10 s, stream 2 at 3, 4, ... 12 s: the window is 3 to 10 s."""
    answers = [Answer(0.0, tuple(map(float, range(1, 11)))), Answer(0.5, tuple(map(float, range(3, 13))))]
    found = figures(Workload(8, 2, 10), Done(answers, cpu_s=4.0, memory_mb=7.0))
    assert found == {
        "ttft_ms": pytest.approx(1750.0),
        "output_throughput": pytest.approx(20 / 12),
        "decode_throughput": pytest.approx(14 / 7),
        "cpu_ms_per_token": pytest.approx(200.0),
        "memory_mb": 7.0,
    }


def test_streams_that_hardly_meet_have_no_speed_of_decoding() -> None:
    answers = [Answer(0.0, (1.0, 2.0, 3.0)), Answer(0.0, (2.5, 3.5, 4.5))]
    assert "decode_throughput" not in figures(Workload(8, 2, 3), Done(answers))


def test_texts_one_after_the_other_are_charged_their_own_time() -> None:
    """Each is asked, answered from 1 s on with a token a second; the pause between them is nobody's."""
    answers = [Answer(start, tuple(start + i for i in range(1, 7))) for start in (0.0, 100.0)]
    found = figures(Workload(8, 1, 6, "prompts"), Done(answers))
    assert found == {"ttft_ms": 1000.0, "output_throughput": pytest.approx(1.0), "decode_throughput": 1.0}


def test_routed_requests_report_the_time_of_each_hop() -> None:
    answers = [Answer(0.0, (1.0, 4.0)), Answer(10.0, (10.5, 12.5)), Answer(20.0, (21.0, 22.0))]
    assert figures(Workload(8, kind="routed"), Done(answers)) == {
        "request_ms": 2500.0,
        "hop_1_ms": 1000,
        "hop_2_ms": 2000,
    }


def test_no_prompt_of_one_work_begins_with_a_prompt_of_another() -> None:
    units = Units(ids=tuple(range(1000)))
    workloads = [Workload(context, streams) for context in (32, 64) for streams in (1, 2)]
    prompts = [prompt_of(sample, units, 1, {})[:16] for work in workloads for sample in work.samples(1)]
    prompts += [prompt_of(sample, units, 1, {})[:16] for sample in Workload(500, kind="arrivals", gap_s=1.0).samples(1)]
    assert len({tuple(each) for each in prompts}) == len(prompts)


def test_long_prompts_arrive_evenly_and_only_the_short_ones_among_them_count() -> None:
    work = Workload(500, kind="arrivals", gap_s=2.0)
    samples = work.samples(3)
    dues = [sample.at_s or 0.0 for sample in samples]
    assert dues == sorted(dues)
    assert [sample.at_s for sample in samples if not work.counts(sample)] == [2.0 * i for i in range(NUM_LONG)]
    counted = [sample for sample in samples if work.counts(sample)]
    assert {sample.input_tokens for sample in counted} == {SHORT}
    assert len(counted) == NUM_LONG * SHORT_PER_LONG
    assert max(dues) == pytest.approx(2.0 * NUM_LONG)
    waited = [Answer(0.0, (0.001 * i,)) for i in range(101)]
    assert figures(work, Done(waited)) == {"ttft_ms": pytest.approx(50), "ttft_p99_ms": pytest.approx(99)}
