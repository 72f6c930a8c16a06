"""Documents of the embedded model at temperature 1: each one is valid by its schema and ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date

import jsonschema
import pytest

from lockstep import LLM, Constraint, EngineOptions, FinishReason, LoadOptions, SamplingParams
from lockstep.pocket import DEMO_MESSAGES, INTENTS, ROUTER_PERSONA
from tests.engine.schemas import SCHEMAS

FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date", raises=ValueError)
def is_full_date(instance: object) -> bool:
    """RFC 3339 has a year 0000, a leap year; Python's calendar begins with year 1."""
    if isinstance(instance, str):
        date.fromisoformat(f"2000{instance[4:]}" if instance.startswith("0000-") else instance)
    return True


MAX_TOKENS = 400
"""More tokens than the longest document that the schemas allow."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    options = LoadOptions(
        EngineOptions(num_blocks=1_200, max_num_seqs=64),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    with LLM("pocket://", options) as model:
        yield model


def check_documents(llm: LLM, num_per_schema: int) -> None:
    jobs = [(name, index) for index in range(num_per_schema) for name in SCHEMAS]
    params = [
        SamplingParams(
            temperature=1.0, seed=index, max_tokens=MAX_TOKENS, constraint=Constraint.json_schema(SCHEMAS[name])
        )
        for name, index in jobs
    ]
    outputs = llm.generate([f"Write a JSON document: {name}, number {index}.\n" for name, index in jobs], params)
    for (name, index), output in zip(jobs, outputs, strict=True):
        validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=FORMATS)
        validator.validate(json.loads(output.text))
        assert output.completions[0].finish_reason is FinishReason.STOP, (name, index, output.text)
    assert len({output.text for output in outputs}) > len(SCHEMAS), "the documents differ"


def test_there_are_fifty_schemas() -> None:
    assert len(SCHEMAS) == 50
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_five_documents_of_each_obey_their_schemas(llm: LLM) -> None:
    check_documents(llm, 5)


@pytest.mark.slow
def test_ten_thousand_documents_obey_their_schemas(llm: LLM) -> None:
    check_documents(llm, 200)


def test_a_router_answers_with_one_of_its_labels(llm: LLM) -> None:
    """At any temperature; the greedy answer is correct for the demo's messages."""
    labels = SamplingParams(temperature=0.0, max_tokens=8, constraint=Constraint.choice(INTENTS))
    wild = SamplingParams(temperature=8.0, seed=3, n=8, max_tokens=8, constraint=Constraint.choice(INTENTS))
    conversations = [
        [{"role": "user", "content": text}, {"role": "system", "content": ROUTER_PERSONA}] for text in DEMO_MESSAGES
    ]
    assert [output.text for output in llm.chat(conversations, labels)] == list(DEMO_MESSAGES.values())
    texts = [completion.text for output in llm.chat(conversations, wild) for completion in output.completions]
    assert set(texts) <= set(INTENTS)
    assert len(set(texts)) > 1
