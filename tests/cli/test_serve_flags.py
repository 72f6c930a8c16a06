"""A flag of `lockstep serve` for every field of a scheduler: no list of them can part from the fields themselves."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from lockstep.cli.flag_groups import with_flags
from lockstep.cli.main import command_of, invoke
from lockstep.cli.serve import engine_options, kv_options, trace_options
from lockstep.cli.serve_flags import ENGINE, RecordFlags, WorkerFlags
from lockstep.cluster.manifest_keys import engine_keys
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.options import EngineOptions, plan_config
from lockstep.errors import ConfigError
from lockstep.executors.base import Geometry
from lockstep.option_fields import field_docs, option_types
from lockstep.replay.live import workload_of
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.entries import OutputDigest, RequestDigest
from tests.server.process import IN_THREAD, serve

STUB = "stub://alpha"
GEOMETRY = Geometry(16, 16, 1, 8192, 256)
SAMPLES: dict[str, object] = {
    "block_size": 16,
    "num_blocks": 40,
    "max_model_len": 512,
    "num_host_blocks": 20,
    "max_num_seqs": 4,
    "max_num_step_seqs": 3,
    "max_num_batched_tokens": 96,
    "max_num_prefill_tokens": 48,
    "max_chunk_tokens": 32,
    "max_num_decode_seqs": 2,
    "max_forced_tokens": 8,
    "chunking": False,
    "admission": "reserve",
    "order": "priority",
    "decode_order": "oldest",
    "prefill_share": "adaptive",
    "preemption": "recompute",
    "max_skips": 0,
    "priority_aging_steps": 7,
    "max_num_queued_reqs": 5,
    "max_num_queued_tokens": 6000,
    "max_finished": 9,
    "max_num_tenants": 10,
    "enable_prefix_caching": False,
}
"""Another value than the default for every field of a scheduler that somebody may intend."""
VLLM_NAMES = {
    "max_chunk_tokens": "--long-prefill-token-threshold",
    "chunking": "--enable-chunked-prefill",
    "order": "--scheduling-policy",
    "num_blocks": "--num-gpu-blocks-override",
}


def parameters() -> dict[str, Any]:
    """Of `lockstep serve`, by name."""
    return {parameter.name: parameter for parameter in command_of("serve").params}


def said(name: str, value: object, flag: str = "") -> list[str]:
    """As a command line says it."""
    flag = flag or "--" + name.replace("_", "-")
    return [flag.replace("--", "--no-", 1)] if value is False else [flag, str(value)]


def engine_of(*arguments: str) -> EngineOptions:
    """What flags make of an engine, read as `lockstep serve` reads them."""
    made: list[EngineOptions] = []

    @with_flags
    def command(*, engine: Annotated[EngineOptions, ENGINE]) -> None:
        made.append(engine_options(engine))

    reader = typer.Typer()
    reader.command()(command)
    reader(args=list(arguments), standalone_mode=False)
    return made[0]


def config_of(*arguments: str) -> SchedulerConfig:
    return plan_config(engine_of(*arguments), GEOMETRY, 1 << 30)


def config_of_recording(path: Path) -> dict[str, object]:
    """What the scheduler had whose server recorded itself there."""
    return dict(workload_of(open_trace(path)).config)


def test_every_field_of_the_scheduler_has_a_flag_and_a_key_of_a_manifest() -> None:
    """And what can be said of an engine beside them has both as well."""
    names = [f.name for f in fields(SchedulerConfig) if f.name != "groups"]  # those of the model
    flags = parameters()
    assert [name for name in names if name not in flags] == []
    assert [name for name in names if name not in engine_keys()] == []
    assert SAMPLES.keys() == set(names)
    given, decided = option_types(EngineOptions), option_types(SchedulerConfig)
    for name in names:
        assert (given[name].kind, given[name].words) == (decided[name].kind, decided[name].words), name
    for name in names:
        assert flags[name].opts[0] == "--" + name.replace("_", "-")
        assert flags[name].opts[1:] == ([VLLM_NAMES[name]] if name in VLLM_NAMES else [])


def test_the_help_of_a_flag_is_the_sentence_under_its_field() -> None:
    flags, docs = parameters(), field_docs(EngineOptions)
    assert docs.keys() == {f.name for f in fields(EngineOptions)}
    assert flags["max_skips"].help == docs["max_skips"]
    assert flags["max_num_step_seqs"].help == "Maximum sequences per step, including prompts and decodes."
    assert flags["max_num_step_seqs"].show_default == "as max-num-seqs"
    assert all(len(flags[name].help) > 10 for name in docs if name != "host_kv_memory_bytes")


@pytest.mark.parametrize("name", SAMPLES)
def test_a_flag_sets_its_field(name: str) -> None:
    assert getattr(config_of(*said(name, SAMPLES[name])), name) == SAMPLES[name]
    if name in VLLM_NAMES:
        assert getattr(config_of(*said(name, SAMPLES[name], VLLM_NAMES[name])), name) == SAMPLES[name]


def test_a_flag_left_out_gives_the_default_of_its_field() -> None:
    """But for the pool, which follows from the memory, and the context, which is the model's."""
    made = config_of()
    for f in fields(SchedulerConfig):
        if f.default is not MISSING and f.name != "num_host_blocks":
            assert getattr(made, f.name) == f.default, f.name
    assert config_of("--kv-cache-memory-bytes", "160", "--swap-space-bytes", "320").num_blocks == 10
    assert config_of("--kv-cache-memory-bytes", "160", "--swap-space-bytes", "320").num_host_blocks == 20


