"""`lockstep replay --serve`: a real server is recorded, ends, and its recording answers the same clients again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from lockstep.cli.main import invoke
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.waiting import HANG_S, until

RECORDED = ("--trace-content", "--served-model-name", "pocket", "--served-model-name", "small")
AGAIN = ("replay", "--serve")
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"id": {"enum": [1, 2]}}}},
}


def asked(text: str, **members: Any) -> dict[str, Any]:
    return {"model": "pocket", "messages": [{"role": "user", "content": text}], "max_tokens": 24, **members}


SAME = asked("again and again", temperature=1.0)
BODIES: tuple[dict[str, Any], ...] = (
    *(asked(f"tell me of invoice {number}", temperature=0.8) for number in range(3)),
    asked("two of them", n=2, temperature=1.0, seed=5),
    asked("it stops somewhere", stop=["e", "."], ignore_eos=True),
    asked("a verdict", response_format={"type": "json_object"}),
    asked("look it up", tools=[TOOL], tool_choice="required", max_tokens=200),
    asked("cut short", max_tokens=3, ignore_eos=True),
    SAME,
    SAME,
    SAME,
)


@dataclass(frozen=True)
class Told:
    """What a client saw of one answer."""

    chunks: int
    texts: tuple[str, ...]
    calls: str
    reasons: tuple[str | None, ...]
    usage: dict[str, Any]


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> Told:
    """The answer as a stream of chunks. A call's id is new in each answer."""
    create: Any = client.chat.completions.create
    plain = {name: value for name, value in body.items() if name != "ignore_eos"}
    extra = {"ignore_eos": body.get("ignore_eos", False)}
    chunks = list(create(**plain, extra_body=extra, stream=True, stream_options={"include_usage": True}))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    numbers = range(body.get("n", 1))
    calls = [call.function for piece in pieces for call in piece.delta.tool_calls or () if call.function]
    assert chunks[-1].usage is not None
    return Told(
        len(chunks),
        tuple("".join(each.delta.content or "" for each in pieces if each.index == number) for number in numbers),
        "".join(f"{call.name or ''}{call.arguments or ''}" for call in calls),
        tuple(each.finish_reason for each in pieces if each.finish_reason),
        chunks[-1].usage.model_dump(),
    )


