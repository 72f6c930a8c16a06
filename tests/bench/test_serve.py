"""`lockstep bench serve` against a server whose behaviour is known."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import invoke
from tests.bench.conftest import Start
from tests.bench.standin import MODEL, Behaviour, count_tokens
from tests.processes import Piped
from tests.waiting import until

SMALL = ("--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "8")


def bench(url: str, *arguments: str, code: int = 0) -> None:
    assert invoke(["bench", "serve", "--base-url", url, *arguments]) == code


def result_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def prompts_of(behaviour: Behaviour) -> list[Any]:
    return [body.get("prompt") or body["messages"][0]["content"] for body in behaviour.measured()]


def test_run_counts_the_served_tokens(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url, behaviour = standin(token_delay_s=0.002)
    bench(url, *SMALL, "--json", "--goodput", "ttft:5000", "tpot:5000", "--ignore-eos")
    result = result_of(capsys)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (8, 0, 8)
    assert result["total_output_tokens"] == 8 * 4
    assert result["total_input_tokens"] == 8 * (20 + 3)  # the stand-in's template adds three
    assert (result["model_id"], result["backend"], result["request_rate"]) == (MODEL, "openai-chat", "inf")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["mean_itl_ms"] > 0  # chunks that wait together have no time between them
    assert result["client_cpu_us_per_token"] > 0
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in behaviour.measured())


def test_equal_seeds_send_equal_prompts(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    for seed in ("5", "5", "6"):
        url, behaviour = standin()
        bench(url, *SMALL, "--seed", seed)
        asked.append(sorted(prompts_of(behaviour)))
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize(
    ("takes_ids", "has_tokenize", "kind"), [(True, True, list), (False, True, str), (True, False, str)]
)
def test_prompts_have_the_requested_length_with_every_way_to_count_tokens(
    standin: Start, takes_ids: bool, has_tokenize: bool, kind: type
) -> None:
    url, behaviour = standin(takes_ids=takes_ids, has_tokenize=has_tokenize)
    bench(url, *SMALL, "--backend", "openai", "--random-prefix-len", "7")
    prompts = prompts_of(behaviour)
    assert {type(prompt) for prompt in prompts} == {kind}
    assert {count_tokens(prompt) for prompt in prompts} == {27}
    beginnings = {str(prompt[:7] if isinstance(prompt, list) else prompt.split()[:7]) for prompt in prompts}
    assert len(beginnings) == 1
    assert len(set(map(str, prompts))) == 8


def test_a_server_without_token_counts_reports_an_unknown_model(
    standin: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = standin(has_tokenize=False, takes_ids=False)
    assert invoke(["bench", "serve", "--base-url", url, "--model", "other"]) == 2
    assert "The model `other` does not exist." in capsys.readouterr().err


def test_latency_counts_from_when_a_request_was_due(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """One at a time, 25 ms each, eight due within 10 ms: in an open loop the last waits for all before it."""
    url, _ = standin(token_delay_s=0.025)
    load = ("--random-input-len", "5", "--random-output-len", "1", "--num-prompts", "8", "--max-concurrency", "1")
    bench(url, *load, "--request-rate", "800", "--json")
    due = result_of(capsys)
    bench(url, *load, "--json")
    sent = result_of(capsys)
    assert due["p99_e2el_ms"] > 7 * 25
    assert due["p99_send_delay_ms"] > 6 * 25
    assert sent["p50_e2el_ms"] < due["p50_e2el_ms"]


def test_requests_are_sent_when_they_are_due(standin: Start, tmp_path: Path) -> None:
    """A trace's gaps arrive as gaps, divided by the speed; equal hashes arrive as equal beginnings."""
    lines = [(0, [1, 2]), (500, [1, 3]), (1000, [4, 5])]
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 520, "output_length": 2, "hash_ids": ids} for at, ids in lines]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    url, behaviour = standin()
    bench(url, "--dataset", f"trace:{trace}", "--trace-speed", "5", "--backend", "openai")
    arrivals_s = behaviour.arrivals_s
    assert arrivals_s[1] - arrivals_s[0] > 0.05
    assert arrivals_s[2] - arrivals_s[0] > 0.15
    first, second, third = (prompt[:512] for prompt in prompts_of(behaviour))
    assert first == second != third


def test_concurrency_is_bounded(standin: Start) -> None:
    url, behaviour = standin(token_delay_s=0.005)
    bench(url, *SMALL, "--max-concurrency", "3")
    assert behaviour.max_open == 3
    assert len(behaviour.measured()) == 8


