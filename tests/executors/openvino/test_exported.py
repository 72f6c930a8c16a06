"""An exported OpenVINO model is served where it lies, and what is no stateful language model is refused by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.source import open_artifact
from lockstep.errors import (
    ArtifactNotFoundError,
    CorruptArtifactError,
    MissingTokenizerError,
    UnsupportedArtifactError,
    UsageError,
)
from lockstep.executors.base import Logits
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.runtime import Model, op, ov
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.probe import quick_probe
from tests.executors.openvino.exported import export, with_ops_after_the_head
from tests.executors.openvino.support import SMALL_LLAMA, TINY_LLAMA, reference_logits, run
from tools.random_models import write_huggingface

EXACT = ExecutorOptions(kv_cache_precision="f32", dynamic_quantization_group_size=0)
IDS = list(range(40, 110))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    export(root / "plain")
    export(root / "extra", with_ops_after_the_head)
    write_huggingface(root / "source", "tiny-llama", "F16")
    return root


def logits_of(path: Path, options: ExecutorOptions = EXACT) -> Logits:
    executor = load_executor(open_artifact(str(path), cache_dir=path.parent), options)
    executor.allocate(40, 2)
    logits = run(executor, (IDS, 0, (1, 2, 3)), all_rows=True)
    executor.close()
    return logits


def test_it_computes_what_its_source_does(folder: Path) -> None:
    artifact = open_artifact(str(folder / "plain"), cache_dir=folder)
    assert (artifact.format, artifact.config.num_layers, artifact.name) == ("openvino", TINY_LLAMA.num_layers, "plain")
    assert artifact.load_tokenizer().tokenizer.get_vocab_size() == 512
    expected = reference_logits(open_artifact(str(folder / "source"), cache_dir=folder), IDS)
    assert np.abs(logits_of(folder / "plain") - expected).max() <= 1e-3


def test_operators_after_the_head_are_kept(folder: Path) -> None:
    plain, extra = logits_of(folder / "plain"), logits_of(folder / "extra")
    assert np.abs(30 * np.tanh(plain * 0.5 / 30) - extra).max() <= 1e-3


@pytest.mark.parametrize("name", ["plain", "extra"])
def test_it_keeps_the_promise_of_the_same_bytes(folder: Path, name: str) -> None:
    executor = load_executor(open_artifact(str(folder / name), cache_dir=folder))
    executor.allocate(40, 2)
    report = quick_probe(executor, 40)
    executor.close()
    assert report.deterministic, [case for case in report.cases if not case.passed]


def test_it_is_its_own_cache(folder: Path, tmp_path: Path) -> None:
    logits_of(folder / "plain", ExecutorOptions(cache_dir=tmp_path))
    assert not (tmp_path / "ir").exists()


def test_its_fingerprint_is_its_content(folder: Path, tmp_path: Path) -> None:
    first = open_artifact(str(folder / "plain"), cache_dir=tmp_path).fingerprint
    copied = shutil.copytree(folder / "plain", tmp_path / "copy")
    assert open_artifact(str(copied), cache_dir=tmp_path).fingerprint == first
    for name in ("openvino_model.bin", "openvino_model.xml", "generation_config.json"):
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(content.replace(b"0", b"1", 1))
        try:
            assert open_artifact(str(copied), cache_dir=tmp_path).fingerprint != first
        finally:
            (copied / name).write_bytes(content)


def test_its_weights_cannot_be_quantised_again(folder: Path) -> None:
    with pytest.raises(UsageError, match="no float weights to quantise"):
        logits_of(folder / "plain", ExecutorOptions(quantize="int8"))


def saved(directory: Path, model: Model) -> Path:
    ov.save_model(model, str(directory / "openvino_model.xml"))
    return directory


def stateless(extra: str) -> Model:
    ids = op.parameter(ov.PartialShape([-1, -1]), np.int64, name="input_ids")
    ids.output(0).tensor.set_names({"input_ids"})
    other = op.parameter(ov.PartialShape([-1, -1]), np.int64, name=extra)
    other.output(0).tensor.set_names({extra})
    return ov.Model([op.result(op.add(ids, other))], [ids, other], "other")


def test_other_graphs_are_refused_with_how_to_export(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    for extra, message in (
        ("pixel_values", "lacks input 'attention_mask'.*has input 'pixel_values'.*; export a stateful text-generation"),
        ("past_key_values.0.key", r"takes its KV cache as inputs \(past_key_values\.0\.key"),
    ):
        saved(directory, stateless(extra))
        with pytest.raises(UnsupportedArtifactError, match=message):
            open_artifact(str(directory), cache_dir=tmp_path)


def test_a_graph_without_state_is_refused(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    text = (directory / "openvino_model.xml").read_text()
    (directory / "openvino_model.xml").write_text(text.replace('"ReadValue"', '"Other"'))
    with pytest.raises(UnsupportedArtifactError, match="has no state; export"):
        open_artifact(str(directory), cache_dir=tmp_path)
    (directory / "openvino_model.xml").write_text(text.replace('"ScaledDotProductAttention"', '"Other"'))
    with pytest.raises(UnsupportedArtifactError, match="has 4 states and 0 ScaledDotProductAttention"):
        open_artifact(str(directory), cache_dir=tmp_path)


@pytest.mark.parametrize("missing", ["openvino_model.bin", "config.json"])
def test_a_part_of_an_export_says_what_is_missing(folder: Path, tmp_path: Path, missing: str) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    (directory / missing).unlink()
    with pytest.raises(ArtifactNotFoundError, match=rf"holds openvino_model\.xml but no {missing}"):
        open_artifact(str(directory), cache_dir=tmp_path)


def test_a_missing_tokenizer_is_said(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(MissingTokenizerError, match=r"holds no tokenizer\.json"):
        open_artifact(str(directory), cache_dir=tmp_path).load_tokenizer()


def test_damaged_files_are_errors_and_no_crashes(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    os.truncate(directory / "openvino_model.bin", 1000)
    with pytest.raises(CorruptArtifactError, match="OpenVINO cannot read it"):
        logits_of(directory)
    (directory / "openvino_model.xml").write_text("<net><layers>")
    with pytest.raises(CorruptArtifactError, match="is not an OpenVINO graph"):
        open_artifact(str(directory), cache_dir=tmp_path)


def test_a_vocabulary_that_is_not_the_graphs_is_refused(folder: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(folder / "plain", tmp_path / "m")
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"vocab_size": 512', '"vocab_size": 600'))
    with pytest.raises(CorruptArtifactError, match=r"512 logits and config\.json a vocabulary of 600"):
        logits_of(directory)


def test_a_graph_whose_head_is_not_a_product_is_refused(tmp_path: Path) -> None:
    def sorted_logits(model: Model) -> Model:
        result = model.get_results()[0]
        logits = result.input_value(0)
        logits.tensor.set_names(set())
        top = op.topk(logits.get_node(), op.constant(np.int64(SMALL_LLAMA.vocab_size)), 2, "max", "value")
        result.input(0).replace_source_output(top.output(0))
        result.output(0).tensor.set_names({"logits"})
        model.validate_nodes_and_infer_types()
        return model

    with pytest.raises(UnsupportedArtifactError, match="operator TopK between head and logits"):
        logits_of(export(tmp_path / "m", sorted_logits, "small-llama"))
