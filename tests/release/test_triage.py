"""Each kind of signal has an owner and a next step; a file of owners sets the owner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.errors import EvidenceError
from lockstep.release import sequential, signals
from lockstep.release.triage import KINDS, RANKS, Group, owner_of, read_owners
from lockstep.release.verdict import Decision, Signal
from tests.release.judging import judged, with_tokens

GATE = Path(signals.__file__).parent


def signal(name: str) -> Signal:
    return Signal(name=name, response=Decision.HOLD, segment="all", sentence="")


def test_exactly_the_possible_signals_have_a_hint() -> None:
    """Names occur in calls of Signal, in rules, in series and in texts of series."""
    text = "".join(
        (GATE / f"{name}.py").read_text() for name in ("signals", "coverage", "sequential", "series", "gate")
    )
    found = (
        set(re.findall(r'(?:name=|hold\(\s*)"([a-z-]+)"', text))
        | {rule.metric.signal for rule in signals.RULES}
        | set(sequential.WORDS)
    )
    found |= {f"missing-{name}" for name in ("provenance", "streaming", "join", "output", "comparable")} | {
        "numeric-drift"
    }
    assert found == set(KINDS)


def test_causes_precede_their_consequences() -> None:
    ranks = [RANKS[name] for name in ("output-mismatch", "errors", "decode", "ttft", "latency", "undecided")]
    assert ranks == sorted(ranks)


def test_groups_are_investigated_in_their_order() -> None:
    """Signals that need more traffic come last, and those that make all others unreliable come first."""
    groups = {group: [name for name, kind in KINDS.items() if kind.group is group] for group in Group}
    assert list(groups) == sorted(Group)
    assert groups[Group.EVIDENCE] == ["outputs-policy", "unsound-baseline", "missing-pairs", "missing-join"]
    assert set(groups[Group.TIMES]) == {"kv-pressure", "decode", "ttft", "latency", "latency-tail"}
    assert set(groups[Group.TOO_LITTLE]) == {"no-output-evidence", "too-few-pairs", "no-evidence-yet", "undecided"}


def test_the_last_matching_pattern_sets_the_owner() -> None:
    owners = {"*": "all", "latency*": "speed", "latency/billing*": "billing", "errors": "nobody"}
    assert owner_of("latency", "billing, vllm -> vllm", owners) == "billing"
    assert owner_of("latency-tail", "all", owners) == "speed"
    assert owner_of("ttft", "all", owners) == "all"
    assert owner_of("ttft", "all", {"decode": "x", "TTFT": "y"}) == KINDS["ttft"].owner


def test_a_file_of_owners_is_read_as_code_owners_are(tmp_path: Path) -> None:
    path = tmp_path / "OWNERS"
    path.write_text("# who looks\n* @everyone\n\nerrors @a @b # on call\n* @all\nlatency/*  speed@example.org\n")
    assert list(read_owners(path).items()) == [("errors", "@a @b"), ("*", "@all"), ("latency/*", "speed@example.org")]


@pytest.mark.parametrize(
    ("text", "message"), [("a b\nerrors\n", "line 2: 'errors' has no owner"), (None, "cannot read the owners file")]
)
def test_an_invalid_file_of_owners_is_refused_with_its_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "OWNERS"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvidenceError, match=re.escape(message)):
        read_owners(path)


def test_an_item_has_owner_action_and_requests(tmp_path: Path) -> None:
    candidate = with_tokens(20, ok=lambda number: number != 3)
    verdict = judged(tmp_path, with_tokens(20), candidate, owners={"errors": "the night shift"})
    [item] = verdict.triage
    assert (item.signal, item.severity, item.response) == ("errors", "critical", "rollback")
    assert (item.owner, item.examples) == ("the night shift", ("r3",))
    assert item.evidence.startswith("the candidate's error rate is 5 points above")
    assert item.action