def test_warm_ups_are_not_measured(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url, behaviour = standin()
    bench(url, *SMALL, "--num-warmups", "3", "--json")
    assert len(behaviour.measured()) == 8 + 3
    assert result_of(capsys)["completed"] == 8


def test_lines_of_a_file_are_sent_as_they_are(standin: Start, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    lines.write_text(json.dumps({"messages": messages, "output_tokens": 3}) + '\n{"prompt": "hello"}\n')
    url, behaviour = standin()
    bench(url, "--dataset", f"jsonl:{lines}", "--random-output-len", "2", "--extra-body", '{"top_k": 4}')
    first, second = sorted(behaviour.measured(), key=lambda body: -len(body["messages"]))
    assert (first["messages"], first["max_tokens"], first["top_k"]) == (messages, 3, 4)
    assert (second["messages"][0]["content"], second["max_tokens"]) == ("hello", 2)


def test_conversations_need_the_endpoint_of_chats(
    standin: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    url, behaviour = standin()
    bench(url, "--dataset", f"jsonl:{lines}", "--backend", "openai", code=2)
    assert "--backend openai-chat" in capsys.readouterr().err
    assert behaviour.bodies == []


def test_failures_are_counted_with_their_reasons(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = standin(fail_every=4, break_every=3)
    bench(url, *SMALL, "--json")
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["completed"], result["failed"]) == (4, 4)
    assert "  2 x HTTP 503: the queue is full\n" in printed.err
    assert "  2 x error within the stream: the worker was lost\n" in printed.err


def test_all_failed_is_exit_code_1(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = standin(fail_every=1)
    bench(url, *SMALL, code=1)
    printed = capsys.readouterr()
    assert "Successful requests:                      0" in printed.out
    assert "8 x HTTP 503" in printed.err


def test_the_result_is_saved_with_and_without_details(standin: Start, tmp_path: Path) -> None:
    url, _ = standin()
    path = tmp_path / "result.json"
    bench(url, *SMALL, "--save-result", "--result-filename", str(path))
    plain = json.loads(path.read_text())
    assert plain["completed"] == 8
    assert "ttfts" not in plain
    bench(url, *SMALL, "--save-detailed", "--result-filename", str(path))
    detailed = json.loads(path.read_text())
    assert detailed["output_lens"] == [4] * 8
    assert [len(itls) for itls in detailed["itls"]] == [3] * 8
    assert detailed["generated_texts"][0] == "word0 word1 word2 word3 "


def test_report_has_the_lines_of_vllms_benchmark(standin: Start, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = standin()
    bench(url, *SMALL, "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "99.9", "--max-concurrency", "4")
    text = capsys.readouterr().out
    for line in ("Serving Benchmark Result", "Request throughput (req/s):", "Mean TTFT (ms):", "P99.9 E2EL (ms):"):
        assert line in text
    assert "ITL" not in text


def test_ctrl_c_prints_the_measurements_so_far(standin: Start) -> None:
    """A real process and a real signal: two answers are whole by then, the others hang."""
    url, behaviour = standin(hang_after=2)
    load = ("--random-input-len", "5", "--random-output-len", "2", "--max-concurrency", "2", "--num-prompts", "10")
    with Piped("bench", "serve", "--base-url", url, *load, "--json") as process:
        until(lambda: len(behaviour.measured()) == 4 and behaviour.num_open == 2)
        process.program.send_signal(signal.SIGINT)
        code, out, err = process.communicate()
    result = json.loads(out)
    assert code == 130
    assert "Traceback" not in err
    assert (result["completed"], result["failed"], result["interrupted"]) == (2, 0, 8)
    until(lambda: behaviour.num_left == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset", "sharegpt"), "it must be random, trace:FILE or jsonl:FILE"),
        (("--dataset", "trace:/no/such"), "cannot read /no/such"),
        (("--goodput", "itl:5"), "write ttft:500,tpot:50"),
        (("tpot:50",), "unexpected argument 'tpot:50'"),
        (("--request-rate", "0"), "must be above 0"),
        (("--max-concurrency", "0"), "must be at least 1"),
        (("--num-prompts", "0"), "must be from 1"),
        (("--seed", "-1"), "must not be negative"),
        (("--backend", "openai", "--endpoint", "/v1/chat/completions"), "requires --backend openai-chat"),
        (("--endpoint", "/v1/embeddings"), "must end with /v1/chat/completions or /v1/completions"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--base-url", "ftp://x"), "must look like http://127.0.0.1:9000"),
        (("--metric-percentiles", "x"), "numbers from 0 to 100"),
        (("--burstiness", "2"), "requires --request-rate"),
        (("--trace-speed", "2"), "require --dataset trace:FILE"),
        (("--trace-spread",), "require --dataset trace:FILE"),
        (("--dataset", "trace:x", "--request-rate", "2"), "has its own times; see --trace-speed"),
        (("--base-url", "http://127.0.0.1:9"), "is the server running?"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "serve", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_ctrl_c_during_warm_ups_ends_the_command(standin: Start) -> None:
    url, behaviour = standin(hang_after=0)
    with Piped("bench", "serve", "--base-url", url, *SMALL, "--num-warmups", "2") as process:
        until(lambda: behaviour.num_open == 2)
        process.program.send_signal(signal.SIGINT)
        assert process.communicate() == (130, "", "2 warm-up requests\n")
    assert len(behaviour.measured()) == 2


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_data_set_is_rejected_before_the_server_is_contacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    bench("http://127.0.0.1:9", "--dataset", f"jsonl:{path}", code=2)
    assert f"--dataset jsonl:{path} cannot be read" in capsys.readouterr().err
