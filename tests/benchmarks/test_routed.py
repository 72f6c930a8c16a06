"""Routed requests: one to our server and two to others, with new questions in every round; commands for Ollama."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.comparison.routed import RoutedRequests, ollama_lines
from benchmarks.comparison.workloads import NUM_ROUTED, Workload
from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.errors import RemoteError, UsageError
from tests.bench.standin import MODEL, Behaviour, serving

SUPPORT = Path("examples/customer-support.yaml")
WORK = Workload(64, 1, 6, "routed")
Server = tuple[str, Behaviour]


@pytest.fixture
def server() -> Iterator[Server]:
    """URL of a server that routes nothing, and what it sees."""
    seen = Behaviour()
    with serving(seen) as url:
        yield url, seen


def test_other_servers_receive_the_entry_prompt_and_then_the_request(server: Server) -> None:
    url, seen = server
    with RemoteServer(Target.parse(url)) as remote:
        answers = RoutedRequests(SUPPORT).ask_others(remote, MODEL, WORK, 3)
    assert len(answers) == NUM_ROUTED
    assert all(each.sent_s < each.tokens_s[0] < each.tokens_s[1] for each in answers)
    bodies = seen.bodies
    assert [body["max_tokens"] for body in bodies] == [8, WORK.output] * NUM_ROUTED
    questions = [[message["content"] for message in body["messages"]] for body in bodies]
    assert questions[::2] == questions[1::2]
    assert len({tuple(question) for question in questions}) == NUM_ROUTED


def test_prompts_differ_between_rounds(server: Server) -> None:
    url, seen = server
    with RemoteServer(Target.parse(url)) as remote:
        for seed in (1, 2):
            RoutedRequests(SUPPORT).ask_others(remote, MODEL, WORK, seed)
    assert len({str(body["messages"]) for body in seen.bodies}) == 2 * NUM_ROUTED


def test_a_server_that_answers_by_itself_has_not_routed(server: Server) -> None:
    url, seen = server
    with RemoteServer(Target.parse(url)) as remote, pytest.raises(RemoteError):
        RoutedRequests(SUPPORT).ask_ours(remote, WORK, 1)
    assert len(seen.bodies) <= 1


def test_a_manifest_without_routing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("cluster: plain\nmodels:\n  chat:\n    source: stub://chat\n")
    with pytest.raises(UsageError, match="has no routes"):
        RoutedRequests(path)
    with pytest.raises(UsageError, match="cannot read"):
        RoutedRequests(tmp_path / "nowhere.yaml")


def test_ollama_is_given_the_same_file() -> None:
    lines = ollama_lines("models/small.gguf")
    assert f"FROM {Path('models/small.gguf').resolve()}\\n" in lines[1]
    assert "ollama create small -f Modelfile" in lines[1]
    assert lines[2].split(" #")[0].endswith("lockstep bench peers models/small.gguf --peer-url http://127.0.0.1:11434")
