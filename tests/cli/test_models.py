"""Real files through the real command line: what runs, what is told of it, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.source import open_artifact
from lockstep.cli.main import invoke
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.executors.kv_costs import kv_costs
from lockstep.executors.native.executor import NativeExecutor
from tests.cli.encoders import write_embedder, write_reranker
from tools.random_models import SHAPES, write_gguf, write_huggingface

Run = Callable[..., tuple[int, str, str]]
SHORT = ("--max-tokens", "6", "--temperature", "0", "--ignore-eos")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = invoke([*arguments, "--cache-dir", str(tmp_path / "cache")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF and a Hugging Face directory of both families."""
    folder = tmp_path_factory.mktemp("models")
    for name, encoding in (("tiny-llama", "Q8_0"), ("tiny-qwen3", "Q4_0")):
        write_gguf(folder / f"{name}.gguf", name, encoding)
        write_huggingface(folder / name, name, "BF16")
    return folder


@pytest.mark.parametrize("name", ["tiny-llama.gguf", "tiny-qwen3.gguf", "tiny-llama", "tiny-qwen3"])
def test_run_answers_from_every_format_and_repeats_the_same_text(run: Run, models: Path, name: str) -> None:
    arguments = ("run", str(models / name), "-p", "hello world", "--json", *SHORT)
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["usage"]["completion_tokens"] == 6
    assert json.loads(run(*arguments)[1])["text"] == answer["text"]


