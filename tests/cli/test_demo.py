"""`lockstep demo`: the first thing that a newcomer runs."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys

import httpx2
import pytest

from lockstep.cli.demo import judged_times
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.manifest import Persona
from lockstep.cluster.manifest_file import parse
from lockstep.pocket import ADAPTERS, DEMO_MESSAGES, SCHEME, demo_path
from tests.server.process import IN_THREAD, serve

DEMO = (sys.executable, "-m", "lockstep", "demo")
LIMIT_S = 240.0
PERSONAS_PATH = demo_path().with_name("demo.yaml")


def test_the_manifest_of_personas_writes_down_those_that_pocket_was_trained_to_take() -> None:
    manifest = parse(PERSONAS_PATH.read_text())
    assert {entry.source for entry in manifest.entries} == {SCHEME}
    bare = dataclasses.replace(
        manifest, entries=tuple(dataclasses.replace(entry, system_prompt=None) for entry in manifest.entries)
    )
    assert served_by(bare, Backend.POCKET) == manifest


def test_its_manifest_has_adapters_where_the_other_one_has_personas() -> None:
    personas, adapters = (parse(path.read_text()) for path in (PERSONAS_PATH, demo_path()))
    expected = [
        dataclasses.replace(entry, system_prompt=None, persona=Persona.PREFIX, adapter=SCHEME + entry.id)
        if entry.id in ADAPTERS
        else entry
        for entry in personas.entries
    ]
    assert adapters == dataclasses.replace(personas, entries=tuple(expected))


def test_its_manifest_serves_all_models_on_one_base() -> None:
    """A routed message gets the answer of the model that the router chose; each model has answers of its own."""
    messages = [text for text, intent in DEMO_MESSAGES.items() if intent in ADAPTERS]
    with serve("--manifest", str(demo_path()), *IN_THREAD) as server, server.client() as client:

        def answers(model: str | None) -> list[tuple[str, str]]:
            bodies = [
                {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 64, "temperature": 0}
                for text in messages
            ]
            sent = [client.post("/v1/chat/completions", json=body).json() for body in bodies]
            return [(answer["model"], answer["choices"][0]["message"]["content"]) for answer in sent]

        parents = {model["id"]: model["parent"] for model in client.get("/v1/models").json()["data"]}
        replicas = client.get("/v1/cluster").json()["replicas"]
        routed, named = answers(None), {name: answers(name) for name in (*ADAPTERS, "fallback")}
    assert {name: parents[name] for name in ADAPTERS} == dict.fromkeys(ADAPTERS, "router")
    assert [len(replica["models"]) for replica in replicas] == [5]
    assert routed == [named[model][index] for index, (model, _) in enumerate(routed)]
    assert len({tuple(text for _, text in each) for each in named.values()}) == len(named)


def test_keep_leaves_the_server_up_until_an_interrupt() -> None:
    command = [*DEMO, "--keep", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"serving on (http://\S+)/v1", line)))
        try:
            models = [model["id"] for model in httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"]]
            assert models == ["router", "billing", "technical", "legal", "fallback"]
        finally:
            process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert " turns, identical" in rest
    assert process.returncode == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/v1/models", trust_env=False)


def test_a_verdict_lists_the_times_that_its_policy_judges_with_their_limits() -> None:
    """Beside a prediction of another size, which no policy judges."""
    figures = {
        "ttft_p95_ms": {"baseline": 200.0, "candidate": 204.0, "ratio": 1.02},
        "decode_p95_ms": {"baseline": 8.0, "candidate": 8.0, "ratio": 1.0},
        "latency_p95_ms": {"baseline": None, "candidate": 900.0, "ratio": None},
    }
    policy = {"max_ttft_p95_ratio": 1.1, "max_decode_p95_ratio": None, "max_latency_p95_ratio": 1.1}
    assert judged_times({"summary": {"figures": figures}, "policy": policy}) == (
        "measured and judged: p95 first token 200.0 -> 204.0 ms (1.02 of at most 1.1 times)"
    )


@pytest.mark.slow
def test_the_demo_routes_its_messages_judges_its_answers_and_ends() -> None:
    done = subprocess.run([*DEMO], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    routes = [line.split("-> ")[1] for line in done.stdout.splitlines() if line.startswith("router")]
    assert routes[:4] == ["specialists.billing", "specialists.technical", "specialists.legal", "fallback"]
    assert len(routes) == 5
    assert "│ requests_total      │ 6" in done.stdout
    said = " ".join(done.stdout.split())
    places = re.findall(r"session: place (\w+), (\d+) tokens on the device, (\d+) in host memory", said)
    (before, held, _), (away, left, stored), (back, again, _) = places
    assert (before, away, back) == ("device", "host", "device")
    assert (int(held) > 0, int(left), int(stored) > 0, int(again) > 0) == (True, 0, True, True)
    [cached] = re.findall(r"; (\d+) prompt tokens were reused", said)
    assert int(cached) > 0
    assert "every token computed: the same answer, byte by byte" in said
    assert re.search(r"dashboard while it runs: http://127.0.0.1:\d+/", done.stdout)
    assert " turns, identical" in done.stdout
    verdicts = done.stdout.partition("the gate: this server against itself")[2].splitlines()
    assert verdicts[1].startswith("promote: ")
    assert [line.split(";")[0] for line in verdicts if "answers are the same" in line] == [
        "  12 of 12 answers are the same"
    ] * 2
    assert "  changed setting: max_chunk_tokens, from 256 to 16" in verdicts
    assert "measured and judged: p95 first token" in said
    assert "prediction from the baseline's recording" in said
    assert "p95 first token" in done.stdout
