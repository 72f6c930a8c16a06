"""Frames: every size fits, rows are sorted and cut, and what others wrote is only text."""

from __future__ import annotations

import dataclasses
import random

from msgspec.structs import replace as changed

from lockstep.cli.top_client import View
from lockstep.cli.top_view import SORTS, ViewOptions, view_lines
from lockstep.cluster.cluster_stats import EngineStats, StoreTier
from lockstep.cluster.events import ClusterEvent
from lockstep.cluster.snapshot import BudgetSnapshot, EngineSnapshot, SessionSnapshot
from lockstep.server.request_rows import RequestReplay, RequestWait
from tests.cli.views import URL, request_of, snapshot_of, view_of
from tests.server.managing import Hosted

MANY = tuple(f"model-{at:02}" for at in range(50))
HOSTILE = "x\x1b]0;owned\x07[bold]\n" + "宽" * 40
STORE = (StoreTier("host", 7, 5_000_000, 10_000_000, 0, 3, 2, 0),)


def lines_of(view: View, options: ViewOptions | None = None, width: int = 160, height: int | None = None) -> list[str]:
    return [line.plain.rstrip() for line in view_lines(view, options or ViewOptions(), width, height)]


def models_of(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("model-")]


def crowded() -> View:
    """Much of everything, with names that nobody would choose."""
    sessions = tuple(SessionSnapshot(f"{HOSTILE}{at}", HOSTILE, "idle", 9.0, at, 1, 64, 32) for at in range(30))
    cluster = snapshot_of((HOSTILE, *MANY), sessions=sessions, warnings=(HOSTILE, "b", "c"), cluster=HOSTILE)
    events = tuple(ClusterEvent(at, at, "hop", {"model": HOSTILE, "target": HOSTILE}) for at in range(40))
    fields = {"model": HOSTILE, "session_id": HOSTILE, "error": HOSTILE}
    requests = tuple(request_of(f"{HOSTILE}{at}", "ended", **fields) for at in range(20))
    return view_of(cluster, tiers=STORE, events=events, requests=requests, error=HOSTILE)


def test_every_size_is_filled_and_never_left() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    sizes = [(60, 15), (80, 24), (160, 50), (200, 60), (20, 5), (1, 1)]
    sizes += [(draw.randint(1, 220), draw.randint(1, 70)) for _ in range(12)]
    view = crowded()
    for width, height in sizes:
        options = ViewOptions(draw.choice(SORTS), draw.random() < 0.5, draw.random() < 0.5, draw.randint(0, 60))
        lines = view_lines(view, options, width, height, "q quit")
        assert len(lines) == height, (width, height)
        assert max(line.cell_len for line in lines) <= width, (width, height, options)


def test_text_of_callers_is_one_printable_line() -> None:
    for line in view_lines(crowded(), ViewOptions(), 160, 50):
        assert line.plain.isprintable(), line.plain
    assert any("[bold]" in line for line in lines_of(crowded()))


def test_the_head_shows_the_name_status_and_rates() -> None:
    first, second, *_ = lines_of(view_of(snapshot_of(), uptime_s=180.0))
    assert first == f"lockstep top  small  ready  up 3 min  1.2.3  {URL}"
    assert second.startswith("running 1  waiting 0  tokens/s -  requests/s -  sessions 1  requests 3")


def test_requests_that_wait_in_an_engine_are_not_running() -> None:
    view = view_of(snapshot_of())
    engines = (EngineStats("router", num_waiting=1),)
    stats = changed(view.server.stats, engines=engines)
    server = dataclasses.replace(view.server, stats=stats)
    _, second, *_ = lines_of(dataclasses.replace(view, server=server))
    assert second.startswith("running 0  waiting 1 ")


def test_header_names_the_computation_of_models() -> None:
    cluster = snapshot_of(("a", "b", "c"))
    engine = EngineSnapshot(100, 4, 320, 1 << 20, 0, 0, 1 << 20, "avx2", 2, "f16", "none")
    replicas = tuple(
        changed(each, engine=found) for each, found in zip(cluster.replicas, (engine, engine, None), strict=True)
    )
    assert "  avx2, 2 threads  up" in lines_of(view_of(changed(cluster, replicas=replicas)))[0]


