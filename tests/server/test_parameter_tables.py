"""The tables of docs/parameters.md: every row is sent, and every parameter of a body has a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lockstep import LoadOptions
from lockstep.server.adapters.anthropic_body import MessagesBody
from lockstep.server.adapters.anthropic_tools import CLIENT_TOOLS
from lockstep.server.adapters.ollama_body import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from lockstep.server.adapters.ollama_models import EmbedBody
from lockstep.server.chat import ChatBody
from lockstep.server.completions import CompletionBody
from lockstep.server.embeddings import EmbeddingBody
from lockstep.server.foreign import FOREIGN, OTHER_NAMES
from lockstep.server.generation import GenerationBody
from lockstep.server.responses.schema import ResponseBody
from lockstep.server.responses.tools import HOSTED
from lockstep.server.scores import RerankBody, ScoreBody
from tests.cluster.support import one_model
from tests.server.living import Living, living_cluster

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
RESULTS = ("used", "accepted", "warning", "refused")
_PATH = re.compile(r"`POST (/[\w/]+)`")
_ROW = re.compile(r"\| `(\{?.+?)` \| (\w+) \| (.*?) ?\|")


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    line: int
    section: str
    path: str
    body: dict[str, Any]
    """Of the section, with the members of the example."""
    example: dict[str, Any]
    result: str


def rows_of(text: str) -> Iterator[Row]:
    """The rows of the tables whose section names a path and has a body."""
    section, path, body, is_json = "", "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            section, path, body = line.removeprefix("## "), "", ""
        elif found := _PATH.search(line):
            path = found[1]
        elif line.startswith("```"):
            is_json = line == "```json"
        elif is_json:
            body += line
        elif path and body and (found := _ROW.fullmatch(line)):
            example = json.loads(f"{{{found[1]}}}")
            yield Row(number, section, path, {**json.loads(body), **example}, example, found[2])


ROWS = list(rows_of(PAGE.read_text()))


def test_every_row_of_the_tables_has_a_known_result() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) > 200
    assert {row.result for row in ROWS} == set(RESULTS)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Living]:
    """Pocket as an embedding model, whose cosines are scores."""
    with living_cluster(one_model("pocket://", ("pocket",), LoadOptions(task="embed"))) as server:
        yield server


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line {row.line}")
def test_example_of_a_row_has_the_result_that_the_table_gives(row: Row, pocket: Living, embedder: Living) -> None:
    answer = (embedder if row.section.startswith("Rerankers") else pocket).post(row.path, row.body)
    warning = answer.headers.get("x-lockstep-warning", "")
    assert answer.status_code == (400 if row.result == "refused" else 200), answer.text
    if row.result == "warning":
        assert any(_named_by(name, warning) for name in names_in(row.example)), warning
    else:
        assert warning == ""
    if row.result == "refused":
        fault = answer.json()["error"]
        told = fault if isinstance(fault, str) else f"{fault.get('param')} {fault['message']}"
        assert any(_named_by(name, told) for name in names_in(row.example)), told


def names_in(example: dict[str, Any]) -> list[str]:
    """The parameters of an example: of the outermost and, of Ollama's options, those within."""
    return [*example, *(example.get("options") or {})]


def _named_by(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


SECTIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "OpenAI: chat completions": (ChatBody,),
    "OpenAI: completions": (CompletionBody,),
    "OpenAI: embeddings": (EmbeddingBody,),
    "Rerankers: ranking": (RerankBody,),
    "Rerankers: scores": (ScoreBody,),
    "OpenAI: responses": (ResponseBody,),
    "Anthropic": (MessagesBody,),
    "Ollama: chat": (OllamaChatBody, OllamaOptions),
    "Ollama: generate": (OllamaGenerateBody,),
    "Ollama: embeddings": (EmbedBody,),
}
ELSEWHERE: dict[type[BaseModel], type[BaseModel]] = {CompletionBody: GenerationBody, OllamaGenerateBody: OllamaBody}
"""Bodies of which a section leaves out what another section has."""


@pytest.mark.parametrize("section", SECTIONS)
def test_every_parameter_of_a_body_is_in_its_table(section: str) -> None:
    shown = {name for row in ROWS if row.section == section for name in [*row.body, *names_in(row.body)]}
    for body in SECTIONS[section]:
        others = ELSEWHERE[body].model_fields if body in ELSEWHERE else {}
        missing = [name for name in body.model_fields if name not in shown and name not in others]
        assert not missing, f"{section} has no row of {missing}"


def test_every_parameter_of_other_servers_is_in_a_table() -> None:
    shown = {name for row in ROWS if row.section.endswith("'s extras") for name in row.example}
    assert not [name for name in (*FOREIGN, *OTHER_NAMES) if name not in shown]


def test_every_type_of_tool_is_in_a_table() -> None:
    tools = [tool for row in ROWS for tool in row.example.get("tools", ())]
    types = [tool.get("type", "custom") for tool in tools]
    dated = re.compile(r"_\d{4}_\d{2}_\d{2}$")
    assert not [kind for kind in HOSTED if not dated.search(kind) and kind not in types and kind != "computer"]
    for begin, *_ in CLIENT_TOOLS:
        assert any(kind.startswith(begin.rstrip("0123456789")) for kind in types), begin
