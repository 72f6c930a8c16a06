"""Ollama's generating endpoints: serves `/api/chat` and `/api/generate`; answers are JSON lines, by default
streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.cluster.base import Accepted
from lockstep.cluster.cluster import Cluster
from lockstep.engine.request import GenerationRequest
from lockstep.errors import InvalidParameterError, ModelNotFoundError, RequestError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.adapters.ollama_body import (
    CHAT,
    GENERATE,
    LATEST,
    RAW,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    completion_body,
    is_unloading,
    warnings_of,
)
from lockstep.server.admission import forbidden, is_operator, origin_fault
from lockstep.server.answer import JSON_LINES_TYPE, Extension, Framing, documented, json_line
from lockstep.server.answer_response import Answer, AnswerResponse, accepted_of
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat_adapter import answer_as_chat
from lockstep.server.choices import Choice, open_choices
from lockstep.server.completions import completion_calls
from lockstep.server.dialect import OLLAMA, OllamaErrorBody
from lockstep.server.errors import HttpError, documented_errors
from lockstep.server.fields import Shape
from lockstep.server.generation import caller_of
from lockstep.server.logprobs import TokenLogprob, chat_logprobs
from lockstep.server.request_context import RequestContext, context_of, disconnected, refusal, while_connected
from lockstep.server.serving import card_of, serving_of, translated
from lockstep.worker.progress import LOADING

NS = 1e9
ERRORS = documented_errors(OllamaErrorBody)


class OllamaFunction(Shape):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(Shape):
    id: str
    function: OllamaFunction


class OllamaAnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str | None]
    tool_calls: NotRequired[list[OllamaToolCall] | None]


class OllamaAnswer(Shape):
    """One line of an answer: a part, the end, or everything. The end has the numbers; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"] | None]
    total_duration: NotRequired[int | None]
    load_duration: NotRequired[int | None]
    """Time spent waiting for the model to be loaded."""
    prompt_eval_count: NotRequired[int | None]
    """Number of prompt tokens, including those from the prefix cache."""
    prompt_eval_duration: NotRequired[int | None]
    eval_count: NotRequired[int | None]
    eval_duration: NotRequired[int | None]
    logprobs: NotRequired[list[TokenLogprob] | None]
    lockstep: NotRequired[Extension | None]


class OllamaChat(OllamaAnswer):
    message: OllamaAnswerMessage


class OllamaGeneration(OllamaAnswer):
    response: str
    thinking: NotRequired[str | None]
    context: NotRequired[list[int] | None]
    """Tokens of prompt and answer, in the last line. Sent as `context` by a request that continues the conversation."""


class OllamaEncoder:
    """Encoder of one call with one choice as JSON lines. Implements `lockstep.server.answer_response.Encoder`.

    Args:
        is_chat: answers have a `message`; otherwise a `response`.
    """

    def __init__(self, model: str, context: RequestContext, *, is_chat: bool) -> None:
        self._model = model
        self._context = context
        self._is_chat = is_chat
        self._ids: list[int] = []
        """Token ids of the answer so far, if they are returned."""

    @property
    def framing(self) -> Framing:
        """Framing whose ping is an answer without text, because Ollama's clients ignore empty lines."""
        return Framing(JSON_LINES_TYPE, self._line(self._members(""), is_done=False))

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        self._ids += choice.token_ids
        if not (choice.text or choice.reasoning or choice.entries):
            return b""
        members = self._members(choice.text, choice.reasoning)
        return self._line(members | _logprobs(choice), is_done=False)

    def end(self, answer: Answer) -> bytes:
        [choice] = answer.choices
        calls = self._calls(choice)
        before = self._line(self._members("", calls=calls), is_done=False) if calls else b""
        return before + self._line(self._members("") | self._final_members(answer), is_done=True)

    def failed(self, error: HttpError) -> bytes:
        return json_line(OLLAMA.error_body(error, self._context.request_id))

    def whole(self, answer: Answer) -> bytes:
        [choice] = answer.choices
        self._ids += choice.token_ids
        members = self._members(choice.text, choice.reasoning, self._calls(choice))
        return self._line(members | _logprobs(choice) | self._final_members(answer), is_done=True)

    def _members(self, text: str, thoughts: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        others: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        if not self._is_chat:
            return {"response": text, **others}
        if calls:
            others["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **others}}

    def _calls(self, choice: Choice) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "function": {
                    "index": index,
                    "name": call.name,
                    "arguments": call.arguments_object,
                },
            }
            for index, call in enumerate(choice.whole_calls)
        ]

    def _final_members(self, answer: Answer) -> dict[str, Any]:
        [choice], totals, context = answer.choices, answer.totals, self._context
        waits = context.progress.waits.items()
        loading_s = sum(wait.last_s - wait.first_s for (_, limit), wait in waits if limit == LOADING)
        first_s = totals.total_s if totals.ttft_s is None else totals.ttft_s
        return {
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            **({"context": [*answer.accepted[0].prompt_token_ids, *self._ids]} if choice.returns_ids else {}),
            "total_duration": _ns(time.monotonic() - context.started_s),
            "load_duration": _ns(loading_s),
            "prompt_eval_count": totals.num_prompt_tokens,
            "prompt_eval_duration": _ns(first_s - totals.queue_s),
            "eval_count": totals.num_output_tokens,
            "eval_duration": _ns(totals.total_s - first_s),
            "lockstep": answer.extension,
        }

    def _line(self, members: Mapping[str, Any], *, is_done: bool) -> bytes:
        return json_line({"model": self._model, "created_at": now_text(), **members, "done": is_done})


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(choice.entries)["content"]} if choice.entries else {}


