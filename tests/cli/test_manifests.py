"""`lockstep check`: every fault of a manifest, or the placement that it would boot to, for people and for programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import invoke
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from tests.artifacts.hub.stand_in import hub_environment
from tests.cli.encoders import write_embedder, write_reranker
from tests.processes import run
from tools.random_models import write_gguf

Check = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Check]:
    """Runs the verb on a manifest's text or file; the hub's cache is empty."""

    def call(manifest: str | Path, *flags: str) -> tuple[int, str, str]:
        path = manifest if isinstance(manifest, Path) else tmp_path / "manifest.yaml"
        if isinstance(manifest, str):
            path.write_text(manifest)
        code = invoke(["check", str(path), "--cache-dir", str(tmp_path / "cache"), *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    with hub_environment(HF_HUB_CACHE=str(tmp_path / "hub")):
        yield call


def facts(check: Check, manifest: str | Path, *flags: str) -> dict[str, Any]:
    _, out, err = check(manifest, "--json", *flags)
    assert err == ""
    told: dict[str, Any] = json.loads(out)
    return told


@pytest.mark.parametrize(
    ("example", "num_models", "num_resident", "resident_mb"),
    [
        ("customer-support", 5, 3, 2_400),
        ("density-50", 51, 26, 20_800),
        ("warming-heavy", 9, 1, 800),
        ("embeddings", 5, 4, 3_200),
        ("lora-specialists", 5, 5, 4_000),
    ],
)
def test_the_examples_boot_on_stubs(
    check: Check, example: str, num_models: int, num_resident: int, resident_mb: int
) -> None:
    told = facts(check, EXAMPLES / f"{example}.yaml", "--backend", "stub")
    assert told["would_boot"]
    assert told["warnings"] == told["refusals"] == told["problems"] == []
    tiers = [model["tier"] for model in told["models"]]
    assert (len(tiers), tiers.count("resident")) == (num_models, num_resident)
    gpu, _ = told["budgets"]
    assert gpu["needed_bytes"] == resident_mb * 1_000_000
    assert gpu["effective_bytes"] == gpu["declared_bytes"]


def test_a_line_a_model_and_a_line_a_budget(check: Check) -> None:
    code, out, err = check(EXAMPLES / "customer-support.yaml", "--backend", "stub")
    assert (code, err) == (0, "")
    head, *rows, gpu, ram = out.splitlines()
    assert head.split() == ["model", "tier", "source", "resident", "in", "memory", "size", "verdict"]
    assert [row.split()[0] for row in rows] == ["router", "billing", "technical", "legal", "fallback"]
    assert "800 MB" in rows[0]
    assert gpu == "gpu_budget: 2.4 GB needed of 18 GB"
    assert ram.startswith("ram_budget: ")


def test_budgets_count_activations_of_encoders_and_tasks_are_shown(check: Check, tmp_path: Path) -> None:
    embedder, reranker = write_embedder(tmp_path / "embedder"), write_reranker(tmp_path / "reranker")
    path = tmp_path / "manifest.yaml"
    chat = "{source: 'pocket://'}"
    path.write_text(f"cluster: c\nmodels:\n  e: {{source: {embedder}}}\n  r: {{source: {reranker}}}\n  chat: {chat}\n")
    models = {each["id"]: each for each in facts(check, path)["models"]}
    assert {id_: each["task"] for id_, each in models.items()} == {"e": "embed", "r": "rerank", "chat": "generate"}
    model, config = load_model(str(embedder), LoadOptions(EngineOptions(max_num_seqs=64), cache_dir=tmp_path / "cache"))
    used = config.num_blocks * model.executor.geometry.bytes_per_block + (model.weights_bytes or 0)
    model.close()
    assert used <= models["e"]["resident_bytes"] <= 2 * used
    head, row, *_ = check(path)[1].splitlines()
    assert row[head.index("task") :].split()[0] == "embed"


def test_a_task_that_an_encoder_cannot_have_is_refused_with_the_model(check: Check, tmp_path: Path) -> None:
    embedder = write_embedder(tmp_path / "embedder")
    path = tmp_path / "manifest.yaml"
    for task in ("rerank", "generate"):
        path.write_text(f"cluster: c\nmodels:\n  e: {{source: {embedder}, task: {task}}}\n")
        code, _, err = check(path)
        assert (code, f"e: task is '{task}'" in err) == (2, True), err


def test_one_model_behind_every_name_is_one_replica(check: Check, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "tiny-llama")
    told = facts(check, EXAMPLES / "customer-support.yaml", "--backend", str(path))
    assert (told["backend"], told["would_boot"]) == (str(path), True)
    assert {model["source"] for model in told["models"]} == {str(path)}
    assert [model["shares_with"] for model in told["models"]] == [None, *["router"] * 4]
    code, _, err = check(EXAMPLES / "customer-support.yaml", "--backend", "stubs")
    assert (code, "did you mean 'stub'?" in err) == (2, True)


def test_models_of_one_artifact_are_one_replica(check: Check) -> None:
    told = facts(check, EXAMPLES / "customer-support.yaml", "--backend", "pocket")
    assert told["would_boot"]
    router, *others = told["models"]
    assert router["resident_bytes"] > 0
    assert router["size"] == "predicted"
    assert [model["shares_with"] for model in others] == ["router"] * 4
    assert told["budgets"][0]["needed_bytes"] == router["resident_bytes"]


HOSTED = """
cluster: hosted
models:
  router: {source: 'stub://router'}
  all:
    - {id: a, source: 'stub://a'}
    - {id: b, source: 'stub://a'}
    - {id: far, remote: {base_url: 'http://127.0.0.1:1/v1'}}