def test_all_of_them_reach_the_scheduler_that_serves(tmp_path: Path) -> None:
    """As the recording of a server has it. Two of the samples exclude each other."""
    samples = {**SAMPLES, "prefill_share": "fixed"}
    flags = [word for name, value in samples.items() for word in said(name, value)]
    with serve(STUB, *IN_THREAD, *flags, "--trace", str(tmp_path / "flight")) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "priority": 1}).status_code == 200
    assert config_of_recording(tmp_path / "flight") == samples


def test_a_recording_has_the_callers_names_and_digests_under_the_operators_key(tmp_path: Path) -> None:
    """Two servers with the same secret and the same request: whether their answers are equal is there to be seen."""
    (tmp_path / "key").write_text("a secret of the operator")
    body = {"prompt": "what nobody shall read", "max_tokens": 3, "ignore_eos": True}
    digests: list[tuple[bytes, ...]] = []
    for name in ("baseline", "candidate"):
        flags = ("--trace", str(tmp_path / name), "--trace-key", str(tmp_path / "key"))
        headers = {"x-request-id": f"r-{name}", "x-lockstep-segment": "eu"}
        with serve(STUB, *IN_THREAD, *flags) as server, server.client() as client:
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
        entries = list(open_trace(tmp_path / name).entries())
        [asked] = [entry for entry in entries if isinstance(entry, RequestDigest)]
        [answered] = [entry for entry in entries if isinstance(entry, OutputDigest)]
        assert (asked.external_id, asked.segment) == (f"r-{name}", "eu")
        digests.append((asked.prompt, asked.parameters, answered.output))
    assert digests[0] == digests[1]


def test_a_key_without_a_recording_is_refused_and_so_is_one_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    assert invoke(["serve", STUB, "--trace-key", missing]) == 2
    assert "--trace-key requires --trace DIR" in capsys.readouterr().err
    assert invoke(["serve", STUB, "--trace", str(tmp_path / "flight"), "--trace-key", missing]) == 2
    assert "the recording's key cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_file_has_flags_by_any_of_their_names(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: {STUB}\nport: 0\nworker: thread\nscheduling-policy: priority\nmax-chunk-tokens: 5\n")
    environment = {"LOCKSTEP_LONG_PREFILL_TOKEN_THRESHOLD": "7"}
    flags = ("--config", str(path), "--trace", str(tmp_path / "flight"))
    with serve(*flags, environment=environment) as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "priority": 1}).status_code == 200
    config = config_of_recording(tmp_path / "flight")
    assert (config["order"], config["max_chunk_tokens"]) == ("priority", 7)


def test_a_file_with_two_names_of_one_flag_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("order: fcfs\nscheduling_policy: fair\n")
    assert invoke(["serve", STUB, "--config", str(path)]) == 2
    assert "'order' and 'scheduling-policy' are names of the same flag" in capsys.readouterr().err


@pytest.mark.parametrize("max_num_seqs", [1, 64, 512, 4096])
def test_a_step_has_room_for_any_number_of_sequences(max_num_seqs: int) -> None:
    """Unless the room is given: then it is taken at its word."""
    flags = ("--max-num-seqs", str(max_num_seqs))
    assert config_of(*flags).max_num_batched_tokens == max(512, max_num_seqs + 15)
    assert config_of(*flags, "--max-num-decode-seqs", "8").max_num_batched_tokens == 512
    if max_num_seqs > 64:
        with pytest.raises(ConfigError, match="max_num_batched_tokens is 100"):
            config_of(*flags, "--max-num-batched-tokens", "100")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-events-replay", "tcp://127.0.0.1:5558"], "--kv-events-replay requires --kv-events ENDPOINT"),
        (["--kv-events-topic", "kv@{model}"], "--kv-events-topic requires --kv-events ENDPOINT"),
        (["--kv-events-allow-remote"], "--kv-events-allow-remote requires --kv-events ENDPOINT"),
        (["--kv-events", "tcp://*:5557"], "which other machines can reach"),
        (["--kv-events", "127.0.0.1:5557"], "it must be tcp://HOST:PORT or ipc://PATH"),
    ],
)
def test_kv_events_are_refused_where_they_cannot_be(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert invoke(["serve", "stub://a", *flags]) == 2
    assert words in capsys.readouterr().err


def test_kv_events_are_refused_where_models_are_on_other_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "hosted.yaml"
    manifest.write_text("cluster: c\nmodels: {m: {source: 'stub://a'}}\nhosts: {}\n")
    assert invoke(["serve", "--manifest", str(manifest), "--kv-events", "tcp://127.0.0.1:5557"]) == 2
    assert "--kv-events does not support `hosts:`" in capsys.readouterr().err


def test_sizes_of_stored_kv_and_of_recordings_are_in_mib(tmp_path: Path) -> None:
    kv = kv_options(WorkerFlags(host_kv_mb=3, kv_dir=tmp_path / "kv", kv_dir_mb=5))
    assert (kv.host_bytes, kv.disk_bytes) == (3 * 1_048_576, 5 * 1_048_576)
    recorded = trace_options(RecordFlags(trace=tmp_path / "trace", trace_max_mb=7))
    assert recorded is not None
    assert recorded.max_bytes == 7 * 1_048_576