def test_tasks_are_shown_if_a_model_is_not_for_text() -> None:
    cluster = snapshot_of(("chat", "vectors"))
    tasks = ("generate", "embed")
    models = tuple(changed(model, task=task) for model, task in zip(cluster.models, tasks, strict=True))
    lines = lines_of(view_of(changed(cluster, models=models)))
    head = next(line for line in lines if line.startswith("MODEL"))
    shown = {
        line.split()[0]: line[head.index("TASK") :].split()[0] for line in lines if line.startswith(("chat", "vectors"))
    }
    assert shown == {"chat": "generate", "vectors": "embed"}
    assert not any("TASK" in line for line in lines_of(view_of(snapshot_of())))


def test_accepted_drafts_are_shown_while_a_model_makes_drafts() -> None:
    view = view_of(snapshot_of(("router", "billing")))
    assert not any("DRAFTS" in line for line in lines_of(view))
    engines = (EngineStats("router"), EngineStats("billing", draft_share=0.625))
    server = dataclasses.replace(view.server, stats=changed(view.server.stats, engines=engines))
    lines = lines_of(dataclasses.replace(view, server=server))
    end = next(line.index("DRAFTS") + len("DRAFTS") for line in lines if "DRAFTS" in line)
    shown = {line.split()[0]: line[:end].split()[-1] for line in lines if line.startswith(("router", "billing"))}
    assert shown == {"router": "-", "billing": "62%"}


def test_fifty_models_are_cut_and_scrolled() -> None:
    view = view_of(snapshot_of(MANY))
    shown = lines_of(view, height=20)
    assert models_of(shown) == list(MANY[: len(models_of(shown))])
    assert f"… {50 - len(models_of(shown))} more" in shown
    options = ViewOptions().press("pagedown", 50)
    assert models_of(lines_of(view, options, height=20))[0] == "model-10"
    assert models_of(lines_of(view, options.press("end", 50), height=20))[-1] == "model-49"
    assert options.press("home", 50) == ViewOptions()
    assert models_of(lines_of(view)) == list(MANY), "without a bound all of them"


def test_models_are_sorted_by_a_column_and_ties_stay() -> None:
    names = ("model-a", "model-c", "model-b", "model-d")
    view = view_of(snapshot_of(names), {"model-a": 5, "model-c": 90, "model-b": 5})
    order = ["model-c", "model-a", "model-b", "model-d"]
    assert models_of(lines_of(view, ViewOptions("TOK/S"))) == order
    assert "TOK/S ▼" in "".join(lines_of(view, ViewOptions("TOK/S")))
    assert models_of(lines_of(view, ViewOptions("TOK/S", is_reversed=True))) == [
        "model-a",
        "model-b",
        "model-c",
        "model-d",
    ]
    assert models_of(lines_of(view, ViewOptions("MODEL"))) == sorted(names)
    assert models_of(lines_of(view, ViewOptions("MODEL", is_reversed=True))) == sorted(names, reverse=True)
    assert models_of(lines_of(view)) == list(names)


def test_keys_select_the_sort_column_and_pause() -> None:
    options = ViewOptions()
    for name in (*SORTS[1:], SORTS[0]):
        options = options.press("s", 4)
        assert options.sort == name
    assert options.press("S", 4).sort == SORTS[-1]
    assert options.press("r", 4).is_reversed
    assert options.press("p", 4).is_paused
    assert not options.press("p", 4).press(" ", 4).is_paused
    assert options.press("down", 4).press("j", 4).press("k", 4).offset == 1
    assert options.press("up", 4).offset == 0
    assert options.press("pagedown", 4).offset == 3
    assert options.press("x", 4) == options


def test_figures_of_a_shared_engine_stand_once() -> None:
    cluster = snapshot_of(("model-a", "model-b"))
    [shared, _] = cluster.replicas
    both = changed(shared, models=("model-a", "model-b"))
    models = tuple(changed(model, replica=shared.key) for model in cluster.models)
    lines = lines_of(view_of(changed(cluster, models=models, replicas=(both,)), {"model-a": 250}))
    first, second = (line for line in lines if line.startswith("model-"))
    assert " 250 " in first
    assert " 250 " not in second
    assert " · " in second


def test_memory_is_a_bar_for_each_budget_and_tier() -> None:
    budgets = (BudgetSnapshot("gpu_budget", 100, 80, 40), BudgetSnapshot("ram_budget", None, None, 5_000))
    lines = lines_of(view_of(snapshot_of(budgets=budgets), tiers=STORE))
    [gpu, ram] = [line for line in lines if "_budget" in line or line.startswith("memory for ")]
    assert gpu == f"gpu_budget  {'█' * 12}{'░' * 12}     40 B of 80 B      50%"
    assert ram == "memory for standby models  5 kB in use, no limit set"
    [host] = [line for line in lines if line.startswith("kv on host")]
    assert host.endswith("5 MB of 10 MB     50%  loaded 3  rejected 2  evicted 0  7 blocks")


