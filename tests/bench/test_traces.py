"""A trace as samples: what the readers of workloads give, as segments and seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.bench.samples import Segment
from lockstep.bench.traces import trace_samples
from lockstep.errors import TraceError
from lockstep.replay.readers import ReadOptions
from tests.replay.readers.files import AZURE, MOONCAKE


def written(folder: Path, content: str) -> Path:
    path = folder / "trace"
    path.write_text(content)
    return path


def test_a_mooncake_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    """Requests with equal hashes begin with equal segments; the last segment is what is left of the length."""
    first, second, third = trace_samples(written(tmp_path, MOONCAKE), ReadOptions())
    assert first.recipe == (Segment((2, 0), 512), Segment((2, 1), 512), Segment((2, 2), 6))
    assert second.recipe == (Segment((2, 0), 512),)
    assert (first.at_s, second.at_s, third.at_s) == (0.0, 0.0, 3.5)
    assert (first.input_tokens, first.output_tokens, third.output_tokens) == (1030, 7, 1)


def test_an_azure_trace_counts_from_its_first_request(tmp_path: Path) -> None:
    samples = trace_samples(written(tmp_path, AZURE), ReadOptions())
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 4.314579, 13.31941])
    assert [(sample.input_tokens, sample.output_tokens) for sample in samples] == [(374, 44), (396, 109), (1, 1)]
    assert len({sample.recipe for sample in samples}) == 3


def test_a_trace_can_be_cut_and_hurried(tmp_path: Path) -> None:
    samples = trace_samples(written(tmp_path, AZURE), ReadOptions(speed=2.0, limit=2))
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 2.1572895])


def test_a_workload_shares_the_blocks_that_it_names_and_nothing_behind_them(tmp_path: Path) -> None:
    text = """{"config": {"block_size": 16}, "requests": [
        {"id": 1, "prompt_tokens": 40, "max_output_tokens": 2, "prefix_hashes": ["system"], "arrival_ms": 0},
        {"id": 2, "prompt_tokens": 20, "max_output_tokens": 2, "prefix_hashes": ["system"], "arrival_ms": 1.5}]}"""
    first, second = trace_samples(written(tmp_path, text), ReadOptions())
    assert first.recipe == (Segment((2, 0), 16), Segment((1, 0), 24))
    assert second.recipe == (Segment((2, 0), 16), Segment((1, 1), 4))
    assert second.at_s == 0.0015


def test_arrivals_in_ticks_have_no_time(tmp_path: Path) -> None:
    text = '{"requests": [{"id": 1, "prompt_tokens": 4, "max_output_tokens": 2, "arrival_tick": 3}]}'
    with pytest.raises(TraceError, match="needs arrival_ms"):
        trace_samples(written(tmp_path, text), ReadOptions())


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.jsonl cannot be read \(No such file"):
        trace_samples(tmp_path / "gone.jsonl", ReadOptions())
