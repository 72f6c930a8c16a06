"""Adapters of a worker's replica: changed as a whole or not at all, and never in the way of their base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import ArtifactNotFoundError, InvalidParameterError, UnsupportedArtifactError, UsageError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import open_stub_adapter
from lockstep.worker.messages import AdaptersUsed, Submit, UseAdapters
from tests.adapter_files import stub_adapters
from tests.worker.support import SMALL, Bench, running

PARAMS = SamplingParams(max_tokens=48)


def options(adapters: tuple[AdapterSource, ...]) -> LoadOptions:
    return LoadOptions(EngineOptions(num_blocks=64), adapters=adapters)


def text_of(bench: Bench, request_id: int, adapter: str) -> str:
    bench.tell(Submit(request_id, "m", GenerationRequest(tuple(b"hello"), PARAMS, adapter=adapter)))
    output = bench.answer(request_id).request
    assert output is not None
    return output.completions[0].text


def use(bench: Bench, *adapters: AdapterSource, replica: str = "m") -> AdaptersUsed:
    return bench.ask(UseAdapters(replica, adapters), AdaptersUsed)


def test_adapters_are_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    first, second, third = stub_adapters(tmp_path, 3)
    missing = AdapterSource("missing", str(tmp_path / "none"))
    with running() as bench:
        loaded = bench.ready("m", "stub://m", options((first, second)))
        assert sorted(loaded.adapters) == ["a0", "a1"]
        assert loaded.adapter_bytes > 0
        texts = [text_of(bench, number, name) for number, name in enumerate(("a0", "a1"))]
        assert isinstance(use(bench, third, missing).error, ArtifactNotFoundError)
        bench.tell(Submit(10, "m", GenerationRequest((1,), PARAMS, adapter="a2")))
        assert isinstance(bench.refusal(10), InvalidParameterError)
        assert use(bench, second, third).error is None
        assert text_of(bench, 11, "a1") == texts[1]
        assert text_of(bench, 12, "a2") not in texts
        bench.tell(Submit(13, "m", GenerationRequest((1,), PARAMS, adapter="a0")))
        assert isinstance(bench.refusal(13), InvalidParameterError)


def test_a_changed_file_is_not_used_under_the_old_fingerprint(tmp_path: Path) -> None:
    [source] = stub_adapters(tmp_path, 1)
    fingerprint = open_stub_adapter("a0", source.path).fingerprint
    expected = AdapterSource("a0", source.path, fingerprint)
    with running() as bench:
        bench.ready("m", "stub://m", LoadOptions(EngineOptions(num_blocks=64, enable_lora=True)))
        (Path(source.path) / "adapter_model.safetensors").write_bytes(b"others")
        assert isinstance(use(bench, expected).error, UnsupportedArtifactError)


def test_an_adapter_that_is_gone_does_not_keep_its_base_from_loading(tmp_path: Path) -> None:
    """After the loss of a worker, the next one loads what the manifest declared, whose files may be gone by then."""
    first, second = stub_adapters(tmp_path, 2)
    shutil.rmtree(first.path)
    with running() as bench:
        loaded = bench.ready("m", "stub://m", options((first, second)))
        assert list(loaded.adapters) == ["a1"]
        assert text_of(bench, 1, "a1").startswith("[stub:m+")
        assert text_of(bench, 2, "") == "[stub:m] ok len=5 max=48"


@pytest.mark.parametrize("adapters", [0, 1])
def test_a_replica_without_slots_takes_only_none(tmp_path: Path, adapters: int) -> None:
    with running() as bench:
        bench.ready("m", "stub://m", SMALL)
        error = use(bench, *stub_adapters(tmp_path, adapters)).error
        assert isinstance(error, UsageError) == bool(adapters)


def test_a_replica_that_is_gone_needs_no_adapters(tmp_path: Path) -> None:
    with running() as bench:
        assert use(bench, *stub_adapters(tmp_path, 1), replica="other").error is None
