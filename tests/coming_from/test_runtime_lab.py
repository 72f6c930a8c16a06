"""The sentences of docs/coming-from.md for users of runtime-lab are true: each is run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import command_of
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.replay.configs import check_field
from tests.coming_from.offline import (
    EXAMPLES,
    PRESSURE,
    example_verdict,
    pressure,
    printed,
    report,
    run,
    scheduler,
    verdict,
    workload,
)
from tests.coming_from.page import of_kind, states

LIMITS = [claim.partition("=")[0] for row in of_kind("Limits", "runtime-lab") for claim in row.claims]


@states("`--json` prints the report as one JSON object.")
def test_a_report_is_one_object() -> None:
    assert isinstance(json.loads(printed("replay", PRESSURE, "--json")), dict)


@states("Creates the folder. The same replay writes the same bytes.")
def test_a_report_is_written_with_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name / "report.json" for name in ("one", "two")]
    for path in paths:
        printed("replay", PRESSURE, "--output", str(path))
    assert paths[0].read_bytes() == paths[1].read_bytes()


@states("`--set` takes every field of the next table.", "Every field of the next table is a flag of `serve`.")
@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_a_field_and_a_flag(name: str) -> None:
    check_field(name, "unknown")
    flags = {flag for parameter in command_of("serve").params for flag in parameter.opts}
    assert f"--{name.replace('_', '-')}" in flags


@states("`diff` reports the first step that differs, and why.")
def test_a_difference_has_its_step_and_its_reason() -> None:
    found = json.loads(printed("diff", PRESSURE, "--set-b", "max_num_seqs=2", "--json", code=1))
    assert (found["tick"], found["decided_by"]["alone"]) == (4, ["max_num_seqs"])
    assert "2 of 2 sequences run" in found["reasons"][1]


@states("With `--slo` it reports the cheapest config that meets the goals.")
def test_a_sweep_reports_the_cheapest() -> None:
    goals = ("--slo", "ttft:120", "--tick-ms", "10", "--slo-percent", "50", "--jobs", "1")
    assert "cheapest" in printed("sweep", PRESSURE, "--grid", "max_num_seqs=2,3", *goals)


def observation(number: int, **more: Any) -> dict[str, Any]:
    return {"request_id": f"r{number}", "model": "m", "latency_ms": 100.0, "token_ids": [1, 2, number], **more}


def side(num: int = 6, **more: Any) -> list[dict[str, Any]]:
    return [observation(number, **more) for number in range(num)]


@states("Exit code 0 promote, 1 rollback, 2 hold, 3 no verdict.")
def test_exit_codes_are_those_of_the_decisions(tmp_path: Path) -> None:
    assert example_verdict("release_gate_safe.json", 0)["decision"] == "promote"
    assert example_verdict("release_gate_bad.json", 1)["decision"] == "rollback"
    assert verdict(tmp_path, 2, side(1), side(1), min_pairs=5)["decision"] == "hold"
    printed("gate", str(tmp_path / "missing.json"), code=3)


@states("Reads files of vLLM, SGLang and [other tools](gate-reference.md#formats).")
@pytest.mark.parametrize("name", ["backend_mirror_vllm_sglang", "backend_mirror_streaming_vllm_sglang"])
def test_mirrored_files_are_converted(name: str, tmp_path: Path) -> None:
    path = tmp_path / "gate-input.json"
    printed("mirror", str(EXAMPLES / f"{name}.json"), "--output", str(path))
    pairs = json.loads(path.read_text())["pairs"]
    assert [(pair["baseline"]["backend"], pair["candidate"]["backend"]) for pair in pairs] == [("vllm", "sglang")] * 6


@states("The same verdict as `mirror` and then `gate`.")
def test_mirror_gate_is_mirror_and_gate(tmp_path: Path) -> None:
    mirrored, path = str(EXAMPLES / "backend_mirror_vllm_sglang.json"), str(tmp_path / "gate-input.json")
    printed("mirror", mirrored, "--output", path)
    both, one = (json.loads(printed(*verb, "--json")) for verb in (("gate", path), ("mirror-gate", mirrored)))
    assert (both["decision"], both["summary"], both["segments"]) == (one["decision"], one["summary"], one["segments"])


@states("Sequences that run at once.")
def test_active_slots() -> None:
    assert [report(PRESSURE, "--set", f"max_num_seqs={most}")["max_active"] for most in (1, 2)] == [1, 2]


@states(
    "The first limits the prompt tokens of a step, the second all its tokens.",
    "No limit but the token budget.",
    "Decoding tokens count too, and no step exceeds it.",
)
def test_prompt_tokens_and_all_tokens_of_a_step() -> None:
    requests = [Request(40, 30) for _ in range(6)]
    for prefill in (None, 8):
        core = scheduler(max_num_batched_tokens=24, max_num_prefill_tokens=prefill, max_num_decode_seqs=8)
        plans = run(core, *requests)
        assert max(plan.num_tokens for plan in plans) == 24 if prefill is None else True
        assert max(plan.num_prompt_tokens for plan in plans) == (prefill or 24)
        assert all(plan.num_tokens <= 24 for plan in plans)
    assert any(plan.has_prefill and plan.has_decode for plan in plans)


@states("Sequences that get a token in one step.")
def test_decode_width() -> None:
    plans = run(scheduler(max_num_decode_seqs=2), *[Request(8, 8) for _ in range(5)])
    assert max(plan.num_samples for plan in plans) == 2


@states(
    "The default: round robin weighted by priority, with [a bound on every wait](workloads.md#the-order-of-decoding)."
)
def test_sequences_take_turns_by_their_weights() -> None:
    """With one place, a critical and a low sequence share as 8 to 1, and the low one is never left out."""
    core = scheduler(max_num_decode_seqs=1)
    critical, low = (core.add(Request(8, 90, priority=priority)) for priority in (-2, 1))
    sampled = [plan.seq_ids[plan.samples.index(True)] for plan in run(core) if plan.num_samples]
    shared = sampled[2:74]
    assert (shared.count(critical), shared.count(low)) == (64, 8)


@states(
    "Never preempts. The default, `optimistic`, allocates blocks as the output grows, and may preempt.",
    "More sequences run at once.",
    "Empty and 0 with `admission=reserve`.",
)
def test_reserving_admission_never_preempts(tmp_path: Path) -> None:
    path = workload(tmp_path, [{"prompt_tokens": 32, "max_output_tokens": 40}] * 3, num_blocks=7)
    names = ("preempted", "resumed", "swapped_out_blocks", "swapped_in_blocks")
    reserving, optimistic = (report(path, "--set", f"admission={way}") for way in ("reserve", "optimistic"))
    assert not any(tick[name] for tick in reserving["ticks"] for name in names)
    assert any(tick["preempted"] for tick in optimistic["ticks"])
    assert reserving["max_active"] < optimistic["max_active"]


@states("The default, `true`, splits long prompts into chunks.", "A long prompt does not delay the tokens of others.")
def test_prompts_are_whole_without_chunking() -> None:
    requests = (Request(4, 40), Request(100, 4))
    whole = run(scheduler(chunking=False), *requests)
    parts = run(scheduler(max_num_batched_tokens=20, max_num_decode_seqs=4), *requests)
    assert sum(plan.num_prompt_tokens > 1 for plan in whole) == 1
    prefilling = [plan for plan in parts if plan.has_prefill]
    assert len(prefilling) > 4
    assert all(plan.has_decode for plan in prefilling[1:]), "the short request gets a token in each of these steps"


@states("The default of a replay whose requests have priorities.")
def test_a_replay_of_priorities_goes_by_them(tmp_path: Path) -> None:
    requests = [{"prompt_tokens": 16, "max_output_tokens": 4, "priority": name} for name in ("low", "normal", "high")]
    ticks = report(workload(tmp_path, requests, max_num_seqs=1))["ticks"]
    assert [id_ for tick in ticks for id_ in tick["admitted"]] == ["r2", "r1", "r0"]


@states("Skipped at most this often (64 by default); then later requests wait behind it.")
def test_a_request_is_skipped_so_often_and_no_more(tmp_path: Path) -> None:
    """One that runs leaves too few blocks for the large one behind it; small ones overtake it twice."""
    running = {"prompt_tokens": 48, "max_output_tokens": 40}
    small = {"prompt_tokens": 16, "max_output_tokens": 2}
    requests = [running, {"prompt_tokens": 96, "max_output_tokens": 4}, small, small, small]
    path = workload(tmp_path, requests, num_blocks=10, admission="reserve")
    [bounded, default] = (
        [id_ for tick in report(path, *flags)["ticks"] for id_ in tick["admitted"]]
        for flags in (("--set", "max_skips=2"), ())
    )
    assert default == ["r0", "r2", "r3", "r4", "r1"]
    assert bounded.index("r1") == 3
    assert SchedulerConfig(block_size=16, num_blocks=64, max_model_len=512).max_skips == 64


@states("A request that can never fit is refused and counted apart.")
def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    path = workload(tmp_path, [{"prompt_tokens": n, "max_output_tokens": 4} for n in (16, 600)], admission="reserve")
    found = report(path)
    assert (found["requests_completed"], found["requests_refused"]) == (1, 1)


@states("Tokens of a tick, sequences of a tick, blocks.")
def test_capacities_are_the_limits_of_the_workload() -> None:
    config = json.loads(Path(PRESSURE).read_text())["config"]
    names = ("max_num_prefill_tokens", "max_num_decode_seqs", "num_blocks")
    capacities = [pressure()[name] for name in ("prefill_capacity", "decode_capacity", "kv_capacity")]
    assert capacities == [config[name] for name in names]


@states("Rounded to 6 decimals.")
def test_rates_have_six_decimals() -> None:
    for name in ("prefill_utilization", "decode_utilization", "kv_occupancy"):
        assert pressure()[name] == round(pressure()[name], 6)


@states("16 hex digits. They differ from runtime-lab's, whose input bytes were not published.")
def test_a_fingerprint_has_16_digits() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", pressure()["fingerprint"])


@states("The ids of the workload.")
def test_ticks_have_the_ids_of_the_workload() -> None:
    ids = {id_ for tick in pressure()["ticks"] for id_ in tick["admitted"]}
    assert ids == {request["id"] for request in json.loads(Path(PRESSURE).read_text())["requests"]}


@states("Counted after admission, before finished requests release their blocks.")
def test_the_last_tick_still_counts_what_ends_in_it() -> None:
    last = pressure()["ticks"][-1]
    assert last["completed"]
    assert (last["active"], last["used_blocks"] > 0) == (len(last["completed"]), True)
    assert pressure()["all_blocks_returned"]


# -- observations and verdicts ----------------------------------------------------------------------------------------


@states("Pairs the two sides.")
def test_the_request_id_pairs(tmp_path: Path) -> None:
    assert verdict(tmp_path, 0, side(), side()[::-1])["joining"]["by_key"] == {"request_id": 6}


@states("A changed version is listed in `transitions` of the verdict.")
def test_a_changed_version_is_a_transition(tmp_path: Path) -> None:
    [transition] = verdict(tmp_path, 0, side(model_version="v1"), side(model_version="v2"))["transitions"]
    assert re.search("v1.*v2", transition)


@states("Parts of a segment's name, with the model.", "Named by model, backends and accelerator.")
def test_a_segment_has_model_backends_and_accelerator(tmp_path: Path) -> None:
    sides = (side(backend=backend, accelerator="h100") for backend in ("vllm", "sglang"))
    [segment] = verdict(tmp_path, 0, *sides)["segments"]
    assert all(word in segment["name"] for word in ("m", "vllm", "sglang", "h100"))


@states("An observation with an `error` and no `ok` counts as failed.")
def test_an_error_is_a_failure(tmp_path: Path) -> None:
    failed = [{"request_id": "r0", "error": "out of memory"}, *side()[1:]]
    rates = verdict(tmp_path, 1, side(), failed)["summary"]["figures"]["error_rate"]
    assert (rates["baseline"], rates["candidate"] > 0) == (0.0, True)


@states(
    "In milliseconds.",
    "Objects of `index`, `token_id` and `elapsed_ms`. Time to first token and gaps are computed from them.",
)
def test_streamed_tokens_give_the_times(tmp_path: Path) -> None:
    events = [{"index": at, "token_id": at, "elapsed_ms": 40.0 + 10 * at} for at in range(3)]
    streamed = [{"request_id": f"r{n}", "latency_ms": 70.0, "stream_events": events} for n in range(6)]
    figures = verdict(tmp_path, 0, streamed, streamed)["summary"]["figures"]
    times = [figures[name]["candidate"] for name in ("latency_p95_ms", "ttft_p95_ms", "decode_p95_ms")]
    assert times == [70.0, 40.0, 10.0]


@states("In any unit: their quotient is compared.")
def test_kv_pressure_is_a_quotient(tmp_path: Path) -> None:
    blocks, bytes_ = side(kv_used=30, kv_total=40), side(kv_used=3e9, kv_total=4e9)
    pressures = verdict(tmp_path, 0, blocks, bytes_)["summary"]["figures"]["kv_pressure_p95"]
    assert (pressures["baseline"], pressures["candidate"]) == (0.75, 0.75)


@states("Provenance needs a route and a scheduler.", "The baseline has both as well.")
@pytest.mark.parametrize(
    ("known", "rate"), [({"route_id": "a"}, 0.0), ({"route_id": "a", "scheduler": "s"}, 1.0)], ids=["route", "both"]
)
def test_provenance_needs_both(known: Mapping[str, Any], rate: float, tmp_path: Path) -> None:
    coverage = verdict(tmp_path, 0, side(**known), side(**known))["coverage"]
    assert coverage["candidate_routing_provenance_rate"] == coverage["baseline_routing_provenance_rate"] == rate
    assert coverage["baseline_streaming_trace_rate"] == 0.0


@states("One is enough. Both sides need the same kind.")
@pytest.mark.parametrize(
    "output", [{"fingerprint": "ab"}, {"token_ids": [1]}, {"vector": [0.5]}, {"text": "Hello"}], ids=str
)
def test_one_kind_of_output_is_enough_but_not_two(output: Mapping[str, Any], tmp_path: Path) -> None:
    rows = [{"request_id": f"r{number}", "latency_ms": 1.0, **output} for number in range(6)]
    assert verdict(tmp_path, 0, rows, rows)["agreement"]["agreed"] == 6
    others = [{**row, "vector": None, "text": None, "token_ids": None, "fingerprint": None} for row in rows]
    kind = {"text": "Hello"} if "text" not in output else {"vector": [0.5]}
    mixed = [{name: value for name, value in row.items() if value is not None} | kind for row in others]
    assert verdict(tmp_path, 2, rows, mixed)["summary"]["incomparable"] == 6


@states("Reported. It decides nothing.")
def test_unlike_token_traces_do_not_decide(tmp_path: Path) -> None:
    unlike = verdict(tmp_path, 0, side(token_trace_fingerprint="a"), side(token_trace_fingerprint="b"))
    assert any("unlike traces of tokens" in note for note in unlike["notes"])


@states("Each has both sides, their difference and their ratio.")
def test_figures_have_both_sides() -> None:
    figures = example_verdict("release_gate_bad.json", 1)["summary"]["figures"]["latency_p95_ms"]
    assert all(figures[name] is not None for name in ("baseline", "candidate", "difference", "ratio"))


def test_a_nearly_right_name_is_an_error_and_another_one_a_warning(tmp_path: Path) -> None:
    """As the paragraph above the table of observations states."""
    found = verdict(tmp_path, 0, side(), side(weather_outside="sunny"))
    assert [warning["name"] for warning in found["warnings"]] == ["unread-fields"]
    path = tmp_path / "gate.json"
    path.write_text(json.dumps({"baseline": side(), "candidate": side(latencyms=3.0)}))
    printed("gate", str(path), code=3)