hosts:
  replicas:
    router: {num: 2}
    a: {num: 3, resources: {CPU: 2, memory: 4GB}, spread: true}
  tls: {ca: /ca.pem, cert: /cert.pem}
"""


def test_hosts_are_printed_with_the_replicas_of_each_model(check: Check) -> None:
    code, out, err = check(HOSTED)
    assert (code, err) == (0, "")
    assert out.splitlines()[-2:] == [
        "hosts: Ray at auto; routing prefix, max_imbalance 4; TLS",
        "replicas of router: 2; a, b: 3, each 2 CPU and 4GB of memory, spread",
    ]
    told = facts(check, HOSTED)
    nums = {model["id"]: model["replicas"] and model["replicas"]["num"] for model in told["models"]}
    assert nums == {"router": 2, "a": 3, "b": 3, "far": None}
    assert told["hosts"] == {
        "ray": "auto",
        "routing": "prefix",
        "max_imbalance": 4,
        "secret": "~/.config/lockstep/secret",
        "tls": {"ca": "/ca.pem", "cert": "/cert.pem", "key": None},
        "allow_plain": False,
    }
    assert facts(check, EXAMPLES / "customer-support.yaml", "--backend", "stub")["hosts"] is None


def test_different_replica_counts_for_one_artifact_give_a_warning(check: Check) -> None:
    _, _, err = check(HOSTED, "--backend", "pocket")
    assert "warning: router: has 3 replicas, not 2, because models of one artifact share them" in err


def test_check_downloads_nothing(check: Check) -> None:
    """And what the boot refuses is told beside the placement: here a remote model without its server."""
    code, out, err = check(EXAMPLES / "customer-support.yaml")
    assert code == 2
    assert out.count("unknown") == 2 * 4
    assert "`lockstep pull hf://neurometric/tech-phi3` fetches it" in err
    assert "lockstep: error: fallback: a remote model needs" in err


def test_files_are_measured_and_copies_share(check: Check, tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf", "tiny-llama", "Q8_0")
    shutil.copy(tmp_path / "one.gguf", tmp_path / "copy.gguf")
    text = f"""
