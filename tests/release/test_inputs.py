"""Any input gives a verdict, or exit code 3 with a message; equal evidence gives equal verdicts."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli.main import invoke
from tests.release.inputs import DATA, pair_file, write_lines
from tests.release.test_formats import LOG_LINE, SGLANG_RUN
from tests.release.test_formats_clients import VLLM_SPAN, otlp, span
from tests.release.test_reading import FULL, WRITERS, to_csv, to_list, to_parquet
from tests.waiting import until

GATE = [sys.executable, "-m", "lockstep", "gate"]


def records(num: int, **fields: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Answers with tokens and gaps, in three segments."""
    return [
        {
            "request_id": f"r-{number}",
            "ts": 100.0 + number,
            "segment": f"s{number % 3}",
            "latency_ms": 90.0 + number % 11,
            "token_ids": [number, number + 1, 7],
            "token_latencies_ms": [1.5, 2.0 + number % 5],
            **{name: value(number) for name, value in fields.items()},
        }
        for number in range(num)
    ]


def gate(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = invoke(["gate", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


# -- the same evidence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("threshold", 0), ("sequential", 2)])
def test_layout_compression_order_and_threads_change_no_byte_of_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, expected: int
) -> None:
    sides = {"b": records(120), "c": records(125, latency_ms=lambda number: 95.0 + number % 7)}
    shuffle = random.Random(3)
    found = set()
    for number, write in enumerate(WRITERS.values()):
        for pack in (bytes, gzip.compress, zstandard.compress):
            monkeypatch.setattr(os, "cpu_count", lambda number=number: 1 + 3 * (number % 2))
            paths = [write(tmp_path / name, shuffle.sample(each, len(each))) for name, each in sides.items()]
            for path in paths:
                path.write_bytes(pack(path.read_bytes()))
            found.add(gate(*paths, "--json", "--set", f"mode={mode}")[:2])
    [(code, verdict)] = found
    assert (code, json.loads(verdict)["joining"]["pairs"]) == (expected, 120)


def test_one_file_and_two_give_the_same_verdict(tmp_path: Path) -> None:
    baseline, candidate = records(40), records(40, token_ids=lambda number: [number])
    sides = {"baseline": baseline, "candidate": candidate}
    marked = [{**each, "side": side} for side, of in sides.items() for each in of]
    pairs = [{"baseline": b, "candidate": c} for b, c in zip(baseline, candidate, strict=True)]
    inputs = {
        "observations": [write_lines(tmp_path / side, of) for side, of in sides.items()],
        "gate": [pair_file(tmp_path / "document", baseline, candidate)],
        "mirror": [write_lines(tmp_path / "pairs", pairs)],
    }
    verdicts = [json.loads(gate(write_lines(tmp_path / "both", marked), "--json")[1])]
    verdicts += [json.loads(gate(*paths, "--json")[1]) for paths in inputs.values()]
    assert [verdict.pop("inputs")[0]["format"] for verdict in verdicts] == ["observations", *inputs]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0]["decision"] == "rollback"


def test_the_seed_of_hashes_changes_no_byte(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / side, records(30)) for side in ("baseline", "candidate")]
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    found = {subprocess.run([*GATE, *paths, "--json"], env=each, capture_output=True).stdout for each in environments}
    assert len(found) == 1
    assert b'"promote"' in found.pop()


# -- no verdict -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one FILE"),
        (("BASELINE", "CANDIDATE", "CANDIDATE"), "give one FILE"),
        (("BASELINE",), "have no side; the side must be baseline or candidate, or pass two files"),
        (("BASELINE", "nothing"), "nothing: cannot be read: No such file"),
        (("BASELINE", "CANDIDATE", "--nope"), "No such option: --nope"),
        (("BASELINE", "CANDIDATE", "--output"), "'--output' requires an argument"),
        (("BASELINE", "CANDIDATE", "--set", "nope=1"), "the policy has no field 'nope'"),
        (("BASELINE", "CANDIDATE", "--set", "alpha"), "write FIELD=VALUE"),
        (("BASELINE", "CANDIDATE", "--policy", "nothing"), "the policy nothing cannot be read"),
        (("BASELINE", "CANDIDATE", "--policy", "BASELINE"), "BASELINE, line 2"),
        (("BASELINE", "CANDIDATE", "--owners", "nothing"), "nothing: cannot read the owners file"),
        (("BASELINE", "CANDIDATE", "--aa", "nothing"), "nothing: cannot be read"),
        (("BASELINE", "--aa", "CANDIDATE"), "--aa requires two files"),
        (("BASELINE", "CANDIDATE", "--output", "BASELINE"), "is an input; give another file"),
        (("BASELINE", "CANDIDATE", "--output", "."), "it is a directory"),
        (("BASELINE", "CANDIDATE", "--junit", "/dev/full"), "No space left on device"),
        (("BASELINE", "CANDIDATE", "--markdown", "/dev/full"), "No space left on device"),
        (("BASELINE", "CANDIDATE", "--html", "BASELINE/page"), "BASELINE is not a directory"),
    ],
)
def test_invalid_arguments_and_unusable_files_exit_3_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("BASELINE", "CANDIDATE"):
        write_lines(Path(name), records(30))
    code, _, told = gate(*arguments)
    assert code == 3
    assert message in told
    assert "internal error" not in told