def client_of(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told]]:
    """A folder with a recording, and what the client saw that was recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    with serve("pocket://", *IN_THREAD, "--trace", str(folder), *RECORDED) as server, client_of(server) as client:
        return folder, [streamed(client, body) for body in BODIES]


@pytest.fixture(scope="module")
def again(recorded: tuple[Path, list[Told]]) -> Iterator[ServerProcess]:
    """The recording as a server, which waits for nothing."""
    with serve(str(recorded[0]), "--speed", "0", verb=AGAIN) as server:
        yield server


def test_the_same_requests_get_the_same_text_ends_usage_and_number_of_chunks(
    recorded: tuple[Path, list[Told]], again: ServerProcess
) -> None:
    with client_of(again) as client:
        told = [streamed(client, body) for body in BODIES]
    assert told == recorded[1]
    assert any(each.calls for each in told)
    assert {reason for each in told for reason in each.reasons} >= {"length", "tool_calls"}
    assert "not answered" not in again.stderr


def test_a_request_that_is_not_streamed_gets_the_same_answer(
    recorded: tuple[Path, list[Told]], again: ServerProcess
) -> None:
    with client_of(again) as client:
        whole = client.chat.completions.create(**BODIES[0])
    before = recorded[1][0]
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (before.texts[0], before.reasons[0])
    assert whole.usage is not None
    assert whole.usage.model_dump() == before.usage


def test_an_answer_names_its_recorded_request_and_a_longer_prompt_matches_by_prefix(
    recorded: tuple[Path, list[Told]], again: ServerProcess
) -> None:
    body = BODIES[1]
    longer = [*body["messages"], {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "Why?"}]
    with again.client() as client:
        exact = client.post("/v1/chat/completions", json=body)
        prefix = client.post("/v1/chat/completions", json={**body, "messages": longer})
    how, name, tokens = exact.headers["x-lockstep-recorded"].split("; ")
    assert (how, tokens) == ("exact", f"tokens={recorded[1][1].usage['prompt_tokens']}")
    assert name.startswith("request=req-")
    assert prefix.headers["x-lockstep-recorded"] == f"prefix; {name}; {tokens}"
    assert prefix.json()["choices"][0]["message"]["content"] == recorded[1][1].texts[0]
    assert prefix.json()["usage"]["prompt_tokens"] > exact.json()["usage"]["prompt_tokens"]


def test_the_anthropic_and_ollama_apis_match_the_same_recorded_prompt(
    recorded: tuple[Path, list[Told]], again: ServerProcess
) -> None:
    body = {"model": "pocket", "messages": BODIES[1]["messages"]}
    with again.client() as client:
        message = client.post("/v1/messages", json={**body, "max_tokens": 24})
        chat = client.post("/api/chat", json={**body, "stream": False, "options": {"num_predict": 24}})
    assert message.json()["content"][0]["text"] == recorded[1][1].texts[0]
    assert chat.json()["message"]["content"] == recorded[1][1].texts[0]
    assert message.headers["x-lockstep-recorded"] == chat.headers["x-lockstep-recorded"]


def test_an_unrecorded_prompt_returns_not_recorded_with_the_number_of_recorded_prompts(again: ServerProcess) -> None:
    with client_of(again) as client, pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(**asked("what nobody asked"))
    assert refused.value.code == "not_recorded"
    assert "no recorded request of pocket has this prompt or a prefix of it" in refused.value.message
    assert "9 prompts of" in refused.value.message
    with client_of(again) as client, pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(**{**BODIES[0], "model": "other"})
    assert refused.value.code == "model_not_found"


def test_log_probabilities_and_embeddings_are_refused_since_no_recording_has_them(again: ServerProcess) -> None:
    with client_of(again) as client:
        with pytest.raises(openai.BadRequestError, match="no log-probabilities"):
            client.chat.completions.create(**BODIES[0], logprobs=True)
        with pytest.raises(openai.BadRequestError, match="no embeddings"):
            client.embeddings.create(model="pocket", input="a text")


def test_models_lists_the_recorded_models_and_the_server_is_ready(again: ServerProcess) -> None:
    with again.client() as client:
        [model] = client.get("/v1/models").json()["data"]
        assert client.get("/health/ready").status_code == 200
        assert "lockstep" in client.get("/metrics").text
    assert (model["id"], model["max_model_len"] > 0) == ("pocket", True)


def test_strict_accepts_recorded_requests_only_and_the_api_key_is_required(
    recorded: tuple[Path, list[Told]],
) -> None:
    flags = ("--speed", "0", "--strict", "--api-key", "sesame", "--served-model-name", "mine")
    body = {**BODIES[3], "model": "mine"}
    with serve(str(recorded[0]), *flags, verb=AGAIN) as server:
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, "sesame") as client:
            assert streamed(client, body) == recorded[1][3]
            assert client.chat.completions.create(**{**body, "model": "pocket"}).model == "mine", "its recorded name"
            longer = [*body["messages"], {"role": "user", "content": "Why?"}]
            for other in ({"messages": longer}, {"temperature": 0.5}, {"seed": 6}, {"n": 1}):
                with pytest.raises(openai.NotFoundError, match="leave --strict out"):
                    client.chat.completions.create(**{**body, **other})


def test_recorded_times_are_waited_for_and_neither_a_client_that_leaves_nor_the_servers_end_waits_with_them(
    recorded: tuple[Path, list[Told]],
) -> None:
    flags = ("--speed", "0.0001", "--shutdown-timeout", "0")
    with serve(str(recorded[0]), *flags, verb=AGAIN) as server, server.client() as client:

        def num_open() -> int:
            load: int = client.get("/load").json()["server_load"]
            return load

        def ask(timeout_s: float = HANG_S) -> httpx2.Response:
            with server.client(timeout_s=timeout_s) as asking:
                return asking.post("/v1/chat/completions", json=BODIES[0])

        with pytest.raises(httpx2.ReadTimeout):
            ask(0.5)
        until(lambda: num_open() == 0, "whoever has left is not answered for minutes")
        with ThreadPoolExecutor(1) as other:
            staying = other.submit(ask)
            until(lambda: num_open() == 1)
            server.signal(signal.SIGTERM)
            assert staying.result().json()["error"]["code"] == "unavailable"
        assert server.wait() == 0


def test_a_recording_whose_server_was_killed_answers_all_that_came_to_its_end(tmp_path: Path) -> None:
    slow = ("stub://slow?token_us=10000", *IN_THREAD, "--trace", str(tmp_path), *RECORDED)
    endless = asked("without an end", max_tokens=2000, ignore_eos=True)
    with ServerProcess(*slow) as server:
        server.wait_ready()
        with client_of(server) as client, server.client() as plain:
            before = streamed(client, BODIES[0])
            with plain.stream("POST", "/v1/chat/completions", json={**endless, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                [path] = tmp_path.glob("*.lstrace")
                size = path.stat().st_size
                until(lambda: path.stat().st_size > size, "steps of the endless one reach the disk")
                server.signal(signal.SIGKILL)
                server.wait()
    with serve(str(tmp_path), "--speed", "0", verb=AGAIN) as server, client_of(server) as client:
        assert streamed(client, BODIES[0]) == before
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**asked("without an end"))
        assert "ends early at byte" in server.stderr


CLUSTER = """\
cluster: recorded
models:
  router: {source: "stub://router?token_us=2"}
  specialists:
    - {id: billing, source: "pocket://", system_prompt: You answer about invoices.}
    - {id: travel, source: "pocket://"}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""


