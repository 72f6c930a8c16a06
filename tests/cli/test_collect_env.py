"""`lockstep collect-env`: complete, and nothing that should not be pasted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.cli.collect_env import MASKED, variables
from lockstep.cli.main import invoke
from lockstep.version import __version__


def test_json_has_every_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packed" / "deep").mkdir(parents=True)
    (tmp_path / "packed" / "deep" / "weights.bin").write_bytes(b"x" * 123)
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path))
    assert invoke(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == ["lockstep", "packages", "system", "processor", "memory", "caches", "environment"]
    assert facts["lockstep"]["version"] == __version__
    assert facts["lockstep"]["core"] in ("compiled", "interpreted")
    assert re.match(r".*portable; bits version \d+$|none: ", facts["lockstep"]["kernels"])
    assert facts["packages"]["numpy"].startswith("2.")
    assert facts["processor"]["usable_cores"] >= 1
    assert facts["memory"]["usable_bytes"] <= facts["memory"]["total_bytes"]
    assert (facts["caches"]["packed_weights"]["files"], facts["caches"]["packed_weights"]["bytes"]) == (1, 123)
    assert facts["environment"]["LOCKSTEP_CACHE_DIR"] == str(tmp_path)


def test_text_is_one_fact_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lockstep:"
    assert f"  version: {__version__}" in lines
    assert any(line.startswith("  total_bytes: ") for line in lines)


def test_secrets_are_redacted_and_unrelated_variables_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    environ = {
        "LOCKSTEP_API_KEY": "sk-1",
        "HF_TOKEN": "hf_1",
        "OPENAI_API_KEY": "sk-2",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer x",
        "HF_ENDPOINT": "https://ann:pass@hub.example.org",
        "LOCKSTEP_CACHE_DIR": "/home/ann/cache",
        "OMP_NUM_THREADS": "2",
        "AWS_SECRET_ACCESS_KEY": "stranger",
        "PATH": "/home/ann/bin",
    }
    assert variables(environ) == {
        "HF_ENDPOINT": "https://***@hub.example.org",
        "HF_TOKEN": MASKED,
        "LOCKSTEP_API_KEY": MASKED,
        "LOCKSTEP_CACHE_DIR": "~/cache",
        "OMP_NUM_THREADS": "2",
        "OPENAI_API_KEY": MASKED,
        "OTEL_EXPORTER_OTLP_HEADERS": MASKED,
    }


def test_nothing_of_a_secret_reaches_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "do-not-show-me")
    assert invoke(["collect-env"]) == 0
    printed = capsys.readouterr().out
    assert "LOCKSTEP_API_KEY" in printed
    assert "do-not-show-me" not in printed
