"""`lockstep replay` and `lockstep bench replay` as they are called: files in, bytes out, faults in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import invoke

TRACE = "\n".join(
    json.dumps({"timestamp": 100 * number, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, number + 2]})
    for number in range(12)
)
CLASSES: dict[str, Any] = {
    "config": {"block_size": 16, "num_blocks": 20, "max_num_seqs": 1},
    "requests": [
        {"id": "running", "prompt_tokens": 30, "max_output_tokens": 2},
        {"id": 7, "prompt_tokens": 30, "max_output_tokens": 1, "arrival_tick": 1},
        {"id": "urgent", "prompt_tokens": 30, "max_output_tokens": 1, "priority": "high", "arrival_tick": 1},
    ],
}
COST = {
    "constant_ps": 10**9,
    "prefill_step_ps": 0,
    "prefill_token_ps": 10**6,
    "decode_seq_ps": 0,
    "context_token_ps": 0,
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return str(path)


def test_written_report_equals_the_printed_one(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert invoke(["replay", trace, "--output", str(path), "--json", "--slo", "ttft:500,tpot:50"]) == 0
    printed = capsys.readouterr()
    assert printed.out == path.read_text()
    report = json.loads(printed.out)
    assert (report["requests_completed"], report["config"]["block_size"]) == (12, 512)
    assert report["goodput"]["requests"] == 12
    assert report["prefix_hit_tokens"] == 11 * 1024
    assert "requests/s, peak memory" in printed.err


TOO_LONG: dict[str, Any] = {
    "config": {"block_size": 16, "num_blocks": 2},
    "requests": [{"id": name, "prompt_tokens": 500, "max_output_tokens": 5} for name in ("first", "second")],
}


def test_a_replay_that_refuses_every_request_fails_with_the_reason_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "long.json", tmp_path / "report.json"
    path.write_text(json.dumps(TOO_LONG))
    assert invoke(["replay", str(path), "--output", str(report)]) == 1
    assert "2 requests were refused, first first: the prompt has 500 tokens" in capsys.readouterr().err
    assert json.loads(report.read_text())["requests_refused"] == 2
    assert invoke(["replay", str(path), "--set-b", "num_blocks=200"]) == 1, "one of two runs served nothing"
    assert invoke(["replay", str(path), "--set", "num_blocks=200"]) == 0
    some = {**TOO_LONG, "requests": [*TOO_LONG["requests"], {"id": "c", "prompt_tokens": 9, "max_output_tokens": 1}]}
    path.write_text(json.dumps(some))
    assert invoke(["replay", str(path)]) == 0, "one was served"


def test_replicas_that_refuse_every_request_fail(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", trace, "--replicas", "2", "--set", "num_blocks=2"]) == 1
    assert capsys.readouterr().err.count("all 12 requests were refused") == 2
    assert invoke(["replay", trace, "--replicas", "2"]) == 0


def test_replay_applies_the_given_options(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({**COST, "made_by": "hand"}))
    arguments = [
        "--limit",
        "5",
        "--speed",
        "2",
        "--set",
        "max_num_seqs=3,block_size=256",
        "--cost",
        str(cost),
        "--ticks",
    ]
    assert invoke(["replay", "--input", trace, "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["config"]["max_num_seqs"], report["config"]["block_size"]) == (5, 3, 256)
    assert report["cost_ps"] == COST
    assert [outcome["arrival_ps"] for outcome in report["outcomes"]] == [50 * 10**9 * number for number in range(5)]
    assert sum(len(tick["completed"]) for tick in report["ticks"]) == 5


def test_two_runs_are_two_reports(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    crowded = ["replay", trace, "--json", "--speed", "10", "--set", "max_num_seqs=4", "--set-b", "max_num_seqs=1"]
    assert invoke(crowded) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["config"]["max_num_seqs"], second["config"]["max_num_seqs"]) == (4, 1)
    assert first["fingerprint"] != second["fingerprint"]
    assert invoke(["replay", trace, "--json", "--compare", trace]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give exactly one file: `lockstep replay FILE`, or --input FILE"),
        (["FILE", "--input", "other"], "give exactly one file"),
        (["absent.json"], "absent.json"),
        (["FILE", "--set", "max_num_seq=3"], "'max_num_seq'; did you mean max_num_seqs"),
        (["FILE", "--set-b", "order=best"], "order is 'best'; it must be fcfs, priority or fair"),
        (["FILE", "--set", "max_num_seqs=0"], "max_num_seqs is 0; it must be"),
        (["FILE", "--slo", "ttfb:5"], "--slo has 'ttfb:5'; write ttft:500,tpot:50"),
        (["FILE", "--tick-ms", "-1"], "a step cannot take -1.0 ms"),
        (["FILE", "--tick-ms", "1", "--cost", "FILE"], "give one of them"),
        (["FILE", "--cost", "FILE"], "is not a cost model"),
        (["FILE", "--cost", "absent"], "absent: cannot read the cost model"),
        (["FILE", "--speed", "0"], "the speed is 0.0; it must be positive"),
        (["FILE", "--limit", "0"], "--limit"),
        (["FILE", "--output", "."], ".: the report cannot be written there: it is a directory; give a file in it"),
        (["FILE", "--ticks"], "--ticks requires --output FILE or --json"),
    ],
)
def test_invalid_arguments_are_one_line_with_exit_code_2(
    trace: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["replay", *[trace if each == "FILE" else each for each in arguments]]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lockstep: error: ")]
    assert len(errors) == 1
    assert complaint in errors[0]


def test_a_price_below_zero_is_refused(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({**COST, "decode_seq_ps": -1}))
    assert invoke(["replay", trace, "--cost", str(cost)]) == 2
    assert "decode_seq_ps is -1; it must be at least 0" in capsys.readouterr().err


def test_bench_replay_decides_the_same_with_run_lengths_and_single_steps(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["bench", "replay", trace, "--rounds", "1", "--set", "max_num_seqs=3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    counted, single = result["run_lengths"], result["single_steps"]
    assert counted["fingerprint"] == single["fingerprint"]
    assert (counted["requests"], counted["steps"]) == (single["requests"], single["steps"])
    assert counted["decided_steps"] < single["decided_steps"] == single["steps"]
    assert not result["faults"]
    assert invoke(["bench", "replay", trace, "--rounds", "1"]) == 0
    assert "peak memory" in capsys.readouterr().out


def test_a_replay_beyond_the_calibrated_range_warns_of_extrapolation(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a report and in a sweep, where it is some of the configs."""
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({**COST, "ranges": {"prefill tokens": [0, 600], "decoding sequences": [0, 1]}}))
    words = [trace, "--cost", str(cost), "--speed", "100"]
    assert invoke(["replay", *words]) == 0
    assert "Note: times are extrapolated for " in capsys.readouterr().out
    limits = ["--set", "max_num_batched_tokens=512", "--grid", "max_num_seqs=1,4", "--jobs", "1"]
    assert invoke(["sweep", *words, *limits]) == 0
    noted = [line for line in capsys.readouterr().out.splitlines() if "beyond the measured range" in line]
    assert len(noted) == 1
    assert noted[0].startswith("1 config has steps beyond the measured range, such as max_num_seqs=4: ")


