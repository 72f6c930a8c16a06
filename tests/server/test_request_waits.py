"""Why requests wait, told by a real server with small pools; and that telling it decides nothing."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lockstep.cli.main import invoke
from tests.server.process import ServerProcess
from tests.waiting import HANG_S, until

MANIFEST = """\
cluster: waiting
models:
  tiny: {source: 'stub://tiny?step_ms=20', engine: {num_blocks: 8}}
  narrow: {source: 'stub://narrow?step_ms=20', engine: {max_num_seqs: 1}}
  single: {source: 'stub://single?step_ms=20', max_active_sessions: 1}
  late: {source: 'stub://late?load_ms=200', tier: standby}
"""
HELD, WAITING = 90, 60
"""Tokens of prompts of which the pool of `tiny` holds one or the other."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("waits")
    path = folder / "waiting.yaml"
    path.write_text(MANIFEST)
    server = ServerProcess(
        *("--manifest", str(path), "--trace", str(folder / "the traces"), "--trace-content"),
        *("--scheduling-policy", "priority"),
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as made:
        yield made


def rows_of(client: openai.OpenAI, query: str) -> dict[str, dict[str, Any]]:
    """By id."""
    found: Any = client.get(f"/requests?{query}", cast_to=object)
    return {row["id"]: row for row in found["data"]}


def ask(client: openai.OpenAI, model: str, id_: str, num_prompt: int = 8, **more: Any) -> None:
    client.completions.create(
        model=model,
        prompt=[65] * num_prompt,
        max_tokens=30,
        extra_body={"ignore_eos": True, **more},
        extra_headers={"x-request-id": id_},
    )


def waited_behind(
    client: openai.OpenAI, model: str, num_held: int = 8, num_waiting: int = 8, **more: Any
) -> dict[str, Any]:
    """The row of a request that came while another was being answered, when both have ended."""
    first, second = f"{model}-first", f"{model}-second"
    holding = threading.Thread(target=ask, args=(client, model, first, num_held))
    holding.start()
    until(lambda: first in rows_of(client, f"model={model}&state=running"), "the first is answered")
    ask(client, model, second, num_waiting, **more)
    holding.join(HANG_S)
    until(lambda: len(rows_of(client, f"model={model}&state=ended")) == 2, "both have ended")
    rows = rows_of(client, f"model={model}&state=ended")
    assert rows[first]["waits"] == []
    row = rows[second]
    assert first not in str(row), "who else is there is not for everybody to know"
    assert row["waited_ms"] > 0
    for wait in row["waits"]:
        assert wait["model"] == model
        assert wait["at_ms"] >= 0
        assert wait["seen_ms"] >= 0
    return row


def reasons_of(row: dict[str, Any]) -> dict[str, str]:
    return {wait["kind"]: wait["reason"] for wait in row["waits"]}


def test_no_block(client: openai.OpenAI) -> None:
    row = waited_behind(client, "tiny", HELD, WAITING)
    assert reasons_of(row).keys() == {"no_block"}
    assert re.fullmatch(r"it needs \d blocks?, \d of 8 are free", reasons_of(row)["no_block"])


def test_no_place_and_a_lower_priority(client: openai.OpenAI) -> None:
    row = waited_behind(client, "narrow", priority=5)
    assert row["priority"] == 5
    assert reasons_of(row) == {
        "no_place": "1 of 1 sequences run",
        "lower_priority": "another request of a higher priority goes first",
    }


def test_session_location_is_reported(client: openai.OpenAI) -> None:
    assert reasons_of(waited_behind(client, "single")) == {
        "session": "all sessions of the model are busy: 1 of 1 are held"
    }


def test_a_model_that_is_loaded_first(client: openai.OpenAI) -> None:
    ask(client, "late", "late")
    until(lambda: bool(rows_of(client, "model=late&state=ended")), "it has ended")
    assert reasons_of(rows_of(client, "model=late")["late"]) == {"model_loading": "the model is not loaded"}


def test_the_command_of_a_row_decides_it_again(
    client: openai.OpenAI, server: ServerProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """After steps that were explained: their decisions are those of steps that were not."""
    ask(client, "narrow", "recorded")
    until(lambda: "recorded" in rows_of(client, "model=narrow&state=ended"), "it has ended")
    [replay] = rows_of(client, "model=narrow")["recorded"]["replay"]
    assert (replay["model"], replay["sequence"] >= 0, replay["step"] >= 0) == ("narrow", True, True)
    row = rows_of(client, "model=narrow")["narrow-second"]
    server.stop()
    told = told_by(replay["command"], capfd)
    assert told["identical"]
    [sequence] = told["request"]["sequences"]
    assert (sequence["name"], sequence["sequence"]) == ("narrow", replay["sequence"])
    assert sequence["steps"][0]["first_step"] == replay["step"]
    assert (sequence["prompt_tokens"], sequence["output_tokens"], sequence["end"]) == (8, 30, "length")
    assert len(sequence["tokens"]) == 30
    [sequence] = told_by(row["replay"][0]["command"], capfd)["request"]["sequences"]
    assert sequence["waits"][0]["reason"] == "1 of 1 sequences run"
    _, *arguments = shlex.split(row["replay"][0]["command"].replace("--verify", "--execute"))
    assert invoke([*arguments, "--model", "stub://narrow"]) == 0
    assert "30 tokens of request narrow-second" in capfd.readouterr().out


def told_by(command: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The request, as the command of its row tells it."""
    program, *arguments = shlex.split(command)
    assert program == "lockstep"
    assert invoke([*arguments, "--json"]) == 0
    told: dict[str, Any] = json.loads(capfd.readouterr().out)
    return told