def test_info_prints_the_facts_of_a_model(run: Run, models: Path) -> None:
    code, out, _ = run("models", "info", str(models / "tiny-qwen3.gguf"), "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["architecture"], facts["format"], facts["layers"]) == ("qwen3", "gguf", 2)
    assert facts["encodings"].keys() >= {"F32", "Q4_0"}
    text = run("models", "info", "pocket://")[1]
    assert "architecture" in text
    assert "<|end|>" in text


def test_info_prints_the_types_of_loaded_weights(run: Run, models: Path, tmp_path: Path) -> None:
    mixed = write_gguf(tmp_path / "mixed.gguf", "small-llama", "Q4_K_M")
    assert json.loads(run("models", "info", str(mixed), "--json")[1])["loaded_as"] == {
        "Q4_K": 13,
        "Q6_K": 3,
    }
    facts = json.loads(run("models", "info", str(mixed), "--json")[1])
    assert facts["loaded_bytes"] == load_model(str(mixed), LoadOptions(EngineOptions(num_blocks=1)))[0].weights_bytes
    facts = json.loads(run("models", "info", str(models / "tiny-llama"), "--quantize", "int4", "--json")[1])
    assert facts["loaded_as"].keys() == {"Q4_0", "Q8_0"}


def test_info_shows_the_memory_of_a_sequence(run: Run, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "hybrid.gguf", "tiny-qwen35", "Q8_0")
    facts = json.loads(run("models", "info", str(path), "--json")[1])
    costs = kv_costs(open_artifact(str(path), cache_dir=tmp_path).config)
    assert facts["kv_bytes_per_token_f16"] == costs.groups[0].bytes_per_token > 0
    assert (facts["state_bytes"], facts["snapshot_every_tokens"]) == (costs.state_bytes, costs.snapshot_interval)
    assert facts["kv_bytes_of_context"] == {"2048": costs.bytes_of(2048)}
    assert facts["contexts_in_default_pool"] == (512 << 20) // costs.bytes_of(2048)
    assert f"{costs.state_bytes:,}" in run("models", "info", str(path))[1]
    windowed = write_huggingface(tmp_path / "windowed", "tiny-gemma3", "BF16")
    facts = json.loads(run("models", "info", str(windowed), "--json")[1])
    assert [(group["layers"], group["window"]) for group in facts["kv_groups"]] == [(1, None), (5, 16)]
    assert "state_bytes" not in facts
    assert "layers: 5, window: 16" in run("models", "info", str(windowed))[1]


def test_info_tells_how_an_encoder_makes_vectors_and_scores(run: Run, tmp_path: Path) -> None:
    embedder, reranker = write_embedder(tmp_path / "embedder"), write_reranker(tmp_path / "reranker")
    facts = json.loads(run("models", "info", str(embedder), "--json")[1])
    expected = {
        "task": "embed", "longest_text": 60, "vector_size": 48, "pooling": "mean", "normalize": True,
        "dense_layers": ["48 tanh"], "prompts": {"query": "where is ", "document": ""}, "default_prompt": None,
    }  # fmt: skip
    assert expected.items() <= facts.items()
    model, _ = load_model(str(embedder), LoadOptions(EngineOptions(num_blocks=1), cache_dir=tmp_path / "cache"))
    assert 32 * facts["activation_bytes_per_token_f16"] == model.executor.geometry.bytes_per_block
    model.close()
    shown = run("models", "info", str(embedder))[1]
    assert "dense layers                    48 tanh" in shown
    facts = json.loads(run("models", "info", str(reranker), "--json")[1])
    assert (facts["task"], facts["scores"], facts["labels"]) == ("rerank", "a classifier", 1)
    assert facts["longest_text"] == 256
    assert json.loads(run("models", "info", "pocket://", "--json")[1])["task"] == "generate"


def test_run_quantises_float_weights_and_refuses_others(run: Run, models: Path) -> None:
    for quantize in ("int8", "int4"):
        code, out, _ = run("run", str(models / "tiny-llama"), "-p", "hi", "--quantize", quantize, "--json", *SHORT)
        assert (code, bool(json.loads(out)["text"])) == (0, True)
    code, _, err = run("run", str(models / "tiny-llama.gguf"), "-p", "hi", "--quantize", "int8")
    assert code == 2
    assert "no float weights to quantise" in err
    assert "'--quantize': 'q3'" in run("run", str(models / "tiny-llama"), "-p", "hi", "--quantize", "q3")[2]


def test_verify_prints_a_table_and_a_verdict(run: Run, models: Path) -> None:
    code, out, _ = run("models", "verify", str(models / "tiny-llama.gguf"))
    assert code == 0
    assert out.splitlines()[-2] == "deterministic: true"
    assert re.fullmatch("digest: [0-9a-f]+", out.splitlines()[-1])
    assert "swapped out and in" in out
    assert "batched with 31" in out
    assert "NO" not in out


def test_verify_fails_where_the_promise_does_not_hold(run: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = NativeExecutor.execute
    monkeypatch.setattr(NativeExecutor, "execute", lambda self, batch: own(self, batch) + len(batch.rows))
    code, out, _ = run("models", "verify", str(models / "tiny-qwen3.gguf"), "--json")
    report = json.loads(out)
    assert code == 1
    assert report["deterministic"] is False
    assert any(not case["passed"] for case in report["cases"])


def _truncated(folder: Path, models: Path) -> Path:
    path = folder / "truncated.gguf"
    content = (models / "tiny-llama.gguf").read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def _unknown_architecture(folder: Path, models: Path) -> Path:
    path = folder / "unknown"
    shutil.copytree(models / "tiny-llama", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _without_tokenizer(folder: Path, models: Path) -> Path:
    path = folder / "mute"
    shutil.copytree(models / "tiny-llama", path)
    (path / "tokenizer.json").unlink()
    return path


def _nan_weights(folder: Path, models: Path) -> Path:
    path = folder / "nan"
    shutil.copytree(models / "tiny-llama", path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1024:] = np.full(512, 0x7FC0, np.uint16).tobytes()  # NaN in bf16
    file.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_truncated, "truncated.gguf"),
        (_unknown_architecture, "mamba"),
        (_without_tokenizer, "tokenizer.json"),
        (_nan_weights, "NaN"),
    ],
)
def test_unsupported_model_is_rejected_by_name(
    run: Run, models: Path, tmp_path: Path, make: Callable[[Path, Path], Path], message: str
) -> None:
    code, out, err = run("run", str(make(tmp_path, models)), "-p", "hello")
    assert (code, out) == (2, "")
    assert message.lower() in err.lower()
    assert err.count("\n") == 1


def test_prompt_beyond_the_context_is_rejected_with_the_possible_length(run: Run, models: Path) -> None:
    model = str(models / "tiny-llama.gguf")
    long = "hello world " * 200
    _, _, err = run("run", model, "-p", long, "--raw", "--max-model-len", "128")
    assert "at most 127 are possible" in err
    _, _, err = run("run", model, "-p", long, "--raw", "--kv-cache-memory-bytes", "100000")
    assert "the KV pool of" in err


def test_real_shapes_are_known() -> None:
    """The benchmarks' shapes can be written without their weights changing what a test costs."""
    shape = replace(SHAPES["smollm2-135m"], num_layers=1)
    assert (shape.hidden_size, shape.vocab_size) == (576, 49152)
