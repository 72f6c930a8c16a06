"""Journals: one answer a request, in the order of requests, whatever cut the last line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.server.batches.journal import Journal


def test_answers_come_in_the_order_of_requests(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "d", 4)
    for index in (2, 0, 3):
        journal.append(index, b'{"n":%d}' % index, is_success=index != 0)
    assert list(journal.lines()) == [(False, b'{"n":0}\n'), None, (True, b'{"n":2}\n'), (True, b'{"n":3}\n')]
    assert (journal.num_completed, journal.num_failed, journal.is_complete) == (2, 1, False)
    assert list(journal.unanswered()) == [1]
    journal.append(1, b"{}", is_success=True)
    assert journal.is_complete
    journal.close()


@settings(max_examples=30)
@given(order=st.permutations(range(6)), num=st.integers(0, 6), cut=st.integers(0, 500))
def test_a_journal_that_was_cut_anywhere_goes_on(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], num: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    first = Journal(path, "digest", 6)
    for index in order[:num]:
        first.append(index, b'{"answer":%d}' % index, is_success=True)
    first.close()
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    again = Journal(path, "digest", 6)
    kept = [index for index, found in enumerate(again.lines()) if found is not None]
    assert kept == sorted(order[: max(0, content.count(b"\n") - 1)])
    for index in list(again.unanswered()):
        again.append(index, b'{"answer":%d}' % index, is_success=True)
    again.close()
    whole = Journal(path, "digest", 6)
    assert list(whole.lines()) == [(True, b'{"answer":%d}\n' % index) for index in range(6)]
    whole.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"something else\n", "belongs to another input"),
        (b"something else", "not a batch journal"),
        (b"lockstep-batch 1 other\n", "belongs to another input"),
        (b"lockstep-batch 1 d\n9 1 {}\n", "no result of this batch starts at byte 19"),
        (b"lockstep-batch 1 d\n0 1 {}\n0 1 {}\n", "no result of this batch starts at byte 26"),
    ],
)
def test_journal_of_another_input_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Journal(path, "d", 2)
    assert path.read_bytes() == content
