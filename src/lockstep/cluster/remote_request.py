"""From a call to the body that another OpenAI-compatible server is asked with. Pure.

Everything that a call says is sent, or refused by name here; what the other server refuses comes back as its answer.
Priority, tenant and session are this cluster's own and are not told to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import fields

from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.executors.sampling_params import SamplingParams

CHAT_PATH = "/chat/completions"
COMPLETIONS_PATH = "/completions"
SCHEMA_NAME = "answer"
"""OpenAI wants every schema to have a name."""
_OWN_PARAMETERS = ("tools", "reasoning_effort", "verbosity")
"""Variables of templates that OpenAI's API knows as parameters."""
_STRUCTURED: Mapping[ConstraintKind, str] = {
    ConstraintKind.CHOICE: "choice",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.LARK: "grammar",
}
"""Members of ``structured_outputs``, which vLLM and Lockstep take and OpenAI's API refuses."""

_SAID_OTHERWISE = ("logprobs", "constraint")
"""Parameters of sampling that are refused, or have another form."""


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """What is posted."""

    path: str
    """After the base URL."""
    body: bytes
    num_choices: int
    has_tools: bool
    """Whether calls of functions are an answer."""
    max_tokens: int | None
    """Of each choice; None: as many as the other server likes."""


def remote_request(id_: str, model: str, call: GenerationRequest) -> RemoteRequest:
    """The call in the terms of OpenAI's API, streamed.

    Args:
        id_: of the manifest's entry, for messages.
        model: its name there.

    Raises:
        InvalidParameterError: what is asked cannot be had from another server.
    """
    _refuse(id_, call)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    prompt = call.prompt
    if isinstance(prompt, Conversation):
        body |= {"messages": list(prompt.messages), **_of_template(prompt.template_kwargs)}
        if prompt.continue_final or not prompt.add_generation_prompt:
            body |= {"add_generation_prompt": False, "continue_final_message": prompt.continue_final}
    else:
        body["prompt"] = prompt
    body |= _sampling(call.params)
    if call.params.constraint is not None:
        body |= _constraint(call.params.constraint)
    if call.truncate_prompt_tokens is not None:
        body["truncate_prompt_tokens"] = call.truncate_prompt_tokens
    if call.cache_salt:
        body["cache_salt"] = call.cache_salt
    path = CHAT_PATH if "messages" in body else COMPLETIONS_PATH
    params = call.params
    return RemoteRequest(path, msgspec.json.encode(body), params.n, bool(body.get("tools")), params.max_tokens)


def _refuse(id_: str, call: GenerationRequest) -> None:
    asked: Mapping[str, tuple[bool, str]] = {
        "logprobs": (call.params.logprobs is not None, "log-probabilities"),
        "prompt_logprobs": (call.prompt_logprobs is not None, "log-probabilities of the prompt"),
        "input": (call.pooling is not None, "embeddings"),
        "prompt": (not isinstance(call.prompt, (str, Conversation)), "prompts of token ids"),
    }
    for param, (is_asked, what) in asked.items():
        if is_asked:
            raise InvalidParameterError(
                f"{param} cannot be served by {id_!r}, which another server answers: {what} would be in tokens that "
                "are not known here; leave it out, or ask a local model",
                param=param,
            )


def _of_template(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: kwargs[name] for name in _OWN_PARAMETERS if kwargs.get(name)}
    others = {name: value for name, value in kwargs.items() if name not in _OWN_PARAMETERS}
    if told.get("reasoning_effort") == "none":  # which says it already, also to servers that know no variables
        others.pop("enable_thinking", None)
    return {**told, "chat_template_kwargs": others} if others else told


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """What differs from the neutral value. The limit goes by its older name, ``max_tokens``: a server that does not
    know the newer one might ignore it and never end, while one that has given up the older refuses it by name."""
    told: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        neutral = {} if field.default is NODEFAULT else field.default
        if field.name not in _SAID_OTHERWISE and value != neutral:
            told[field.name] = value
    return told


def _constraint(constraint: Constraint) -> dict[str, Any]:
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        try:
            schema = msgspec.json.decode(source)  # type: ignore[arg-type]  # text, of this kind
        except ValueError as error:
            raise InvalidParameterError(f"the JSON schema is not JSON: {error}", param="constraint") from None
        told = {"name": SCHEMA_NAME, "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": told}}
    value = list(source) if isinstance(source, tuple) else source
    return {"structured_outputs": {_STRUCTURED[constraint.kind]: value}}
