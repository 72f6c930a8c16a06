"""The comparison: ratios of rounds, what is left out, what ends it, and the verb with our own server as a peer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.comparison.backends import answers_of, trial
from benchmarks.comparison.report import as_json, ratios, text_of
from benchmarks.comparison.rounds import Comparison, ComparisonOptions, run_comparison
from benchmarks.comparison.workloads import Answer, Workload
from lockstep.bench.client import Outcome
from lockstep.cli.main import invoke
from tests.processes import SOURCES
from tests.server.process import serve
from tests.waiting import HANG_S

TINY = ("--contexts", "8", "--streams", "1,2", "--output-len", "12", "--rounds", "2")


def test_tokens_of_one_chunk_came_together() -> None:
    outcome = Outcome(True, 5.0, ttft_s=1.0, itl_s=(2.0,), output_tokens=4)
    late = Outcome(True, 5.5, ttft_s=1.0, output_tokens=1)
    assert answers_of([outcome, late]) == [Answer(0.0, (1.0, 1.0, 3.0, 3.0)), Answer(0.5, (1.5,))]


def test_ratios_are_of_rounds_and_above_one_where_we_win() -> None:
    comparison = Comparison(ComparisonOptions("x"), {"lockstep": {"kind": "engine"}, "llama.cpp": {"kind": "engine"}})
    comparison.seen["w", "lockstep"] = {0: {"output_throughput": 10, "ttft_ms": 10}, 1: {"output_throughput": 30}}
    comparison.seen["w", "llama.cpp"] = {0: {"output_throughput": 5, "ttft_ms": 5}, 1: {"output_throughput": 10}}
    assert ratios(comparison, "w", "llama.cpp", "output_throughput") == [2.0, 3.0]
    assert ratios(comparison, "w", "llama.cpp", "ttft_ms") == [0.5]


def test_our_server_is_compared_with_engines_too() -> None:
    """Whoever chooses between them sees a server of ours, and at best the bare engine of another."""
    kinds = {"lockstep": "engine", "lockstep serve": "server", "llama.cpp": "engine"}
    comparison = Comparison(
        ComparisonOptions("x"), {name: {"kind": kind, "version": name, "ways": {}} for name, kind in kinds.items()}
    )
    for name, speed in (("lockstep", 12.0), ("lockstep serve", 10.0), ("llama.cpp", 4.0)):
        comparison.seen["200/64 x1", name] = {0: {"output_throughput": speed}}
    better = as_json(comparison)["times_better"]
    assert better["200/64 x1 llama.cpp output_throughput"]["median"] == 3.0
    assert better["200/64 x1 llama.cpp served output_throughput"]["median"] == 2.5
    assert len(better) == 2
    assert text_of(comparison).splitlines()[5].split()[-8:] == [
        "3.00",
        "(3.00",
        "to",
        "3.00)",
        "2.50",
        "(2.50",
        "to",
        "2.50)",
    ]


def test_work_with_too_many_prompt_tokens_is_left_out_and_named() -> None:
    options = ComparisonOptions("x", ((200, 64), (4000, 16)), (1, 8), max_prompt_tokens=4000)
    assert [work.name for work in options.workloads] == ["200/64 x1", "200/64 x8", "4000/16 x1", "4 prompts"]
    assert [work.name for work in options.left_out] == ["4000/16 x8"]


def test_engines_alone_have_no_work_that_needs_a_server() -> None:
    options = ComparisonOptions("x", ((200, 64),), (1,), only="engines", arrivals=2000, routed="m.yaml")
    assert [work.name for work in options.workloads] == ["200/64 x1"]


def test_a_trial_is_short_and_has_the_streams_of_its_work() -> None:
    for work in (Workload(4000, 1, 64), Workload(1000, 32, 200), Workload(8, 2, 4)):
        short = trial(work)
        assert short.streams == work.streams
        assert short.context <= work.context
        assert short.num_prompt_tokens <= 1024
        assert short.output <= min(24, work.output)


def test_a_race_goes_on_without_peers_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Our engine, our server, and another server of ours as a running peer; one is not installed, one is down."""
    path = tmp_path / "comparison.json"
    with serve("stub://alpha", "--worker", "thread") as server:
        urls = ("--peer-url", server.base_url, "--peer-url", "http://127.0.0.1:9")
        arguments = ["--peers", "llama_cpp.server,openvino-genai", "--result-filename", str(path)]
        more = ("--arrivals", "40", "--routed", "examples/customer-support.yaml")
        assert invoke(["bench", "peers", "stub://alpha", *TINY, *arguments, *urls, *more]) == 0
        printed = capsys.readouterr()
    result = json.loads(path.read_text())
    assert "without llama_cpp.server: " in printed.out
    assert "openvino-genai: not installed for " in printed.err
    assert "cannot connect to http://127.0.0.1:9" in result["out"]["http://127.0.0.1:9"]
    assert list(result["backends"]) == ["lockstep", "lockstep serve", "lockstep serve, routed", server.base_url]
    for work in ("8/12 x1", "8/12 x2"):
        for name in ("lockstep", "lockstep serve", server.base_url):
            assert len(result["figures"][f"{work} {name} output_throughput"]["values"]) == 2
    for figure in ("32 among 40 {} ttft_p99_ms", "routed {} request_ms", "routed {} hop_1_ms"):
        assert len(result["times_better"][figure.format(server.base_url)]) == 3
    assert "ollama create alpha" in printed.out
    assert (result["ended_by"], result["not_measured"]) == ("", [])
    own = result["figures"]["4 prompts lockstep serve output_throughput"]["values"]
    theirs = result["figures"][f"4 prompts {server.base_url} output_throughput"]["values"]
    ratio = result["times_better"][f"4 prompts {server.base_url} output_throughput"]
    pairs = [ours / other for ours, other in zip(own, theirs, strict=True)]
    assert (ratio["least"], ratio["greatest"]) == pytest.approx((min(pairs), max(pairs)))
    assert invoke(["bench", "compare", str(path), str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", "many"), "--contexts is 'many'"),
        (("--contexts", "8:0"), "--contexts, --streams and --output-len take numbers from 1"),
        (("--streams", "0"), "--output-len take numbers from 1"),
        (("--peers", "ollama"), "--peers has 'ollama'; the peers are llama.cpp"),
        (("--no-grid", "--no-suite"), "no workload is left"),
        (("--no-suite", "--no-grid", "--only", "engines"), "no workload is left"),
        (("--rounds", "0"), "--rounds is 0"),
        (("--routed", "nowhere.yaml"), "cannot read --routed nowhere.yaml"),
        (("--peer-url", "http://:x"), "--peer-url is 'http://:x'"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "peers", "stub://alpha", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


SLOW = "stub://alpha?step_ms=1"


@pytest.mark.parametrize(
    ("by", "only", "own"), [(signal.SIGTERM, "servers", "lockstep serve"), (signal.SIGINT, "engines", "lockstep")]
)
def test_a_race_that_is_ended_tells_what_was_measured(
    by: signal.Signals, only: Literal["engines", "servers"], own: str
) -> None:
    """The second round of the same work is interrupted in its middle: in an event loop, and before a pipe."""
    options = ComparisonOptions(SLOW, ((8, 1000),), (1,), peers=(), rounds=9, suite=False, only=only)
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if sentence.startswith("round 2"):
            threading.Timer(0.2, os.kill, (os.getpid(), by)).start()

    comparison = run_comparison(options, say)
    assert comparison.was_interrupted
    assert comparison.ended_by == {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[by]
    assert {key: list(rounds) for key, rounds in comparison.seen.items()} == {("8/1000 x1", own): [0]}
    assert said[-1].startswith("ended by ")


def test_the_limit_ends_a_race_wherever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The only answer would take ten minutes."""
    path, begin_s = tmp_path / "comparison.json", time.monotonic()
    work = ("--contexts", "8:8000", "--streams", "1", "--only", "engines", "--peers", "")
    end = ("--limit-s", "2", "--result-filename", str(path))
    assert invoke(["bench", "peers", "stub://alpha?step_ms=100", *work, *end]) == 0
    assert time.monotonic() - begin_s < 60
    result = json.loads(path.read_text())
    assert (result["ended_by"], result["figures"]) == ("--limit-s 2", {})
    assert "not measured: 8/8000 x1" in capsys.readouterr().out


def test_work_that_has_no_time_left_is_not_begun() -> None:
    options = ComparisonOptions(SLOW, ((8, 12), (8, 900_000)), (1,), peers=(), rounds=1, only="engines")
    comparison = run_comparison(options, lambda sentence: None)
    assert list(comparison.seen) == [("8/12 x1", "lockstep")]
    assert comparison.ended_by == "--limit-s 1200, too short for a round of 8/900000 x1"
    assert "not measured: 8/900000 x1" in text_of(comparison)


def test_an_installation_without_a_checkout_names_what_the_verb_needs(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "lockstep").symlink_to(SOURCES / "lockstep")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "bench", "peers", "stub://alpha"],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert "requires a checkout of the repository" in done.stderr
    assert done.stderr.count("\n") == 1
