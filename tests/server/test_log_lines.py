"""`GET /v1/logs`: the latest lines, bounded, for operators, and without anything of a prompt."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

from lockstep.server.log_lines import MAX_CHARS, LogLines
from lockstep.server.options import ServerOptions
from lockstep.worker.logs import FIELDS, PUBLIC_FIELDS
from tests.server.process import IN_THREAD, serve
from tests.server.support import client_of, error_of

CHAT = "/v1/chat/completions"
SECRET = "the dog is buried under the apple tree"
LOGGER = logging.getLogger("lockstep.test_log_lines")


def asking(text: str = SECRET) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8}


def test_latest_lines_are_kept_in_order_and_after_selects_later_ones() -> None:
    kept = LogLines(max_lines=4)
    with kept.listening():
        for number in range(10):
            LOGGER.warning("line %d", number)
    LOGGER.warning("nobody listens any more")
    assert [(line.number, line.text) for line in kept.lines()] == [(n + 1, f"line {n}") for n in range(6, 10)]
    assert [line.number for line in kept.lines(after=9)] == [10]
    assert [line.number for line in kept.lines(limit=2)] == [9, 10]
    assert kept.lines(after=10) == ()


def test_a_line_is_one_line_of_bounded_length_without_private_values_and_tracebacks() -> None:
    kept = LogLines()
    with kept.listening():
        LOGGER.warning("two\nlines", extra={FIELDS: {"model": "a\nb"}})
        LOGGER.warning("ended", extra={FIELDS: {"body": SECRET, "id": "r"}, PUBLIC_FIELDS: {"id": "r"}})
        LOGGER.warning("%s", "x" * 10_000)
        try:
            raise ValueError(SECRET)
        except ValueError:
            LOGGER.exception("it broke")
    texts = [line.text for line in kept.lines()]
    assert texts[:2] == ['two lines model="a\\nb"', "ended id=r"]
    assert len(texts[2]) == MAX_CHARS
    assert texts[3] == "it broke (ValueError)"


def test_many_threads_write_while_it_is_read() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    kept, draw = LogLines(max_lines=50), random.Random(seed)
    counts = [draw.randint(50, 400) for _ in range(4)]

    def write(count: int) -> None:
        for _ in range(count):
            LOGGER.warning("line")

    with kept.listening():
        threads = [threading.Thread(target=write, args=(count,)) for count in counts]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            numbers = [line.number for line in kept.lines()]
            assert numbers == sorted(set(numbers))
    assert [line.number for line in kept.lines()] == list(range(sum(counts) - 49, sum(counts) + 1))


def test_lines_of_requests_are_there_and_nothing_of_a_prompt_even_where_the_log_has_it() -> None:
    with serve("stub://alpha", "--log-prompts", *IN_THREAD) as server, server.client() as client:
        assert client.post(CHAT, json=asking()).status_code == 200
        assert client.post(CHAT, json={**asking(), "temperature": SECRET}).status_code == 400
        for _ in range(3):
            lines = client.get("/v1/logs").json()["data"]
        ended = [line["text"] for line in lines if line["logger"] == "lockstep.request"]
        assert len(ended) == 2, "those who watch have no lines"
        assert f"endpoint={CHAT}" in ended[0]
        assert "status=400" in ended[1]
        assert SECRET not in str(lines)
        assert SECRET in server.stderr
        assert client.get(f"/v1/logs?after={lines[-1]['number']}").json()["data"] == []
        assert any("no API key is required" in line["text"] for line in lines), "and those of the start"


def test_a_callers_key_does_not_see_them_and_an_admin_key_does() -> None:
    environment = {"LOCKSTEP_API_KEY": "key-one", "LOCKSTEP_ADMIN_KEY": "key-admin"}
    with serve("stub://alpha", *IN_THREAD, environment=environment) as running, running.client() as client:
        statuses = [client.get("/v1/logs", headers={"X-Api-Key": key}).status_code for key in ("key-one", "key-admin")]
        assert statuses == [403, 200]
        assert client.get("/v1/logs").status_code == 401
        lines = client.get("/v1/logs", headers={"X-Api-Key": "key-admin"}).json()["data"]
        assert any("endpoint=/v1/logs status=403 tenant=key-1" in line["text"] for line in lines), (
            "a refusal has a line"
        )
        assert not {"key-one", "key-admin"} & set(str(lines).replace("=", " ").split())


async def test_without_an_admin_key_only_a_server_for_this_machine_alone_shows_them() -> None:
    async with client_of(options=ServerOptions(api_keys=("a",))) as client:
        refused = await client.get("/v1/logs", headers={"X-Api-Key": "a"})
        assert (refused.status_code, error_of(refused)["code"]) == (403, "admin_key_needed")
    async with client_of(options=ServerOptions(allow_unauthenticated=True)) as client:
        assert (await client.get("/v1/logs")).status_code == 403
    async with client_of() as client:
        assert (await client.get("/v1/logs")).status_code == 200