def replayed(load: object, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The report of a workload, as `--output` writes it."""
    (tmp_path / "load.json").write_text(json.dumps(load))
    path = tmp_path / "report.json"
    assert invoke(["replay", str(tmp_path / "load.json"), "--output", str(path), *arguments]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_every_tick_is_in_the_report_by_the_names_of_the_file(tmp_path: Path) -> None:
    """One record for each tick, idle ones too; what did not happen is an empty list."""
    load = {**CLASSES, "requests": [*CLASSES["requests"], {**CLASSES["requests"][0], "id": "late", "arrival_tick": 7}]}
    ticks = replayed(load, tmp_path)["ticks"]
    assert [tick["tick"] for tick in ticks] == list(range(9))
    assert [tick["admitted"] for tick in ticks] == [["running"], [], ["urgent"], ["7"], [], [], [], ["late"], []]
    assert [tick["completed"] for tick in ticks] == [[], ["running"], ["urgent"], ["7"], [], [], [], [], ["late"]]
    assert [tick["queued"] for tick in ticks] == [0, 2, 1, 0, 0, 0, 0, 0, 0]
    assert len({tuple(tick) for tick in ticks}) == 1, "every record has every key"
    assert replayed(load, tmp_path, "--no-ticks")["ticks"] is None


def test_ticks_of_a_long_replay_need_the_ticks_flag(tmp_path: Path) -> None:
    def idle_for(num_ticks: int) -> dict[str, Any]:
        requests = [
            {"id": str(arrival), "prompt_tokens": 4, "max_output_tokens": 1, "arrival_tick": arrival}
            for arrival in (0, num_ticks - 1)
        ]
        return {"requests": requests}

    assert len(replayed(idle_for(10_000), tmp_path)["ticks"]) == 10_000
    report = replayed(idle_for(10_001), tmp_path)
    assert (report["ticks"], report["outcomes"]) == (None, None)
    assert report["notes"] == ["the JSON report has no ticks, because there are 10,001; --ticks includes them"]
    report = replayed(idle_for(10_001), tmp_path, "--ticks")
    assert (len(report["ticks"]), report["notes"]) == (10_001, [])


def test_priorities_are_followed_unless_an_order_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says so either way; whoever gets the order that was asked for is told nothing."""
    admitted = {}
    for order, said in (
        ("", "requests have priorities and no order is set"),
        ("fcfs", "order is fcfs, so"),
        ("priority", ""),
    ):
        report = replayed(CLASSES, tmp_path, *(["--set", f"order={order}"] if order else []))
        admitted[order] = [name for tick in report["ticks"] for name in tick["admitted"]]
        printed = capsys.readouterr().out
        assert (f"Note: {said}" in printed) == bool(said)
        assert [note[: len(said)] for note in report["notes"]] == ([said] if said else [])
    assert admitted[""] == admitted["priority"] == ["running", "urgent", "7"]
    assert admitted["fcfs"] == ["running", "7", "urgent"]


def test_warnings_of_replay_commands_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load.json").write_text(json.dumps(CLASSES))
    (tmp_path / "a.yaml").write_text("max_num_seqs: 2\n")
    load, limits = str(tmp_path / "load.json"), str(tmp_path / "a.yaml")
    for command in (
        ["diff", load, "--set-b", "max_num_seqs=2"],
        ["bisect", load, "--from", limits, "--to", limits, "--metric", "total_ticks"],
        ["sweep", load, "--grid", "max_num_seqs=1,2", "--jobs", "1"],
    ):
        invoke(command)
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert [line.split(",")[0] for line in told] == ["note: requests have priorities and no order is set"]
    assert invoke(["sweep", load, "--grid", "order=fcfs,priority", "--jobs", "1"]) == 0
    assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--routing", "prefix"), ("--max-imbalance", "2")])
def test_routing_flags_without_several_replicas_are_rejected(
    trace: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    assert invoke(["replay", trace, *flags]) == 2
    assert f"{flags[0]} requires --replicas N" in capsys.readouterr().err
    assert invoke(["replay", trace, "--replicas", "2", *flags]) == 0
    assert "2 replicas" in capsys.readouterr().out
