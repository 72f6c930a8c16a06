"""Flags, environment and file of `lockstep serve`: who goes before whom, and what is refused before anything starts."""

from __future__ import annotations

import inspect
import json
import logging
import shlex
import socket
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import psutil
import pytest

from lockstep.cli.config_file import read_config
from lockstep.cli.main import command_of, invoke
from lockstep.cli.options import EXECUTOR
from lockstep.cli.serve import server_options, split_address, split_keys
from lockstep.cli.serve_flags import (
    ENGINE,
    LIMITS,
    ClusterFlags,
    ForeignFlags,
    ListenFlags,
    ModelFlags,
    RecordFlags,
    ReportFlags,
    WorkerFlags,
    foreign_flag_warnings,
)
from lockstep.engine.options import EngineOptions
from lockstep.errors import InvalidTextError, UsageError
from lockstep.executors.options import ISAS
from lockstep.server.options import ServerOptions
from lockstep.server.run import first_request
from lockstep.shown import size
from tests.server.frames import events_of, texts_of
from tests.server.process import IN_THREAD, ServerProcess, serve

STUB = "stub://alpha"
SUPPORT = str(Path(__file__).resolve().parents[2] / "examples" / "customer-support.yaml")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`lockstep serve` sets up the logging of its process, which here is the tests'."""
    loggers = [logging.getLogger(name) for name in (None, "lockstep", "uvicorn")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(
        "model: stub://from-file\nport: 0\nworker: thread\nserved-model-name: [from-file, alias]\nmax-model-len: 100\n"
        "enable_prefix_caching: false\nlog-format: json\n"
    )
    return path


def models_of(server: ServerProcess) -> dict[str, int]:
    with server.client() as client:
        return {model["id"]: model["max_model_len"] for model in client.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def flagged(config: Path) -> Iterator[ServerProcess]:
    """With a file, two hosts and ports, and flags of others."""
    addresses = ("--addr", "127.0.0.1:0", "--host", "192.0.2.1")
    others = ("--trust-remote-code", "--gpu-memory-utilization", "0.9", "-tp", "1", "--log-format", "text")
    with serve("--config", str(config), *addresses, *others) as server:
        yield server


def test_the_file_sets_flags_that_are_given_nowhere_else(flagged: ServerProcess) -> None:
    assert models_of(flagged) == {"from-file": 100, "alias": 100}


def test_a_flag_goes_before_the_environment_and_that_before_the_file(config: Path) -> None:
    environment = {"LOCKSTEP_SERVED_MODEL_NAME": "from-environment", "LOCKSTEP_MAX_MODEL_LEN": "200"}
    environment["LOCKSTEP_CONFIG"] = str(config)
    with serve(STUB, "--max-model-len", "300", "--port", "0", environment=environment) as server:
        assert models_of(server) == {"from-environment": 300}


def test_without_a_model_pocket_is_served_with_a_warning() -> None:
    with serve(*IN_THREAD) as server, server.client() as client:
        assert list(models_of(server)) == ["pocket"]
        command = first_request(server.base_url, has_key=False)  # as a terminal is shown it
        answer = client.post("/v1/chat/completions", json=json.loads(shlex.split(command)[-1]))
        assert answer.json()["model"] == "pocket"
        [warning] = [line for line in server.stderr.splitlines() if "WARNING" in line]
    assert "no MODEL is given: serving pocket" in warning


def test_a_second_port_is_the_one_of_addr(flagged: ServerProcess) -> None:
    assert flagged.base_url.startswith("http://127.0.0.1:")


def test_flags_without_effect_are_logged_once(flagged: ServerProcess) -> None:
    warnings = [line for line in flagged.stderr.splitlines() if " WARNING " in line]
    assert len(warnings) == 2
    assert "--gpu-memory-utilization has no effect: no GPU memory is reserved" in warnings[0]
    assert "--trust-remote-code has no effect: code of models is never run" in warnings[1]


def test_a_stream_interval_makes_fewer_frames_of_the_same_text() -> None:
    """As many at most as there are intervals in the time that the stream takes, and those that wait for nobody."""
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    interval_s, unhurried = 0.5, 4
    flags = ("--stream-interval-ms", str(interval_s * 1e3))
    with serve("stub://alpha?step_ms=4", *IN_THREAD, *flags) as server, server.client() as client:
        [whole] = client.post("/v1/completions", json=body).json()["choices"]
        began_s = time.monotonic()
        events = events_of(client.post("/v1/completions", json={**body, "stream": True}).text)
        took_s = time.monotonic() - began_s
    assert texts_of(events)[0] == whole["text"]
    assert token_ids_of(events) == whole["token_ids"]
    assert len(whole["token_ids"]) == 100
    assert len(events) <= took_s / interval_s + unhurried


def token_ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [token_id for event in events for choice in event["choices"] for token_id in choice.get("token_ids") or ()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STUB, "--manifest", "cluster.yaml"), "give only one of them"),
        ((STUB, "--backend", "stub"), "--backend requires --manifest FILE"),
        ((STUB, "--watch"), "--watch requires --manifest FILE"),
        ((STUB, "--allow-any-source"), "--allow-any-source requires --manifest FILE"),
        (("--manifest", "no/such.yaml"), "the manifest no/such.yaml cannot be read"),
        (("", "--manifest", "no/such.yaml"), "the manifest no/such.yaml cannot be read"),
        (("",), "MODEL is empty; give a model, --manifest FILE"),
        (("--manifest", "c.yaml", "--served-model-name", "a"), "--served-model-name does not apply to --manifest"),
        (("--manifest", "c.yaml", "--chat-template", "t"), "--chat-template does not apply to --manifest"),
        (
            ("--manifest", "c.yaml", "--backend", "mock"),
            "--backend is 'mock'; it must be auto, stub, pocket or the source of one model (a path, hf://org/name, ",
        ),
        (("--manifest", "c.yaml", "--backend", "pokcet"), "did you mean 'pocket'?"),
        (("--manifest", "c.yaml", "--backend", "hg://a/b"), "--backend is 'hg://a/b', of an unknown scheme 'hg'"),
        (("--manifest", "c.yaml", "--backend", "stub://a?colour=red"), "unknown stub option 'colour'; known: field"),
        (("--manifest", "c.yaml", "--backend", "pocket://x"), "the embedded model is called pocket://"),
        ((STUB, "--bogus"), "--bogus"),
        ((STUB, "--port", "70000"), "Invalid value for '--port': it is '70000' and must be at most 65535 (see --help)"),
        ((STUB, "--port", "http"), "Invalid value for '--port': it is 'http' and must be a whole number (see --help)"),
        ((STUB, "--addr", "9000"), "--addr is '9000'; it must be HOST:PORT"),
        ((STUB, "--host", "0.0.0.0"), "no API key is set: give --api-key KEY"),
        ((STUB, "--host", "no.such.host.invalid"), "is not an address to listen on"),
        ((STUB, "--host", "192.0.2.1", "--api-key", "k"), "cannot listen on 192.0.2.1"),
        ((STUB, "--api-key", ""), "--api-key is empty"),
        ((STUB, "--api-key", "a,,b"), "--api-key is empty"),
        ((STUB, "--metrics-prefix", "a b"), "--metrics-prefix is 'a b'"),
        ((STUB, "--scheduling-policy", "lifo"), "'LOCKSTEP_ORDER' or 'LOCKSTEP_SCHEDULING_POLICY'"),
        ((STUB, "--admission", "sometimes"), "Invalid value for '--admission': 'sometimes' is not one of"),
        ((STUB, "--max-skips", "-1"), "--max-skips"),
        ((STUB, "--worker", "fork"), "--worker"),
        ((STUB, "--max-num-seqs", "0"), "Invalid value for '--max-num-seqs': it is '0' and must be at least 1"),
        ((STUB, "--max-chunk-tokens", "0"), "Invalid value for '--max-chunk-tokens'"),
        ((STUB, "--chat-template-kwargs", "[]"), "must be a JSON object"),
        ((STUB, "--chat-template", "no/such.jinja"), "cannot be read"),
        ((STUB, "--otlp-traces-endpoint", "here"), "must be a URL like"),
        ((STUB, "--config", "no/such.yaml"), "--config no/such.yaml cannot be read"),
        ((STUB, "--dtype", "bfloat16"), "--dtype is 'bfloat16'; activations are float32"),
        ((STUB, "--tensor-parallel-size", "2"), "--tensor-parallel-size is 2"),
        ((STUB, "--swap-space", "4"), "--swap-space-bytes"),
    ],
)
def test_invalid_arguments_are_one_line_with_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("lockstep: error: ")
    assert printed.err.count("\n") == 1


