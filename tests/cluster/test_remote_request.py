"""What is sent to another server: everything that a call says, under the names of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import fields

from lockstep.cluster.remote_messages import remote_request
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams

SAID = {"messages": [{"role": "user", "content": "Hello"}]}
NOT_SENT = {"logprobs", "constraint"}
"""The one is refused, the other has tests of its own."""
SOMETHING = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={7: 1.5},
    seed=1,
    max_tokens=5,
    min_tokens=2,
    stop=("x",),
    stop_token_ids=(9,),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    bad_words=("y",),
    n=2,
)


def sent(params: SamplingParams | None = None, kwargs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    call = GenerationRequest(Conversation(SAID["messages"], kwargs or {}), params or SamplingParams(), **more)
    body: dict[str, Any] = json.loads(remote_request("far", "served", call).body)
    assert body.pop("model") == "served"
    assert body.pop("stream") is True
    assert body.pop("stream_options") == {"include_usage": True}
    return body


def test_unset_parameters_are_not_sent() -> None:
    assert sent() == SAID


def test_every_parameter_is_sent_under_its_name() -> None:
    body = sent(SOMETHING)
    names = {field.name for field in fields(SamplingParams)} - NOT_SENT
    assert set(body) - {"messages"} == names
    for name in names - {"logit_bias"}:
        value = getattr(SOMETHING, name)
        assert body[name] == (list(value) if isinstance(value, tuple) else value)
    assert body["logit_bias"] == {"7": 1.5}


def test_zero_values_are_sent() -> None:
    assert sent(SamplingParams(temperature=0.0, seed=0)) == {**SAID, "temperature": 0.0, "seed": 0}


def test_variables_of_templates_are_parameters_where_the_api_has_them() -> None:
    kwargs = {"tools": [{"type": "function"}], "reasoning_effort": "low", "enable_thinking": False}
    assert sent(kwargs=kwargs) == {
        **SAID,
        "tools": [{"type": "function"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert sent(kwargs={"tools": []}) == SAID


def test_arguments_of_past_calls_are_sent_as_text() -> None:
    function = {"name": "look_up", "arguments": {"id": 7, "place": "Zürich"}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    call = GenerationRequest(Conversation([*SAID["messages"], said]))
    _, sent_call = json.loads(remote_request("far", "served", call).body)["messages"]
    [given] = sent_call.pop("tool_calls")
    assert sent_call == {"role": "assistant", "content": ""}
    assert json.loads(given["function"].pop("arguments")) == function["arguments"]
    assert given == {"id": "a", "type": "function", "function": {"name": "look_up"}}


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint.json_object(), {"response_format": {"type": "json_object"}}),
        (
            Constraint.json_schema({"type": "string"}),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "string"}, "strict": True},
                }
            },
        ),
        (Constraint.choice(["a", "b"]), {"structured_outputs": {"choice": ["a", "b"]}}),
        (Constraint.regex("a+"), {"structured_outputs": {"regex": "a+"}}),
        (Constraint.lark('start: "a"'), {"structured_outputs": {"grammar": 'start: "a"'}}),
    ],
)
def test_constraints_have_the_names_that_others_know(constraint: Constraint, expected: dict[str, Any]) -> None:
    assert sent(SamplingParams(constraint=constraint)) == {**SAID, **expected}


def test_parameters_of_this_cluster_are_not_sent() -> None:
    assert sent(priority=-2, tenant="acme", session_id="s", deadline_s=1.0) == SAID
    assert sent(cache_salt="salt", truncate_prompt_tokens=5) == {
        **SAID,
        "cache_salt": "salt",
        "truncate_prompt_tokens": 5,
    }


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (GenerationRequest((1, 2, 3)), "prompt"),
        (GenerationRequest("Once", SamplingParams(logprobs=0)), "logprobs"),
        (GenerationRequest("Once", prompt_logprobs=0), "prompt_logprobs"),
        (GenerationRequest("Once", pooling="mean"), "input"),
        (GenerationRequest("Once", SamplingParams(constraint=Constraint.json_schema("{"))), "constraint"),
    ],
)
def test_unsendable_parameters_are_rejected_by_name(call: GenerationRequest, param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        remote_request("far", "served", call)
    assert caught.value.param == param


def test_reasoning_effort_none_replaces_enable_thinking() -> None:
    assert sent(kwargs={"reasoning_effort": "none", "enable_thinking": False}) == {**SAID, "reasoning_effort": "none"}
    body = sent(kwargs={"verbosity": "low", "enable_thinking": False})
    assert (body["verbosity"], body["chat_template_kwargs"]) == ("low", {"enable_thinking": False})


def test_flags_for_the_end_of_the_prompt_are_sent_when_not_the_default() -> None:
    for prompt, told in (
        (Conversation(SAID["messages"], continue_final=True), (False, True)),
        (Conversation(SAID["messages"], add_generation_prompt=False), (False, False)),
    ):
        body = json.loads(remote_request("far", "served", GenerationRequest(prompt)).body)
        assert (body["add_generation_prompt"], body["continue_final_message"]) == told