cluster: files
models:
  all:
    - {{id: a, source: {tmp_path}/one.gguf}}
    - {{id: b, source: {tmp_path}/copy.gguf, tier: standby}}
    - {{id: c, source: {tmp_path}/one.gguf, engine: {{max_num_seqs: 2}}}}
    - {{id: d, source: hf://nobody/here, size: 100MB}}
    - {{id: e, source: pocket://, size: 300MB, tier: standby}}
"""
    told = facts(check, text)
    a, b, c, d, e = told["models"]
    assert told["would_boot"]
    assert (a["size"], a["resident_bytes"] > 0, a["memory_bytes"]) == ("predicted", True, 0)
    assert b["shares_with"] == "a", "by content, not by path"
    assert c["shares_with"] is None, "another engine is another replica"
    assert (d["size"], d["resident_bytes"]) == ("declared", 100_000_000)
    assert (e["size"], e["resident_bytes"], e["memory_bytes"]) == ("declared", 0, 300_000_000)


def test_a_source_that_cannot_be_served_refuses_the_boot(check: Check, tmp_path: Path) -> None:
    torn, absent = tmp_path / "torn.gguf", tmp_path / "none.gguf"
    torn.write_bytes(b"GGUF\x03\x00")
    text = f"cluster: x\nmodels:\n  a: {{source: {torn}}}\n  b: {{source: {absent}, size: 1MB}}\n"
    told = facts(check, text)
    assert not told["would_boot"]
    first, second = told["refusals"]
    assert first.startswith("a: ")
    assert "torn.gguf" in first
    assert second.startswith("b: ")
    assert "no such file or directory" in second


def test_budgets_without_an_exact_unit_are_a_warning(check: Check) -> None:
    text = (EXAMPLES / "customer-support.yaml").read_text().replace("18GB", "18G").replace("32GB", "32000000000")
    code, out, err = check(text, "--backend", "stub")
    assert code == 0
    assert "gpu_budget: 2.4 GB needed of 18 GB" in out
    assert err.splitlines() == [
        "lockstep: warning: line 4: resources.gpu_budget is '18G', which is read as 18GB (18,000,000,000 bytes); "
        "NRT reads it as 18GiB; write 18GB or 18GiB",
        "lockstep: warning: line 5: resources.ram_budget is '32000000000', which is read as 32000000000B "
        "(32,000,000,000 bytes); write 32000000000B",
    ]
    told = facts(check, text, "--backend", "stub")
    assert told["would_boot"]
    assert len(told["warnings"]) == 2


def test_over_budget_is_a_refusal_with_its_figures(check: Check) -> None:
    text = (EXAMPLES / "customer-support.yaml").read_text().replace("18GB", "2GB")
    code, out, err = check(text, "--backend", "stub")
    assert code == 2
    assert "over budget" in out
    assert "gpu_budget: 2.4 GB needed of 2 GB, 400 MB too much" in err


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("engine: {kv_cache_memory_bytes: 900TB}", "m: kv_cache_memory_bytes is 900,000 GB, but this machine has"),
        ("engine: {max_model_len: 4096}", "m: max_model_len is 4096; the model allows 2 to 2048"),
        ("chat_template: '{% for %}'", "m: the model's chat template cannot be read"),
        (
            "chat_template: \"{{ raise_exception('no') }}\"",
            "m: no conversation can be rendered: with a single user message, the chat template rej",
        ),
    ],
)
def test_setting_that_the_load_would_reject_is_an_error(check: Check, key: str, words: str) -> None:
    text = f"cluster: c\nmodels:\n  m:\n    source: pocket://\n    {key}\n  s: {{source: 'stub://s'}}\n"
    code, out, err = check(text)
    assert code == 2
    assert f"lockstep: error: {words}" in err
    assert "pocket://" in out
    if "900TB" in key:
        assert check(text, "--backend", "stub")[0] == 0, "a stub's pool is a fiction"


def test_a_budget_above_the_machine_is_cut_with_a_warning(check: Check) -> None:
    text = "cluster: x\nresources: {gpu_budget: 900TB, ram_budget: 100TB}\nmodels: {a: {source: 'pocket://'}}\n"
    told = facts(check, text)
    gpu, ram = told["budgets"]
    assert gpu["effective_bytes"] < gpu["declared_bytes"]
    assert gpu["effective_bytes"] == pytest.approx(9 * ram["effective_bytes"], rel=1e-6), "in proportion"
    assert [warning.split()[0] for warning in told["warnings"]] == ["gpu_budget", "ram_budget"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("keep_alive: 5m", "keep_alive has no effect"),
        ("promotion_hint: on_router_classification", "promotion_hint has no effect"),
    ],
)
def test_setting_without_effect_is_a_warning(check: Check, key: str, words: str) -> None:
    text = f"cluster: x\nmodels: {{a: {{source: 'stub://a', {key}}}, b: {{source: 'stub://b'}}}}\nfallback: b\n"
    code, _, err = check(text)
    assert code == 0
    assert f"lockstep: warning: a: {words}" in err
    assert "fallback: has no effect" in err


def test_settings_that_need_something_else_are_warnings(check: Check) -> None:
    text = """
cluster: x
resources: {disk_kv_budget: 1TB}
models:
  a: {source: 'stub://a'}
  b: {remote: {base_url: 'https://api.example.com/v1'}, co_activation: a}
"""
    code, _, err = check(text)
    assert code == 0
    assert err.splitlines() == [
        "lockstep: warning: b: co_activation has no effect, as a remote model is never loaded",
        "lockstep: warning: disk_kv_budget has no effect without --kv-dir DIR, the directory for KV files",
    ]


def test_a_standby_model_that_never_fits_is_a_warning(check: Check) -> None:
    text = """
cluster: x
resources: {gpu_budget: 2GB}
models:
  a: {source: 'stub://a', size: 1.5GB}
  b: {source: 'stub://b', size: 1GB, tier: standby}
"""
    code, _, err = check(text)
    assert code == 0
    assert "b: can never be loaded beside the models that are declared resident" in err


def test_every_fault_is_a_line_on_standard_error(check: Check, tmp_path: Path) -> None:
    code, out, err = check("cluster: [x]\nmodels:\n  a: {source: 5}\n  b: {sorce: x}\n")
    assert (code, out) == (2, "")
    path = tmp_path / "manifest.yaml"
    assert [line.partition(" is ")[0].partition(" has ")[0] for line in err.splitlines()] == [
        f"lockstep: error: {path}, line 1: cluster",
        f"lockstep: error: {path}, line 3: models.a.source",
        f"lockstep: error: {path}, line 4: models.b.sorce",
        f"lockstep: error: {path}, line 4: models.b",
    ]


def test_every_fault_is_an_object_in_json(check: Check) -> None:
    told = facts(check, "cluster: x\nmodels:\n  a: {source: 5}\n")
    assert not told["would_boot"]
    (problem,) = told["problems"]
    assert (problem["line"], problem["where"]) == (3, "models.a.source")
    assert problem["message"].startswith("is 5; it must be a string")


def test_the_environment_is_that_of_the_command(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_HOST", "shop.example.com")
    text = "cluster: x\nmodels: {a: {remote: {base_url: 'https://${SHOP_HOST}/v1'}}}\n"
    assert facts(check, text)["models"][0]["source"] == "https://shop.example.com/v1"
    monkeypatch.delenv("SHOP_HOST")
    assert "SHOP_HOST" in facts(check, text)["problems"][0]["message"]


def test_standard_input_is_a_file() -> None:
    result = run("check", "-", stdin="cluster: x\nmodels: {a: {source: 'stub://a'}, b: }\n")
    assert result.returncode == 2
    assert result.stderr.startswith("lockstep: error: standard input, line 2: models.b is empty")


def test_a_file_that_is_too_large_is_refused_for_that(check: Check, tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes("é".encode() * 200_000)
    code, _, err = check(tmp_path / "large.yaml")
    assert code == 2
    assert "line 1: it is larger than 262144 bytes" in err


def test_unreadable_manifest_is_reported_in_one_line(check: Check, tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"cluster: caf\xe9\n")
    for path in (tmp_path / "nowhere.yaml", tmp_path, tmp_path / "latin.yaml"):
        code, out, err = check(path)
        assert (code, out) == (2, "")
        assert err.startswith(f"lockstep: error: the manifest {path} cannot be read (")
        assert err.count("\n") == 1


def test_a_key_that_is_not_set_is_a_warning(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cluster: c\nmodels:\n  far: {remote: {base_url: 'http://127.0.0.1:9/v1', api_key_env: FAR_KEY}}\n"
    monkeypatch.setenv("FAR_KEY", "secret")
    assert facts(check, text)["warnings"] == []
    monkeypatch.delenv("FAR_KEY")
    told = facts(check, text)
    assert told["warnings"] == ["far: FAR_KEY, which api_key_env names, is not set in the environment"]
    assert told["would_boot"]
