"""A sequence's states, segments and borders."""

from __future__ import annotations

import pytest

from lockstep.core.request import FinishReason, Request
from lockstep.core.sequence import Segment, Sequence, SequenceState


def decoding(num_prompt: int, *segments: int) -> Sequence:
    """A sequence whose steps sampled these numbers of tokens, all but the last of them computed."""
    seq = Sequence(3, Request(num_prompt), 100, 0)
    seq.num_computed = num_prompt
    for length in segments:
        seq.num_computed = seq.num_known
        seq.append(length)
    return seq


@pytest.mark.parametrize("begin", list(SequenceState))
@pytest.mark.parametrize("end", list(SequenceState))
def test_only_the_documented_transitions_exist(begin: SequenceState, end: SequenceState) -> None:
    allowed = {
        ("waiting", "running"),
        ("waiting", "finished"),
        ("running", "preempted"),
        ("running", "finished"),
        ("preempted", "running"),
        ("preempted", "finished"),
    }
    seq = Sequence(0, Request(1), 1, 0)
    seq.state = begin
    if (begin.value, end.value) in allowed:
        seq.move_to(end)
        assert seq.state is end
    else:
        with pytest.raises(AssertionError, match=f"{begin.name} -> {end.name}"):
            seq.move_to(end)


def test_segments_record_how_each_token_was_computed() -> None:
    seq = decoding(5, 1, 3, 1, 2)
    assert seq.view().segments == (
        Segment(0, 5),
        Segment(5, 1),
        Segment(6, 3),
        Segment(9, 1),
        Segment(10, 2),
    )
    assert [seq.segment_length(position) for position in (5, 6, 9, 10)] == [1, 3, 1, 2]
    assert seq.num_output == 7


def test_the_result_of_a_sequence_is_a_copy() -> None:
    seq = decoding(4, 1, 1)
    seq.num_preemptions = 2
    seq.cut_to(4)
    kept = seq.finished(FinishReason.STOP, 9)
    assert (kept.seq_id, kept.reason, kept.num_prompt_tokens, kept.num_output_tokens) == (3, FinishReason.STOP, 4, 2)
    assert (kept.num_preemptions, kept.num_recomputed_tokens, kept.finished_step) == (2, 1, 9)