def test_a_start_that_is_refused_leaves_no_process() -> None:
    """The worker's process is started ahead of what finds the fault."""
    before = psutil.Process().children()
    assert invoke(["serve", "--manifest", "no/such.yaml"]) == 2
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((STUB, "--max-model-len", "9000"), "max_model_len is 9000; the model allows 2 to 8192"),
        ((STUB, "--max-model-len", "1"), "'--max-model-len': it is '1'"),
        ((STUB, "--max-num-seqs", "8", "--max-num-batched-tokens", "9"), "max_num_batched_tokens is 9"),
        ((STUB, "--max-num-seqs", "1000000000"), "'--max-num-seqs': it is '1000000000'"),
        ((STUB, "--kv-cache-memory-bytes", "9000000000000000"), "--kv-cache-memory-bytes is 9,000,000 GB, but this"),
        (
            (STUB, "--swap-space-bytes", "9000000000000000"),
            "--swap-space-bytes is 9,000,000 GB, but this",
        ),
        ((STUB, "--kv-cache-memory-bytes", "-5"), "'--kv-cache-memory-bytes': it is '-5'"),
        ((STUB, "--max-num-queued-reqs", "100000000000000000000"), "max_num_queued_reqs is 1"),
        (("pocket://", "--threads", "100000"), "'--threads': it is '100000'"),
        (("pocket://", "--max-model-len", "4096"), "max_model_len is 4096; the model allows 2 to 2048"),
        (("pocket://", "--isa", "neon"), "'--isa': 'neon'"),
        (("no/such/model.gguf",), "no/such/model.gguf: no such file or directory"),
        (("pyproject.toml",), "pyproject.toml: a file that is not GGUF"),
        (("pocket://x",), "the embedded model is called pocket://"),
        (("stub://a?bogus=1",), "unknown stub option 'bogus'"),
        (("--manifest", SUPPORT, "--backend", "no/such.gguf"), "no/such.gguf: no such file or directory"),
        ((STUB, "--chat-template", "{broken}"), "the model's chat template cannot be read"),
        ((STUB, "--responses-db", "no/such/folder/x.db"), "stored responses cannot be stored there"),
    ],
)
def test_invalid_settings_fail_before_the_port_opens(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.jinja").write_text("{% for %}")
    said = [argument.format(broken=tmp_path / "broken.jinja") for argument in arguments]
    assert invoke(["serve", *said, *IN_THREAD, "--port", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "not even where it listens"
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_an_invalid_block_size_is_reported_when_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["serve", STUB, *IN_THREAD, "--port", "0", "--block-size", "7"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1, "where it listens; that it is ready is not said"
    assert "block_size is 7; this executor has blocks of 16 tokens" in printed.err
    assert printed.err.count("\n") == 1


def test_a_ready_server_logs_its_configuration() -> None:
    flags = ("--max-num-seqs", "7", "--threads", "1", "--kv-cache-memory-bytes", "40000000", "--api-key", "k")
    with serve("pocket://", "--served-model-name", "alpha", *flags, *IN_THREAD) as server:
        told, url = server.stderr, server.base_url
        with server.client(api_key="k") as client:
            [replica] = client.get("/v1/cluster").json()["replicas"]
    engine = replica["engine"]
    assert (engine["max_num_seqs"], engine["threads"], engine["isa"] in ISAS) == (7, 1, True)
    assert (engine["max_model_len"], engine["kv_precision"]) == (2048, "f16")
    assert 0 < engine["kv_bytes"] <= 40_000_000
    for words in (
        "alpha: ready after ",
        f"alpha: context of 2,048 tokens; KV of {engine['kv_tokens']:,} tokens in ",
        f"7 sequences at once; weights of {size(engine['weights_bytes'])}, KV in f16; ",
        f"{engine['isa']}, 1 threads",
        f"metrics: {url}/metrics; documentation of the API: {url}/docs",
        "an API key is required",
    ):
        assert words in told, words
    assert told.index("alpha: ready after") < told.index("alpha: context of")


def test_a_port_in_use_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert invoke(["serve", STUB, *IN_THREAD, "--port", str(port)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"lockstep: error: 127.0.0.1:{port} is in use; choose another --port, or 0 for any free port\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 0\nmax-num-seq: 3\n", "line 2: max-num-seq is an unknown key; did you mean 'max-num-seqs'?"),
        ("zebra: 1\n", "line 1: zebra is an unknown key; keys are the flags that --help lists"),
        ("port: 1\n\nport: 2\n", "line 3: port is given twice"),
        ("port: 1\nPORT: 2\n", "line 2: PORT is an unknown key"),
        ("port: [1]\n", "line 1: port is [1]"),
        ("config: other.yaml\n", "line 1: config is an unknown key"),
        ("- port\n", "line 1: it is a list"),
        ("port: !!python/object/apply:os.system [echo]\n", "line 1: "),
        ("port: {", "is not YAML"),
    ],
)
def test_a_fault_of_the_file_reports_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(InvalidTextError) as caught:
        read_config(path, known_flags(), {"api_key"})
    assert message in str(caught.value)


def test_all_faults_of_the_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max-num-seq: 3\nhost: [1]\nmax_num_seqs: 4\nmax-num-seqs: 5\n")
    with pytest.raises(InvalidTextError) as caught:
        read_config(path, known_flags(), {"api_key"})
    assert [(each.line, each.where) for each in caught.value.problems] == [
        (1, "max-num-seq"),
        (2, "host"),
        (4, "max-num-seqs"),
    ]


def test_config_file_values_have_the_types_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("api-key: one\nport: 1\nhost: ::1\nchat_template_kwargs: {a: [1]}\n")
    assert read_config(path, known_flags(), {"api_key"}) == {
        "api_key": ["one"],
        "port": 1,
        "host": "::1",
        "chat_template_kwargs": '{"a": [1]}',
    }
    path.write_text("")
    assert read_config(path, known_flags(), ()) == {}


def known_flags() -> set[str]:
    return {
        f.name
        for group in (ListenFlags, ModelFlags, ClusterFlags, WorkerFlags, ReportFlags, RecordFlags)
        for f in fields(group)
    } | {flag.name for group in (ENGINE, LIMITS, EXECUTOR) for flag in group.parameters()}


def test_defaults_are_the_options_own() -> None:
    """The help shows the flags' defaults; what runs without flags is what the options say."""
    made = server_options(ListenFlags(), ModelFlags(), EngineOptions(), ServerOptions(), ReportFlags())
    assert made == replace(ServerOptions(), allowed_hosts=("localhost", "127.0.0.1", "::1"))


def test_only_loopback_without_a_key_is_picky_about_names() -> None:
    def hosts(listen: ListenFlags) -> tuple[str, ...]:
        return server_options(listen, ModelFlags(), EngineOptions(), ServerOptions(), ReportFlags()).allowed_hosts

    assert hosts(ListenFlags(allowed_host=["My.Box"])) == ("localhost", "127.0.0.1", "::1", "my.box")
    assert hosts(ListenFlags(api_key=["k"])) == hosts(ListenFlags(allow_unauthenticated=True)) == ()
    assert hosts(ListenFlags(api_key=["k"], allowed_host=["a"])) == ("a",)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9000", ("127.0.0.1", 9000)), ("[::1]:80", ("::1", 80)), (":8000", ("0.0.0.0", 8000))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


def test_a_variable_may_hold_several_keys() -> None:
    assert split_keys(["a, b", "c", "a"]) == ("a", "b", "c")


def test_harmless_values_of_foreign_flags_pass() -> None:
    assert foreign_flag_warnings(ForeignFlags()) == []
    assert foreign_flag_warnings(ForeignFlags(dtype="auto", tensor_parallel_size=1, load_format="auto")) == []


def test_no_foreign_flag_is_ignored_in_silence() -> None:
    """Each of them, with a value that no default has, is either refused or answered."""
    samples: dict[type, Any] = {str: "other", int: 7, float: 0.5, bool: True}
    for name, hint in get_type_hints(ForeignFlags).items():
        kind = (get_args(hint) or (hint,))[0]
        try:
            answers = foreign_flag_warnings(ForeignFlags(**{name: samples[kind]}))
        except UsageError as error:
            answers = [str(error)]
        assert any("--" + name.replace("_", "-") in answer for answer in answers), name


def test_the_environment_has_a_variable_for_every_option() -> None:
    command = command_of("serve")
    assert command.context_settings["auto_envvar_prefix"] == "LOCKSTEP"
    names = {parameter.name for parameter in command.params}
    assert known_flags() | {"model", "config", "debug"} <= names
    assert inspect.signature(command.callback).parameters.keys() >= {"model"}