def test_hosts_and_replicas_are_shown_where_there_are_several_hosts() -> None:
    lines = lines_of(view_of(Hosted().snapshot()), width=160)
    at = next(index for index, line in enumerate(lines) if line.startswith("HOST "))
    assert lines[at].split() == ["HOST", "ADDRESS", "STATE", "REPLICAS", "FREE"]
    assert [line.split()[:4] for line in lines[at + 1 : at + 4]] == [
        ["a", "10.0.0.1", "there", "1"],
        ["b", "10.0.0.2", "there", "1"],
        ["gone", "10.0.0.3", "lost", "0"],
    ]
    assert lines[at + 4].split()[:4] == ["REPLICA", "STATE", "HOST", "ADDRESS"]
    assert [line.split()[:3] for line in lines[at + 5 : at + 8]] == [
        ["router#0", "ready", "a"],
        ["router#1", "loading", "b"],
        ["org/legal#0", "waiting", "-"],
    ]
    assert any("org/legal#0 is waiting: no host has 4 CPU free" in line for line in lines[:6])


def test_a_cluster_on_one_machine_has_no_hosts() -> None:
    heads = [line.split()[0] for line in lines_of(view_of(snapshot_of())) if line]
    assert "HOST" not in heads
    assert "REPLICA" not in heads


def test_sessions_and_requests_and_events_stand_newest_first() -> None:
    idle_s = {"old": 8.0, "new": 1.0}
    sessions = tuple(SessionSnapshot(name, "router", "idle", 9.0, each, 2, 64, 96) for name, each in idle_s.items())
    events = (
        ClusterEvent(1, 1.0, "hop", {"model": "router", "target": "legal", "duration_ms": 12.0}),
        ClusterEvent(2, 2.0, "kv_rejected", {"reason": "checksum"}),
    )
    requests = (request_of("req-2", "running", model="router"), request_of("req-1", "ended", error="deadline"))
    lines = lines_of(view_of(snapshot_of(sessions=sessions), events=events, requests=requests), width=100)
    whole = "\n".join(lines)
    assert whole.index("req-2") < whole.index("req-1") < whole.index("new") < whole.index("old")
    assert whole.index("kv_rejected  reason checksum") < whole.index("hop  router → legal, 12 ms")
    assert "REQUEST " not in "\n".join(lines_of(view_of(snapshot_of()))), "a server that does not list them"


def test_a_lost_server_and_failed_models_are_shown() -> None:
    cluster = snapshot_of()
    failed = changed(cluster, models=(changed(cluster.models[0], state="failed", reason="the file is gone"),))
    lines = lines_of(view_of(failed, error="cannot connect to it", status="not ready"))
    assert lines[1] == "reconnecting: cannot connect to it"
    assert "router: the file is gone" in lines
    assert "not ready" in lines[0]


def test_a_request_shows_why_it_waited_and_the_newest_shows_its_replay_command() -> None:
    command = f"lockstep replay --verify /trace{HOSTILE}"
    places = tuple(RequestReplay("router", "0", at, 40 + at, command) for at in range(2))
    reasons = ("1 place for a sequence, which is taken", HOSTILE)
    waits = tuple(RequestWait("router", "no_place", reason, 0.0, 0.0) for reason in reasons)
    requests = (
        request_of("req-3", "waiting"),
        *(request_of(f"req-{at}", "ended", waits=waits, replay=places) for at in (2, 1)),
    )
    lines = lines_of(view_of(snapshot_of(), requests=requests), width=400)
    [second] = [line for line in lines if line.startswith("req-2")]
    assert "1 place for a sequence, which is taken; x" in second
    [told] = [line for line in lines if line.startswith("replay of ")]
    assert told.startswith("replay of req-2: lockstep replay --verify /trace")
    assert told.endswith("(sequence 0 from step 40)")
    hidden = (request_of("req-1", "ended", replay=(RequestReplay("router", "0", 0, 1, None),)),)
    assert not [line for line in lines_of(view_of(snapshot_of(), requests=hidden)) if "replay of" in line]
