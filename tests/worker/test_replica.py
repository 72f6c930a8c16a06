"""Replicas of a device: keys are claimed once, whoever looks sees a whole, and a load reports at a bounded rate."""

from __future__ import annotations

import threading

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import ArtifactNotFoundError
from lockstep.system import SYSTEM
from lockstep.worker.messages import Load, TrialOptions
from lockstep.worker.replica import Replica, ReplicaRegistry, open_replica, throttled

SMALL = LoadOptions(EngineOptions(num_blocks=64))


def opened(key: str) -> Replica:
    replica, _ = open_replica(
        Load(key, f"stub://{key}", SMALL, TrialOptions()), lambda stage, fraction: None, lambda change: None
    )
    return replica


@pytest.fixture(scope="module")
def replicas() -> list[Replica]:
    return [opened(key) for key in "abc"]


def test_a_key_is_claimed_once_until_it_is_released(replicas: list[Replica]) -> None:
    registry = ReplicaRegistry()
    assert registry.claim("a", 1)
    assert not registry.claim("a", 2)
    assert registry.claimed == {"a": 1}
    assert registry.find("a") is None, "it is loading"
    assert registry.add(replicas[0])
    assert registry.find("a") is replicas[0]
    registry.remove("a")
    assert registry.find("a") is None
    assert not registry.claim("a", 2), "it is being freed"
    registry.release("a")
    assert registry.claim("a", 2)


def test_the_class_of_a_replica_follows_it_from_its_claim_on(replicas: list[Replica]) -> None:
    registry = ReplicaRegistry()
    registry.claim("a", 1)
    registry.prioritise("a", 3)
    registry.prioritise("nobody", 3)
    registry.add(replicas[0])
    before = registry.present
    assert dict(before.classes) == {"a": 3}
    registry.prioritise("a", 2)
    assert dict(registry.present.classes) == {"a": 2}
    assert dict(before.classes) == {"a": 3}, "what somebody looks at does not change under them"


def test_nothing_is_added_to_a_device_that_ends(replicas: list[Replica]) -> None:
    registry = ReplicaRegistry()
    for replica in replicas[:2]:
        registry.claim(replica.key, 0)
    assert registry.add(replicas[0])
    assert registry.close() == (replicas[0],)
    assert not registry.add(replicas[1])
    assert (registry.find("a"), registry.find("b")) == (None, None)
    assert registry.close() == ()


def test_concurrent_readers_see_every_replica_with_its_priority(replicas: list[Replica]) -> None:
    registry, is_over, faults = ReplicaRegistry(), threading.Event(), []

    def look() -> None:
        while not is_over.is_set():
            present = registry.present
            if present.replicas.keys() != present.classes.keys():
                faults.append(present)

    def change(replica: Replica) -> None:
        for number in range(300):
            assert registry.claim(replica.key, number)
            registry.add(replica)
            registry.prioritise(replica.key, number + 1)
            registry.remove(replica.key)
            registry.release(replica.key)

    watcher = threading.Thread(target=look)
    changers = [threading.Thread(target=change, args=(replica,)) for replica in replicas]
    for thread in (watcher, *changers):
        thread.start()
    for thread in changers:
        thread.join()
    is_over.set()
    watcher.join()
    assert faults == []
    assert registry.claimed == {}


def test_progress_passes_every_stage_on_and_few_reports_of_one() -> None:
    reports: list[tuple[str, float]] = []
    report = throttled(lambda stage, fraction: reports.append((stage, fraction)), SYSTEM.now_s)
    for stage in ("download", "read", "compile"):
        for number in range(10_000):
            report(stage, number / 10_000)
    assert [stage for stage, fraction in reports if fraction == 0.0] == ["download", "read", "compile"]
    assert len(reports) < 300


def test_open_replica_reports_what_it_loaded_and_raises_for_a_missing_file() -> None:
    stages: list[str] = []
    replica, loaded = open_replica(
        Load("a", "stub://alpha", SMALL, TrialOptions()),
        lambda stage, fraction: stages.append(stage),
        lambda change: None,
    )
    assert (loaded.replica, loaded.name, loaded.config.num_blocks) == ("a", "alpha", 64)
    assert loaded.environment["executor"] == "stub"
    assert loaded.load_s > 0
    assert replica.metrics().gauges["num_requests_running"] == 0
    assert stages
    replica.close()
    with pytest.raises(ArtifactNotFoundError):
        open_replica(
            Load("a", "/nowhere/m.gguf", SMALL, TrialOptions(enabled=False)),
            lambda stage, fraction: None,
            lambda change: None,
        )
