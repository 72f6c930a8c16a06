"""Recordings of requests with adapters: verified without them, executed with the recorded contents, judged by them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.release.recordings import read_recordings
from lockstep.release.store import open_store
from lockstep.replay.execute import execute
from lockstep.replay.execution import describe
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.entries import RequestDigest
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import AdaptersUsed, Submit, UseAdapters
from tests.adapter_files import write_pocket_adapter
from tests.worker.support import Bench, running

SOURCE = "pocket://"
OPTIONS = EngineOptions(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=40, max_loras=1)
PROMPT = tuple(range(300, 340))
INVOCATION = [320, 321]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(3):
        write_pocket_adapter(folder / f"{number}", number)
    write_pocket_adapter(folder / "aware", 9, alora_invocation_tokens=INVOCATION)
    return folder


def source(name: str, path: Path) -> AdapterSource:
    return AdapterSource(name, str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Path:
    """Requests of the base and of three adapters, one of which gets another content between two requests."""
    folder = tmp_path_factory.mktemp("recording")
    key = folder / "key"
    key.write_text("a secret")
    trace = TraceOptions(str(folder / "run"), has_content=True, key_file=str(key))
    with running(trace=trace) as bench:
        names = {"first": adapters / "0", "second": adapters / "1", "aware": adapters / "aware"}
        given = tuple(source(name, path) for name, path in names.items())
        bench.ready("a", SOURCE, LoadOptions(OPTIONS, adapters=given))
        submit(bench, 0, ("", "first", "second", "aware", "first", ""))
        replaced = (source("first", adapters / "2"), *given[1:])
        assert bench.ask(UseAdapters("a", replaced), AdaptersUsed).error is None
        submit(bench, 10, ("first", "aware", "second"))
    return folder / "run"


def submit(bench: Bench, first: int, names: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=5)
    for number, name in enumerate(names, first):
        bench.tell(Submit(number, "a", GenerationRequest((*PROMPT, number), params, adapter=name)))
    for number, _ in enumerate(names, first):
        assert bench.answer(number).request is not None


def test_names_and_fingerprints_are_recorded(folder: Path) -> None:
    digests = [each for each in open_trace(folder).entries() if isinstance(each, RequestDigest)]
    assert sorted(each.adapter for each in digests) == ["", "", *["aware"] * 2, *["first"] * 3, *["second"] * 2]
    contents = {each.adapter_fingerprint for each in digests if each.adapter == "first"}
    assert len(contents) == 2, "the name got another content"
    assert {each.adapter_fingerprint for each in digests if not each.adapter} == {""}


def test_steps_are_verified_without_adapters(folder: Path) -> None:
    assert verify(open_trace(folder)).is_identical


def test_every_token_is_computed_again_with_the_recorded_contents(folder: Path, adapters: Path) -> None:
    """The given names do not matter, only the contents."""
    given = [source(f"any-{number}", adapters / name) for number, name in enumerate(("0", "1", "2", "aware"))]
    [execution] = execute(open_trace(folder), SOURCE, adapters=given)
    assert execution.diverged is None, list(describe(execution))
    assert execution.num_tokens == 9 * 12


def test_a_recording_of_a_merged_adapter_is_executed_by_the_same_source_only(tmp_path: Path, adapters: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a secret")
    merged = f"{SOURCE}+lora={adapters / '0'}"
    with running(trace=TraceOptions(str(tmp_path / "run"), has_content=True, key_file=str(key))) as bench:
        bench.ready("a", merged, LoadOptions(OPTIONS))
        submit(bench, 0, ("", "", ""))
    trace = open_trace(tmp_path / "run")
    assert verify(trace).is_identical
    copy = shutil.copytree(adapters / "0", tmp_path / "copy")
    [execution] = execute(trace, f"{SOURCE}+lora={copy}")
    assert execution.diverged is None, list(describe(execution))
    assert execution.num_tokens == 3 * 12
    for other in (SOURCE, f"{SOURCE}+lora={adapters / '1'}", f"{merged}+lora={adapters / '1'}"):
        with pytest.raises(TraceError, match="has the fingerprint"):
            list(execute(trace, other))


def test_a_missing_adapter_is_named(folder: Path, adapters: Path) -> None:
    given = [source("second", adapters / "1"), source("aware", adapters / "aware")]
    with pytest.raises(
        TraceError, match=r"uses adapter 'first' .* none of the given adapters has it: pass --lora-modules first=PATH"
    ):
        list(execute(open_trace(folder), SOURCE, adapters=given))


def test_an_adapter_of_another_content_is_named_with_both_fingerprints(folder: Path, adapters: Path) -> None:
    given = [source("first", adapters / "1"), source("second", adapters / "1"), source("aware", adapters / "aware")]
    with pytest.raises(TraceError, match=r"uses adapter 'first' with fingerprint [0-9a-f]{32}; the given one has"):
        list(execute(open_trace(folder), SOURCE, adapters=given))


def test_the_gate_reads_the_fingerprint_with_that_of_the_weights(folder: Path) -> None:
    with open_store() as store:
        read_recordings(store, (folder, folder))
        found = store.rows("SELECT DISTINCT artifact FROM baseline ORDER BY artifact")
    artifacts = [str(each[0]) for each in found]
    assert sum("+" in each for each in artifacts) == 4
    assert len({each.partition("+")[0] for each in artifacts}) == 1