@pytest.mark.parametrize(
    "line",
    [
        "mirror B C",
        "mirror B C --output /dev/full",
        "mirror",
        "mirror-gate",
        "gate serve",
        "gate serve --nope",
        "gate serve B --host 0.0.0.0",
        "gate serve B --set x=1",
    ],
)
def test_the_other_verbs_of_the_gate_exit_3_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "BC":
        write_lines(Path(name), records(3))
    assert invoke(line.split()) == 3
    assert "lockstep: error: " in (told := capsys.readouterr().err)
    assert "internal error" not in told


def test_an_error_with_closed_standard_error_exits_3() -> None:
    """Python's exit code 1 for a broken pipe would mean a rollback."""
    process = subprocess.Popen([*GATE, "/nothing"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_gate_without_a_verdict_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    paths = [write_lines(tmp_path / side, records(60_000)) for side in ("baseline", "candidate")]
    (kept := tmp_path / "temporary").mkdir()
    process = subprocess.Popen([*GATE, *paths], env={**os.environ, "TMPDIR": str(kept)}, stderr=subprocess.PIPE)
    until(lambda: any(kept.glob("lockstep-owned-gate-*")))
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == 3, told
    assert list(kept.iterdir()) == []


def test_one_side_alone_and_ids_that_never_match_hold_with_advice(tmp_path: Path) -> None:
    alone = pair_file(tmp_path / "alone", records(30), [])
    unlike = pair_file(tmp_path / "unlike", records(30), records(30, request_id=lambda number: f"x-{number}"))
    for path in (alone, unlike):
        code, out, _ = gate(path, "--json")
        verdict = json.loads(out)
        assert (code, verdict["decision"], verdict["joining"]["pairs"]) == (2, "hold", 0)
        assert verdict["triage"]


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1e6])
def test_seconds_against_milliseconds_are_refused(tmp_path: Path, factor: float) -> None:
    other = records(30, latency_ms=lambda number: (90.0 + number % 11) * factor)
    code, _, told = gate(pair_file(tmp_path / "input", records(30), other))
    assert code == 3
    assert "latency_ms" in told
    assert "milliseconds" in told


# -- anything ---------------------------------------------------------------------------------------------------------

SGLANG_LINE = {
    "request_parameters": json.dumps({"rid": "a", "text": "hello"}),
    "id": "a",
    "finish_reason": {"type": "stop"},
    "prompt_tokens": 4,
    "completion_tokens": 2,
    "e2e_latency": 0.5,
    "request_received_ts": 1.0,
}


def seeds() -> list[bytes]:
    """File of every format and layout."""
    few = records(6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input"
        found = [write(path, few).read_bytes() for write in (write_lines, to_list, to_csv, to_parquet)]
        found += [write_lines(path, [line] * 2).read_bytes() for line in (FULL, LOG_LINE, SGLANG_LINE)]
        found += [pair_file(path, few, few).read_bytes()]
    found += [json.dumps(each).encode() for each in (SGLANG_RUN, otlp(span(VLLM_SPAN)))]
    found += [each.read_bytes() for each in sorted(DATA.iterdir()) if each.suffix in (".json", ".jsonl", ".log")]
    return [*found, gzip.compress(found[0]), zstandard.compress(found[0])]


SEEDS = seeds()
TOKENS = [b"NaN", b"1e999", b"null", b"-1", b"[]", b"{}", b"{", b"]", b",", b"\n", b"\0", b"'", b'"', b"true"]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """File that was cut, spliced, overwritten or duplicated at a few positions."""
    data = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 40)))
        inserted = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(data[at:end] * 2)))
        data = draw(st.sampled_from([data[:at], data[:at] + inserted + data[end:], data[:at] + inserted + data[at:]]))
    return data


@given(data=mutated(), is_alone=st.booleans())
@settings(max_examples=int(os.environ.get("GATE_EXAMPLES", "40")))
def test_any_file_gives_a_verdict_or_a_reason(data: bytes, is_alone: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, other = Path(folder) / "input", write_lines(Path(folder) / "other", records(6))
        path.write_bytes(data)
        code, out, told = gate(*([path] if is_alone else [other, path]), "--json")
    assert code in (0, 1, 2, 3)
    assert "internal error" not in told
    assert "Traceback" not in told
    if code == 3:
        assert str(path) in told
        assert out == ""
    else:
        assert json.loads(out)["decision"] == ("promote", "rollback", "hold")[code]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_truncated_compressed_file_is_always_detected(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    other, path = write_lines(tmp_path / "other", records(30)), tmp_path / "input"
    data = pack(other.read_bytes())
    for end in range(0, len(data), max(1, len(data) // 12)):
        path.write_bytes(data[:end])
        assert gate(other, path)[0] == 3