def test_a_cluster_is_served_again_by_its_manifest_hops_and_personas_included(tmp_path: Path) -> None:
    manifest, folder = tmp_path / "cluster.yaml", tmp_path / "recorded"
    manifest.write_text(CLUSTER)

    def all_of(server: ServerProcess) -> list[tuple[Any, ...]]:
        answers = []
        with server.client() as client:
            for body in (asked("my invoice", model="recorded"), asked("my invoice", model="travel", temperature=1.0)):
                answer = client.post("/v1/chat/completions", json=body).json()
                own = answer["lockstep"]
                hops = [(hop["model"], hop["completion"], hop["usage"]) for hop in own.get("hops", ())]
                message = answer["choices"][0]["message"]
                calls = [call["function"] for call in message.get("tool_calls") or ()]
                answers.append((answer["model"], message["content"], calls, answer["usage"], hops))
        return answers

    with serve("--manifest", str(manifest), *IN_THREAD, "--trace", str(folder), "--trace-content") as server:
        before = all_of(server)
    assert [len(hops) for *_, hops in before] == [2, 0], "one was routed"
    with serve(str(folder), "--manifest", str(manifest), "--speed", "0", verb=AGAIN) as server:
        assert all_of(server) == before
    with serve(str(folder), "--speed", "0", verb=AGAIN) as server, server.client() as client:
        names = {model["id"] for model in client.get("/v1/models").json()["data"]}
    assert names == {"router", "billing", "travel"}, "without a manifest models have the names that they were asked by"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("replay", "--serve", "{nowhere}"), "No such file or directory"),
        (("replay", "--serve", "{plain}"), "--trace-content"),
        (("replay", "--serve={plain}", "--speed", "2"), "--trace-content"),
        (("replay", "--speed", "-1", "--serve", "{plain}"), "--speed"),
        (("replay", "--serve"), "RECORDING"),
        (("replay", "--serve", "{content}", "--served-model-name", "a", "--manifest", "b.yaml"), "--served-model-name"),
        (("replay", "--serve", "{content}", "--manifest", "b.yaml"), "b.yaml"),
        (("replay", "--verify", "{content}", "--strict"), "--strict"),
    ],
)
def test_a_wrong_argument_is_rejected_with_an_error_that_names_it(
    words: tuple[str, ...],
    said: str,
    recorded: tuple[Path, list[Told]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = tmp_path / "plain.lstrace"
    assert invoke(["replay", "examples/workload.json", "--trace", str(plain)]) == 0
    places = {"nowhere": tmp_path / "nowhere.lstrace", "plain": plain, "content": recorded[0]}
    capsys.readouterr()
    assert invoke([word.format(**places) for word in words]) == 2
    said_all = capsys.readouterr().err
    assert said in said_all
    assert "internal" not in said_all


def test_a_port_that_is_in_use_is_one_line(
    recorded: tuple[Path, list[Told]], again: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    port = again.base_url.rpartition(":")[2]
    assert invoke(["replay", "--serve", str(recorded[0]), "--port", port]) == 2
    assert f"127.0.0.1:{port} is in use" in capsys.readouterr().err


NUM_OF_A_DAY = 1_000
DAY_S = 60.0
MOST_AT_ONCE = 16


def a_day(draw: random.Random) -> list[tuple[float, dict[str, Any]]]:
    """Requests of a day that lasts a minute, with the time of each: few by night, many by day, some of them again."""
    times = sorted(DAY_S * draw.betavariate(2.5, 2.0) for _ in range(NUM_OF_A_DAY))
    topics = [f"{what} {number}" for what in ("my invoice", "the train to", "an error") for number in range(120)]

    def body(number: int) -> dict[str, Any]:
        made = asked(draw.choice(topics), temperature=draw.choice((0.0, 0.8, 1.2)), seed=number)
        made["max_tokens"] = draw.choice((8, 24, 64))
        kind = draw.random()
        if kind < 0.1:
            made["n"] = 2
        elif kind < 0.2:
            made["stop"] = ["e "]
        elif kind < 0.25:
            made |= {"tools": [TOOL], "tool_choice": "required"}
        elif kind < 0.5:
            made["ignore_eos"] = True
        return made

    return [(at_s, body(number)) for number, at_s in enumerate(times)]


def lived(server: ServerProcess, day: list[tuple[float, dict[str, Any]]], speed: float) -> list[Told]:
    """The day's answers, each asked at its time, as far as threads are free."""
    with client_of(server) as client, ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        began_s, told = time.monotonic(), []
        for at_s, body in day:
            time.sleep(max(0.0, began_s + at_s / speed - time.monotonic()))
            told.append(threads.submit(streamed, client, body))
        return [each.result() for each in told]


@pytest.mark.slow
@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_a_day_of_a_thousand_requests_is_replayed_exactly(speed: float, tmp_path: Path) -> None:
    day = a_day(random.Random(18))
    with serve("pocket://", "--trace", str(tmp_path), *RECORDED) as server:
        before = lived(server, day, 1.0)
    with serve(str(tmp_path), "--speed", str(speed), verb=AGAIN) as server:
        again = lived(server, day, speed)
        assert server.stderr.count(" status=200 ") >= NUM_OF_A_DAY
    assert len(again) == NUM_OF_A_DAY
    assert [number for number, (one, other) in enumerate(zip(before, again, strict=True)) if one != other] == []
    num_chunks, num_tokens = (sum(counts) for counts in zip(*map(_counts, again), strict=True))
    print(f"{NUM_OF_A_DAY:,} requests, {num_chunks:,} chunks, {num_tokens:,} tokens")


def _counts(told: Told) -> tuple[int, int]:
    return told.chunks, told.usage["completion_tokens"]
