"""The OpenAPI document, the answers of every endpoint, and the pages of metrics are what users know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.cluster.events import EVENTS
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from tests.cluster.clusters import clustered
from tests.cluster.support import one_model
from tests.server.managing import Hosted
from tests.server.support import NAME, client_of
from tests.surface.held import hold
from tests.surface.refusals import CHAT, GENERATE, MESSAGES, OLLAMA, RESPONSES, TEXT, TOOL, USER

MANIFEST = """\
cluster: shop
models:
  router:
    source: stub://router
    tier: resident
  specialists:
    - id: billing
      source: stub://billing
    - id: legal
      source: stub://legal
      aliases: [law]
fallback:
  id: far
  tier: remote
  remote: {base_url: "https://models.example.com/v1", model: far}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""
VOLATILE = (
    (re.compile(r"\b(chatcmpl|cmpl|resp|msg|toolu|call|rs|fc|embd|fp|req)(-|_)[0-9A-Za-z]{6,}"), r"\1\2ID"),
    (re.compile(r'"(created|created_at|completed_at)":\d+'), r'"\1":0'),
    (re.compile(r'"(\w+_ms|\w+_s|tokens_per_second)":[0-9.e-]+'), r'"\1":0'),
    (re.compile(r'"request_id":"[0-9a-f-]+"'), '"request_id":"ID"'),
    (re.compile(r'"(created_at|modified_at)":"[^"]+"'), r'"\1":"TIME"'),
    (re.compile(r'"(\w+_duration)":\d+'), r'"\1":0'),
    (re.compile(r"(-?\d+\.\d{6})\d+"), r"\1"),
)
"""What differs from run to run, or in its last digits from machine to machine."""
SAID = re.compile(r'(?<=[{,])("(?:content|text|delta)":")((?:[^"\\]|\\.)*)"')
"""The text in a frame of a stream."""
CLOSED = ("reason", "source", "state", "finished_reason", "budget", "why")
"""Labels whose values are ours, and few."""
ANSWERED: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{NAME}", None),
    ("POST", CHAT, {"messages": [USER]}),
    ("POST", CHAT, {"messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}),
    ("POST", CHAT, {"messages": [USER], "return_token_ids": True, "max_tokens": 3, "service_tier": "auto"}),
    ("POST", CHAT, {"messages": [USER], "stream": True}),
    ("POST", CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}),
    ("POST", CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "max_tokens": 3}),
    ("POST", CHAT, {"messages": [USER], "prompt_logprobs": 0, "max_tokens": 1}),
    ("POST", TEXT, {"prompt": "hello"}),
    ("POST", TEXT, {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 2}),
    ("POST", TEXT, {"prompt": [104, 105], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}),
    ("POST", RESPONSES, {"input": "hello", "store": False}),
    ("POST", RESPONSES, {"input": "hello", "stream": True, "store": False, "max_output_tokens": 1}),
    ("POST", MESSAGES, {"max_tokens": 40, "messages": [USER], "model": NAME}),
    (
        "POST",
        MESSAGES,
        {
            "max_tokens": 1,
            "messages": [USER],
            "stream": True,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    ("POST", f"{MESSAGES}/count_tokens", {"messages": [USER]}),
    ("POST", OLLAMA, {"model": "alpha:latest", "messages": [USER], "options": {"num_predict": 3}}),
    ("POST", GENERATE, {"model": NAME, "prompt": "hello", "stream": False, "keep_alive": "5m"}),
    ("POST", GENERATE, {"model": NAME}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("POST", "/api/show", {"model": "alpha"}),
    ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": [USER]}),
    ("POST", "/detokenize", {"tokens": [104, 105]}),
    ("GET", "/v1/sessions", None),
    ("GET", "/v1/requests?limit=1", None),
    ("GET", "/load", None),
)


def test_the_document_of_the_interface_is_what_clients_were_made_from() -> None:
    options = ServerOptions(enable_debug_endpoints=True)
    document = create_app(one_model("stub://alpha", (NAME,)), options).openapi()
    hold("openapi.json", json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).splitlines())


async def test_answers_have_the_members_and_the_order_that_clients_know() -> None:
    """Frames of a stream that differ in their text only are shown as one: how many tokens share one is the clock's."""
    told: list[str] = []
    async with client_of() as client:
        for method, path, body in ANSWERED:
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 200, answer.text
            told += [f"{method} {path} {json.dumps(body) if body else ''}".rstrip(), *_shown(answer)]
    hold("answers.txt", told)


@pytest.mark.parametrize("prefix", ["lockstep", "vllm"])
async def test_metrics_have_their_names_and_labels(prefix: str) -> None:
    """Of one model that has answered, and of a cluster with a remote model."""
    options = ServerOptions(metrics_prefix=prefix)
    async with client_of(options=options) as client:
        await client.post(CHAT, json={"messages": [USER], "n": 2, "max_tokens": 3})
        told = ["# one model", *_families((await client.get("/metrics")).text)]
    async with clustered(MANIFEST) as cluster:
        transport = httpx2.ASGITransport(app=create_app(cluster, options))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.post(CHAT, json={"messages": [USER], "model": "billing", "max_tokens": 3})
            told += ["# many models", *_families((await client.get("/metrics")).text)]
    hosted = Hosted()
    await hosted.start()
    transport = httpx2.ASGITransport(app=create_app(hosted, options))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        families = _families((await client.get("/metrics")).text)
    await hosted.close()
    told += ["# many hosts", *(line for line in families if re.search(":cluster_(host|replica)_", line))]
    hold(f"metrics_{prefix}.txt", told)


def test_events_have_their_names_and_fields() -> None:
    hold("events.txt", [f"{name}: {', '.join(fields)}" for name, fields in EVENTS.items()])


def _families(page: str) -> Iterator[str]:
    """Name, type and help of a family, and the labels of its samples."""
    for family in sorted(text_string_to_metric_families(page), key=lambda family: family.name):
        if family.name.startswith("process_"):
            continue  # prometheus_client's own, and the platform's
        yield f"{family.name} ({family.type}): {family.documentation}"
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            told = (f"{label}={value}" if label in CLOSED else label for label, value in sample.labels.items())
            labels.setdefault(sample.name, set()).update(told)
        for name, names in sorted(labels.items()):
            yield f"  {name}{{{', '.join(sorted(names))}}}"


def _shown(answer: httpx2.Response) -> Iterator[str]:
    headers = ("content-type", "x-lockstep-warning", "openai-model")
    yield f"  {json.dumps({name: answer.headers[name] for name in headers if name in answer.headers})}"
    text = answer.text
    for pattern, said in VOLATILE:
        text = pattern.sub(said, text)
    yield from (f"  {line}" for line in _joined(filter(None, text.split("\n"))))


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines of a stream, those in one that differ in what they say only."""
    joined: list[str] = []
    for line in lines:
        said = SAID.search(line)
        if said and said[2] and joined and SAID.sub(r"\1", line) == SAID.sub(r"\1", joined[-1]):
            before = SAID.search(joined[-1])
            assert before is not None, "it is the same line"
            joined[-1] = f"{joined[-1][: before.end(2)]}{said[2]}{joined[-1][before.end(2) :]}"
        else:
            joined.append(line)
    return joined