def _ns(seconds: float) -> int:
    return max(0, round(seconds * NS))


def now_text() -> str:
    """Current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def served_name(cluster: Cluster, name: str) -> str:
    """Resolve a model name of an Ollama client to a served name. Ollama adds the tag `latest` to names without a tag.

    Raises:
        ModelNotFoundError: no model is served under that name.
    """
    try:
        cluster.card(name)
    except ModelNotFoundError as error:
        bare = name.removesuffix(LATEST)
        try:
            cluster.card(bare)
        except ModelNotFoundError:
            raise error from None
        return bare
    return name


_EXAMPLE = '{"model":"pocket","message":{"role":"assistant","content":"It"},"done":false}\n'
router = APIRouter(prefix="/api", route_class=LongBodyRoute, tags=["ollama"], responses=ERRORS)


@router.post(
    "/chat",
    responses=documented(OllamaChat, _EXAMPLE, kind=JSON_LINES_TYPE),
    operation_id="ollama_chat",
)
async def ollama_chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation (Ollama's API)."""
    if not body.messages:
        return await _load(request, body, {"message": {"role": "assistant", "content": ""}})
    return await _answer(request, body, is_chat=True)


@router.post(
    "/generate",
    responses=documented(OllamaGeneration, _EXAMPLE, kind=JSON_LINES_TYPE),
    operation_id="ollama_generate",
)
async def ollama_generate(body: OllamaGenerateBody, request: Request) -> Response:
    """Answer a prompt (Ollama's API)."""
    if not body.prompt:
        return await _load(request, body, {"response": ""})
    return await (_continue(request, body) if body.raw else _answer(request, body, is_chat=False))


async def _answer(request: Request, body: OllamaChatBody | OllamaGenerateBody, *, is_chat: bool) -> Response:
    cluster, context = serving_of(request).cluster, context_of(request)
    body = body.model_copy(update={"model": served_name(cluster, body.model)})
    table = CHAT if is_chat else GENERATE
    return await answer_as_chat(
        request,
        body.model,
        lambda: table.request(body),
        table,
        lambda accepted: OllamaEncoder(accepted.model, context, is_chat=is_chat),
        is_stream=body.stream is not False,
        new_call_id=lambda: f"call_{secrets.token_hex(4)}",
        warnings=warnings_of(body, cluster.card(body.model).max_model_len),
        earlier_ids=(body.context or ()) if isinstance(body, OllamaGenerateBody) else (),
        returns_ids=not is_chat and cluster.card(body.model).tokenizer.vocab_size > 0,
    )


async def _continue(request: Request, body: OllamaGenerateBody) -> Response:
    """Complete a raw prompt, without the chat template."""
    cluster, context = serving_of(request).cluster, context_of(request)
    body = body.model_copy(update={"model": served_name(cluster, body.model)})
    card_of(request, body.model)
    caller = caller_of(request)
    try:
        completion = await translated(request, lambda: completion_calls(completion_body(body), caller))
    except RequestError as error:
        raise RAW.error(error) from None
    calls = [replace(call, cuts_to_context=True) for call in completion.calls]
    params = calls[0].params

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        [first] = accepted
        card = cluster.card(first.model)
        context.warnings = list(warnings_of(body, card.max_model_len))
        choices = open_choices(params, card.tokenizer, first)
        return Answer(accepted, choices, OllamaEncoder(card.name, context, is_chat=False), context)

    names = RAW.names(completion.names)
    return AnswerResponse(request, calls, make_answer, names, is_stream=body.stream is not False)


async def _load(request: Request, body: OllamaBody, members: Mapping[str, Any]) -> Response:
    """Load or unload a model, for a request without a prompt. With `keep_alive` 0 the model is unloaded."""
    serving, context = serving_of(request), context_of(request)
    cluster = serving.cluster
    context.model = name = cluster.card(served_name(cluster, body.model)).name
    unloads = is_unloading(body.keep_alive)
    if unloads:
        refused = _unloading_fault(request)
        if refused is not None:
            return refusal(refused, context)
        await cluster.unload_model(name)
    elif cluster.card(name).tier not in ("resident", "remote"):
        call = GenerationRequest(
            " ",
            SamplingParams(max_tokens=1),
            model=name,
            tenant=context.tenant,
            queue_deadline_s=serving.options.queue_timeout_s,
            deadline_s=serving.options.request_timeout_s,
        )
        await while_connected(disconnected(request.receive), _load_for(cluster, call, context), context)
    line = {"model": name, "created_at": now_text(), **members}
    return JSONResponse({**line, "done": True, "done_reason": "unload" if unloads else "load"})


async def _load_for(cluster: Cluster, call: GenerationRequest, context: RequestContext) -> None:
    """Load the model of a call by submitting the call, and abort the call when it is accepted."""
    async with aclosing(cluster.stream(call, context.progress)) as stream:
        await accepted_of([stream])


def _unloading_fault(request: Request) -> HttpError | None:
    """Return the error if the caller may not unload models, which requires an operator; otherwise None."""
    serving, context = serving_of(request), context_of(request)
    options = serving.options
    if serving.cluster.is_fixed:
        raise InvalidParameterError(
            "keep_alive is 0, but this server serves one fixed model; stop the server to unload it, or serve a "
            "manifest",
            param="keep_alive",
        )
    if not is_operator(context.tenant, options):
        return forbidden()
    if context.tenant:
        return None
    # Pages of loopback origins cannot call `/v1/models/{id}/unload` either.
    return origin_fault(options.cors_origins, False, request.scope["headers"])
