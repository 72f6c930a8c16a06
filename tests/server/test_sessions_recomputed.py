"""Sessions whose kept KV is not what it should be: told once, computed again, served as if nothing had been kept."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.executors.native import executor
from tests.server.living import Living, living_cluster
from tests.waiting import until
from tools.perturbed import POCKET, ROOT, perturb

BLOCK = 32
TEXT = "I was charged twice for my subscription last week, and nobody answers my letters. " * 4
MANIFEST = "cluster: kept\nmodels:\n  router: {source: 'SOURCE', engine: {num_blocks: 64}}\n"


class Kept:
    """Folder with the model and what a server kept of one session, and what that was."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model.gguf"
        self.disk = folder / "kv"

    @property
    def blocks(self) -> list[Path]:
        return sorted(self.disk.rglob("*.kv"))

    @contextmanager
    def serve(self) -> Iterator[Living]:
        options = ClusterOptions(kv=KVStoreOptions(disk_dir=str(self.disk), disk_bytes=1 << 26))
        with living_cluster(Cluster(parse(MANIFEST.replace("SOURCE", str(self.model))), options)) as server:
            yield server


def ask(server: Living, session: str | None, **more: object) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were there."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "temperature": 0, **more}
    told = server.post("/v1/chat/completions", {**body, "session_id": session}).json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def faults_of(server: Living) -> list[str]:
    return [event.fields["reason"] for event in server.cluster.state.events._kept if event.type == "kv_rejected"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Kept, int]:
    """What a server has left, and how many tokens of it the next one finds."""
    kept = Kept(tmp_path_factory.mktemp("first"))
    shutil.copy(ROOT / POCKET, kept.model)
    with kept.serve() as server:
        ask(server, "s")
        [session] = server.get("/v1/sessions").json()["data"]
        num_tokens = int(session["num_tokens"])
        until(lambda: len(kept.blocks) == num_tokens // BLOCK, "its blocks are on disk")
    return kept, num_tokens


def flip(kept: Kept) -> None:
    data = bytearray(kept.blocks[0].read_bytes())
    data[-1] ^= 1
    kept.blocks[0].write_bytes(data)


def cut(kept: Kept) -> None:
    kept.blocks[0].write_bytes(kept.blocks[0].read_bytes()[:1000])


def swap(kept: Kept) -> None:
    """Give one block the content of another; the other is as it was."""
    shutil.copy(kept.blocks[1], kept.blocks[0])


def another_artifact(kept: Kept) -> None:
    perturb(kept.model, 1)


def another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    own = executor.environment_of
    monkeypatch.setattr(executor, "environment_of", lambda *given: own(*given) | {"bits": "another"})


CASES: dict[str, tuple[Callable[[Kept], None] | None, str]] = {
    "nothing": (lambda kept: None, ""),
    "a flipped bit": (flip, "does not match its checksum"),
    "a truncated file": (cut, "has a wrong length"),
    "a swapped file": (swap, "holds another block than its name states"),
    "another artifact": (another_artifact, "another artifact, precision or library"),
    "another version": (None, "another artifact, precision or library"),
}


@pytest.mark.parametrize("case", CASES)
def test_invalid_stored_kv_is_reported_once_and_computed_again(
    case: str, first: tuple[Kept, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, num_tokens = first
    kept = Kept(shutil.copytree(left.disk.parent, tmp_path / "copy"))
    harm, words = CASES[case]
    if harm is None:
        another_version(monkeypatch)
    else:
        harm(kept)
    with kept.serve() as server:
        text, num_cached = ask(server, "s")
        assert (text, 0) == ask(server, None, cache_salt="of its own"), "as if nothing had been kept"
        found = faults_of(server)
        if not words:
            assert (num_cached, found) == (num_tokens, [])
            return
        assert num_cached < num_tokens
        assert len(found) == 1
        assert words in found[0]
        assert ask(server, "s") == (text, num_tokens), "and it is kept again"
        assert len(faults_of(server)) == 1


def test_full_disk_loses_stored_kv_but_no_answer(
    first: tuple[Kept, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the size of files stands for it: every write of a block ends in the middle."""
    left, num_tokens = first
    kept = Kept(tmp_path)
    shutil.copy(left.model, kept.model)
    with kept.serve() as server:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            text, _ = ask(server, "s")
            until(lambda: "KV blocks cannot be stored there now: File too large" in caplog.text, "the fault is logged")
            assert server.post("/v1/models/router/unload", None).status_code == 200
            assert kept.blocks == [], "a later attempt succeeds as soon as there is room"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert ask(server, "s")[0] == text, "whatever could be written since there is room"
        until(lambda: len(kept.blocks) == num_tokens // BLOCK, "there is room again")
        assert faults_of(server) == []
