"""The embedded model forced to call in each format: calls are read, obey their schemas and are streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from lockstep import LLM, EngineOptions, LoadOptions, SamplingParams
from lockstep.artifacts.generation_config import MAX_TEMPERATURE
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.tools.parser import CallDelta, ContentDelta
from tests.server.tools.models import KWARGS, PING, TEMPLATES, TIME, WEATHER_SCHEMA, function, tool_use_of
from tests.server.tools.templates import TEMPLATES as OWN

TOOLS = (function("get_weather", {**WEATHER_SCHEMA, "additionalProperties": False}), TIME, PING)
SCHEMAS = {"get_weather": WEATHER_SCHEMA, "get_weather_time": TIME["function"]["parameters"], "ping": {}}
SEEDS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    options = LoadOptions(EngineOptions(num_blocks=500), cache_dir=tmp_path_factory.mktemp("cache"))
    with LLM("pocket://", options) as model:
        yield model


@pytest.mark.parametrize("family", [*OWN, "smollm3 code"])
def test_forced_calls_of_each_family_are_read_and_streamed(llm: LLM, family: str) -> None:
    tokenizer = Tokenizer(replace(llm.model.tokenizer.parts, chat_template=TEMPLATES[family]))
    tool_use = tool_use_of(tokenizer, TOOLS, "required", True, KWARGS.get(family))
    messages = tool_use.messages([{"role": "user", "content": "How is the weather in Rome?"}])
    prompt = tokenizer.encode_chat(messages, template_kwargs=tool_use.template_kwargs)
    for seed in range(SEEDS):
        params = SamplingParams(temperature=MAX_TEMPERATURE, seed=seed, max_tokens=700, constraint=tool_use.constraint)
        outputs: list[TokenOutput] = []
        llm.engine.submit(GenerationRequest(prompt, params), outputs.append)
        llm.engine.run_until_idle()
        ids = itertools.count()
        parser = tool_use.parser(lambda ids=ids: f"call_{next(ids)}")  # type: ignore[misc]  # bound per answer
        deltas = [delta for output in outputs for delta in parser.append(output.text)] + parser.flush()
        text = "".join(output.text for output in outputs)
        assert not any(isinstance(delta, ContentDelta) for delta in deltas), (seed, text)
        assert parser.calls, (seed, text)
        for call in parser.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            fragments = [d.arguments for d in deltas if isinstance(d, CallDelta) and d.index == call.index]
            assert "".join(fragments) == call.arguments
