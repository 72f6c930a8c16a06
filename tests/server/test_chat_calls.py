"""Requests become calls: every parameter arrives where it belongs, and what cannot is refused by its own name."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.stub import stub_tokenizer_parts
from lockstep.server.chat import ChatBody, ChatReply, chat_call
from lockstep.server.completions import CompletionBody, CompletionCalls, completion_calls
from lockstep.server.generation import Caller, labels_of, shorter_s, with_request_param_names
from lockstep.server.options import ServerOptions
from tests.server.tools.models import tokenizer_of

TOKENIZER = Tokenizer(stub_tokenizer_parts())
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
HELLO = [{"role": "user", "content": "hello"}]


def chat(options: ServerOptions | None = None, tenant: str = "", **fields: Any) -> GenerationRequest:
    body = ChatBody.model_validate({"messages": HELLO, **fields})
    return chat_call(body, Caller(tenant, options or ServerOptions()), TOKENIZER)[0]


def reply_to(**fields: Any) -> ChatReply:
    body = ChatBody.model_validate({"messages": HELLO, **fields})
    return chat_call(body, Caller("", ServerOptions()), TOKENIZER)[1]


def complete(**fields: Any) -> CompletionCalls:
    return completion_calls(CompletionBody.model_validate({"prompt": "x", **fields}), Caller("", ServerOptions()))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_sampling_parameters_arrive() -> None:
    params = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        logit_bias={"65": 3.5, "7": -100},
        seed=11,
        max_completion_tokens=5,
        min_tokens=2,
        stop="END",
        stop_token_ids=[9],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        bad_words=["no", "never"],
        n=3,
        best_of=3,
        logprobs=True,
        top_logprobs=4,
    ).params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, -0.2)
    assert params.logit_bias == {65: 3.5, 7: -100}
    assert (params.seed, params.max_tokens, params.min_tokens, params.n) == (11, 5, 2, 3)
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert params.bad_words == ("no", "never")
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.logprobs) == (("END",), (9,), True, 4)


def test_absent_fields_leave_parameters_unset() -> None:
    params = chat().params
    assert (params.temperature, params.max_tokens, params.logprobs, params.constraint) == (None, None, None, None)
    assert complete().calls[0].params.max_tokens == 16
    assert complete(max_tokens=None).calls[0].params.max_tokens is None


def test_logprobs_without_alternatives_have_only_the_chosen_token() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert complete(logprobs=0).calls[0].params.logprobs == 0


def test_the_other_fields_of_a_call_arrive() -> None:
    call = chat(
        ServerOptions(supports_priority=True, queue_timeout_s=3.0),
        tenant="team",
        model="m",
        priority=-1,
        user="someone",
        cache_salt="salt",
        session_id="s1",
        deadline_ms=1500,
        truncate_prompt_tokens=-1,
        prompt_logprobs=2,
    )
    assert (call.model, call.priority, call.tenant, call.cache_salt, call.session_id) == ("m", -1, "team", "salt", "s1")
    assert (call.deadline_s, call.queue_deadline_s) == (1.5, 3.0)
    assert (call.truncate_prompt_tokens, call.prompt_logprobs) == (-1, 2)


def test_template_options_of_the_server_apply_where_a_request_sets_none() -> None:
    options = ServerOptions(chat_template_kwargs={"messages_style": "short"}, reasoning="off")
    prompt = chat(options).prompt
    assert isinstance(prompt, Conversation)
    assert (dict(prompt.template_kwargs), prompt.reasoning) == ({"messages_style": "short"}, "off")
    assert isinstance(default := chat().prompt, Conversation)
    assert (dict(default.template_kwargs), default.reasoning) == ({}, "auto")


def test_without_keys_the_user_is_the_tenant() -> None:
    assert chat(user="someone").tenant == "someone"
    assert chat(user="someone", tenant="team").tenant == "team"


@pytest.mark.parametrize(
    ("deadline_ms", "limit_s", "expected_s"), [(None, None, None), (500, None, 0.5), (None, 2.0, 2.0), (5000, 2.0, 2.0)]
)
def test_the_shorter_deadline_holds(deadline_ms: int | None, limit_s: float | None, expected_s: float | None) -> None:
    assert shorter_s(deadline_ms, limit_s) == expected_s


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"guided_choice": ["a", "b"]}, Constraint.choice(["a", "b"])),
        ({"guided_regex": "a+"}, Constraint.regex("a+")),
        ({"guided_json": {"type": "object"}}, Constraint.json_schema({"type": "object"})),
        ({"guided_json": '{"type":"object"}'}, Constraint.json_schema('{"type":"object"}')),
        ({"guided_grammar": 'start: "a"'}, Constraint.lark('start: "a"')),
        ({"structured_outputs": {"regex": "a"}}, Constraint.regex("a")),
        ({"structured_outputs": {"json": {"type": "null"}}}, Constraint.json_schema({"type": "null"})),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_object()),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            Constraint.json_schema({"type": "array"}),
        ),
    ],
)
def test_constraint_is_read_from_every_parameter_form(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert chat(**fields).params.constraint == constraint
    assert complete(**fields).calls[0].params.constraint == constraint
    if constraint is not None:
        assert reply_to(**fields).names["constraint"] == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 1}, "priority"),
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
        ({"function_call": "auto", "tools": [TOOL]}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools[0].function.name"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(("fields", "name"), [({}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs")])
def test_logprobs_error_names_the_parameter_of_the_request(fields: dict[str, Any], name: str) -> None:
    assert reply_to(logprobs=True, **fields).names["logprobs"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 2, "best_of": 3}, "best_of"), ({"echo": True, "logprobs": 1, "stream": True}, "echo")],
)
def test_a_completion_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        complete(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [2, 3]], ("a", (2, 3))),
    ],
)
def test_prompts_of_every_form(prompt: Any, prompts: tuple[object, ...]) -> None:
    asked = complete(prompt=prompt)
    assert asked.prompts == prompts
    assert tuple(call.prompt for call in asked.calls) == prompts


def test_echo_with_logprobs_requests_prompt_logprobs() -> None:
    assert complete(echo=True, logprobs=2).calls[0].prompt_logprobs == 2
    assert complete(echo=True).calls[0].prompt_logprobs is None
    assert complete(echo=True, logprobs=2, prompt_logprobs=5).calls[0].prompt_logprobs == 5


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    came: dict[str, Any] = {
        "role": "assistant",
        "content": "2",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning": "one and one",
        "reasoning_content": "one and one",
        "tool_calls": None,
    }
    conversation = chat(messages=[*HELLO, came, *HELLO]).prompt
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "2",
        "reasoning_content": "one and one",
        "thinking": "one and one",  # the same, under the name that some templates read
    }


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = chat(messages=[{"role": "user", "content": parts}]).prompt
    assert isinstance(conversation, Conversation)
    assert "a\nb" in TOKENIZER.render_chat(conversation.messages)


def test_user_labels_of_a_request_are_logged() -> None:
    fields = {"metadata": {"run": "7"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    body = ChatBody.model_validate({"messages": HELLO, **fields})
    assert labels_of(body) == {"run": "7", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}


def test_errors_name_the_parameters_of_the_request() -> None:
    names = reply_to(max_completion_tokens=3, guided_regex="a").names
    error = with_request_param_names(
        InvalidParameterError("max_tokens is 3; it must be more", param="max_tokens"), names
    )
    assert (str(error), error.param) == ("max_completion_tokens is 3; it must be more", "max_completion_tokens")
    error = with_request_param_names(InvalidParameterError("the regex constraint is bad", param="constraint"), names)
    assert (str(error), error.param) == ("the regex constraint is bad", "guided_regex")
    error = with_request_param_names(InvalidParameterError("seed is x", param="seed"), names)
    assert error.param == "seed"


def test_an_answer_with_tools_also_ends_with_the_token_that_announces_results() -> None:
    tokenizer, caller = tokenizer_of("function gemma"), Caller("", ServerOptions())
    stop = tokenizer.marker_id("<start_function_response>")
    for choice, expected in (("auto", (5, stop)), ("none", (5,))):
        fields = {"messages": HELLO, "stop_token_ids": [5], "tools": [TOOL], "tool_choice": choice}
        call = chat_call(ChatBody.model_validate(fields), caller, tokenizer)[0]
        assert call.params.stop_token_ids == expected
