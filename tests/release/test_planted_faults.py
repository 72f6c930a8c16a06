"""The gate's triage lists planted faults first, with signal, place and cause; on equal servers it lists nothing.

The default suite plants in the records of one run of equal servers. The slow one plants all faults of `FAULTS`, on
servers with changed settings; `python -m tests.release.faults` prints what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.release.faults import FAULTS, POCKET, POLICY, STUB, TIMELESS, Fault, Stage

FAST = tuple(fault for fault in FAULTS if fault.is_of_equal_run)
SLOW = tuple(fault for fault in FAULTS if not fault.is_of_equal_run)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage")) as found:
        yield found


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("many"), times=6) as found:
        yield found


def test_fault_names_are_unique_and_more_than_twenty() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 20


def test_equal_servers_give_no_items_under_any_load(stage: Stage) -> None:
    verdict = stage.judged(stage.equal(), {**POLICY, **TIMELESS})
    assert (verdict["decision"], verdict["triage"]) == ("promote", [])


@pytest.mark.parametrize("fault", FAST, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_in_the_records_is_named_first(fault: Fault, stage: Stage) -> None:
    *found, verdict = fault.found(stage, TIMELESS)
    assert fault.is_named(*found), verdict["triage"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAST, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_in_the_records_has_its_cause_in_sequential_mode_too(fault: Fault, many: Stage) -> None:
    """The signal may be a series: for lost requests, a share of missing pairs that is certainly beyond its bound."""
    _, place, cause, verdict = fault.found(many, {"mode": "sequential", "warmup_pairs": 0})
    assert (place, cause) == ("all", fault.cause), verdict["triage"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", SLOW, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_of_a_server_is_named_first(fault: Fault, stage: Stage) -> None:
    *found, verdict = fault.found(stage)
    assert fault.is_named(*found), verdict["triage"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threshold", "sequential"])
@pytest.mark.parametrize("source", [STUB, POCKET])
def test_equal_servers_give_no_items_in_either_mode(source: str, mode: str, stage: Stage) -> None:
    policy = {
        **POLICY,
        **TIMELESS,
        "mode": mode,
        "margin": 0.9,
        "missing_margin": 10,
        "error_margin": 10,
        "burst_pairs": 1,
        "warmup_pairs": 0,
    }
    verdict = stage.judged(stage.equal(source, count=480 if mode == "sequential" else 48), policy)
    assert {item["signal"] for item in verdict["triage"]} <= ({"undecided"} if mode == "sequential" else set())
