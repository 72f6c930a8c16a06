"""`lockstep pull`, `list`, `rm` and `run hf://…` as a user types them: real processes against a hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from tests.artifacts.hub.stand_in import StandIn, hub_environment
from tests.processes import Piped, run
from tests.waiting import until
from tools.random_models import write_gguf, write_huggingface

Lockstep = Callable[..., subprocess.CompletedProcess[str]]
Here = Callable[..., tuple[int, str, str]]
"""Exit code, standard output, standard error."""
SHORT = ("-p", "hello", "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")


@pytest.fixture
def hub() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


def environment(hub: StandIn, home: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return inherited | hub.environment(home) | {"LOCKSTEP_CACHE_DIR": str(home / "lockstep")}


@pytest.fixture
def lockstep(hub: StandIn, tmp_path: Path) -> Lockstep:
    def call(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, environment=environment(hub, tmp_path) | more)

    return call


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """A command in this process, for speed, over the cache of those in processes of their own."""
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "lockstep"))

    def call(*arguments: str) -> tuple[int, str, str]:
        code = invoke(list(arguments))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    with hub_environment(HF_HUB_CACHE=str(tmp_path / "hub")):
        yield call


def test_a_model_is_pulled_listed_run_without_the_hub_and_removed(
    hub: StandIn, lockstep: Lockstep, here: Here, tmp_path: Path
) -> None:
    hub.add_directory("acme/tiny", write_huggingface(tmp_path / "tiny", "tiny-llama", "BF16"))
    pulled = lockstep("pull", "acme/tiny")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    path = Path(pulled.stdout.strip())
    assert (path / "model.safetensors").is_file()

    [listed] = json.loads(here("list", "--json")[1])
    named = (listed["source"], listed["revision"], listed["task"], listed["format"])
    assert named == ("hf://acme/tiny", "main", "generate", "safetensors")
    assert listed["commit"] == path.name
    table = here("list")[1]
    assert "hf://acme/tiny" in table
    assert "today" in table

    hub.status = 500
    answer = lockstep("run", "hf://acme/tiny", *SHORT)
    assert (answer.returncode, answer.stderr) == (0, "")
    one, other = json.loads(answer.stdout), json.loads(here("run", str(tmp_path / "tiny"), *SHORT)[1])
    assert (one["text"], one["artifact"]) == (other["text"], other["artifact"])

    code, _, err = here("rm", "hf://acme/tiny")
    assert (code, "add --yes" in err) == (2, True)
    removed = lockstep("rm", "hf://acme/tiny", "--yes", "--json")
    assert json.loads(removed.stdout)["freed_bytes"] == listed["num_bytes"]
    assert not path.exists()
    assert "No models in" in here("list")[2]


def test_a_killed_download_goes_on_where_it_stopped(hub: StandIn, lockstep: Lockstep, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny-q8_0.gguf", "tiny-llama", "Q8_0")
    data = gguf.read_bytes()
    hub.add_directory("acme/q", tmp_path)
    hub.bytes_per_s = len(data) // 1000
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}

    def have() -> int:
        return sum(partial.stat().st_size for partial in (tmp_path / "hub").rglob("*.incomplete"))

    with Piped("pull", "hf://acme/q#Q8_0", environment=environment(hub, tmp_path) | patient) as process:
        until(lambda: have() > 0, "the first bytes are written")
        process.program.send_signal(signal.SIGKILL)
        process.program.wait()
    assert have() < len(data)
    goes_on_at = have()

    hub.bytes_per_s = None
    pulled = lockstep("pull", "hf://acme/q#Q8_0")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert Path(pulled.stdout.strip()).read_bytes() == data
    assert [span for _, span, _ in hub.store_requests] == [None, f"bytes={goes_on_at}-"]


@pytest.mark.parametrize("verb", [pytest.param("pull", marks=pytest.mark.slow), "run"])
def test_no_network_is_one_line(hub: StandIn, lockstep: Lockstep, verb: str) -> None:
    result = lockstep(verb, "hf://acme/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("lockstep: error: hf://acme/tiny: the hub cannot be reached")
    assert result.stderr.count("\n") == 1


def test_a_refusal_is_one_line(hub: StandIn, lockstep: Lockstep, tmp_path: Path) -> None:
    hub.repos["acme/x"] = hub.add_directory("acme/x", tmp_path, token="right", gated=True)
    result = lockstep("models", "info", "hf://acme/x", HF_TOKEN="wrong")
    assert (result.returncode, result.stdout) == (2, "")
    assert "gated" in result.stderr
    assert result.stderr.count("\n") == 1
