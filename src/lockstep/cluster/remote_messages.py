"""Messages of the remote tier: converts a request to OpenAI's API, and another server's stream, rejections and failures
to ours. Pure.

Each parameter of a request is either sent or rejected here by name. Priority, tenant and session belong to this cluster
and are not sent. Clients see the entry's id and never the other server's address. They see the other server's error
text only if it rejects their request (400, 413, 422), because the text names what to change. The text of all other
failures only goes to the log, and responses about our API key are not logged either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import fields

from lockstep.cluster.completion_chunks import (
    ChunkChoice,
    ChunkUsage,
    CompletionChunk,
    Delta,
    FunctionPart,
    ToolCallDelta,
    error_message,
)
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import CallPart, Completion, RequestOutput, Timings, TokenCounts, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    PromptTooLongError,
    RemoteFailedError,
    RequestError,
    UnavailableError,
)
from lockstep.executors.constraint import Constraint, ConstraintKind
from lockstep.executors.sampling_params import SamplingParams

CHAT_PATH = "/chat/completions"
COMPLETIONS_PATH = "/completions"
SCHEMA_NAME = "answer"
"""Name that is given to every JSON schema, as OpenAI's API requires one."""
_OWN_PARAMETERS = ("tools", "reasoning_effort", "verbosity")
"""Template variables that are parameters of OpenAI's API."""
_STRUCTURED: Mapping[ConstraintKind, str] = {
    ConstraintKind.CHOICE: "choice",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.LARK: "grammar",
}
"""Members of ``structured_outputs``, which vLLM and Lockstep accept and OpenAI's API rejects."""

_SENT_OTHERWISE = ("logprobs", "constraint")
"""Sampling parameters that are rejected or sent in another form."""
_ENDINGS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_FILTERED = "content_filter"
"""Finish reason that is returned as the stop reason, as there is no finish reason for it here."""
RETRY_AFTER_S = 1.0
"""Retry delay in seconds if the other server gives none."""
MAX_RETRY_AFTER_S = 3_600.0
NO_REASON = "no reason given"


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """Request in the form in which it is posted."""

    path: str
    """Path after the base URL."""
    body: bytes
    num_choices: int
    has_tools: bool
    """True if the answer may consist of tool calls."""
    max_tokens: int | None
    """Maximum tokens of each choice; None: the other server decides."""


def remote_request(id_: str, model: str, call: GenerationRequest) -> RemoteRequest:
    """Convert a request to a streaming request of OpenAI's API.

    Args:
        id_: id of the manifest's entry, for messages.
        model: name of the model at the other server.

    Raises:
        InvalidParameterError: another server cannot serve the request.
    """
    _refuse(id_, call)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    prompt = call.prompt
    if isinstance(prompt, Conversation):
        body |= {"messages": [_message(each) for each in prompt.messages], **_of_template(prompt.template_kwargs)}
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
    unavailable: Mapping[str, tuple[bool, str]] = {
        "logprobs": (call.params.logprobs is not None, "log-probabilities"),
        "prompt_logprobs": (call.prompt_logprobs is not None, "log-probabilities of the prompt"),
        "input": (call.gives_vector, "embeddings"),
        "prompt": (not isinstance(call.prompt, (str, Conversation)), "prompts of token ids"),
    }
    for param, (is_set, what) in unavailable.items():
        if is_set:
            raise InvalidParameterError(
                f"{param} is not supported by the remote model {id_!r}: {what} need its tokenizer, which is not "
                "available here; leave the parameter out, or use a local model",
                param=param,
            )


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in the form of OpenAI's API. Messages for a chat template may have arguments of calls as objects."""
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_past_call(call) for call in calls]}


def _past_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": msgspec.json.encode(arguments).decode()}}


def _of_template(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: kwargs[name] for name in _OWN_PARAMETERS if kwargs.get(name)}
    others = {name: value for name, value in kwargs.items() if name not in _OWN_PARAMETERS}
    if own.get("reasoning_effort") == "none":  # it disables thinking at all servers
        others.pop("enable_thinking", None)
    return {**own, "chat_template_kwargs": others} if others else own


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their neutral values.

    The token limit is sent under its older name, ``max_tokens``. A server without the newer name might ignore it and
    never end, while a server without the older name rejects it.
    """
    body: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        neutral = {} if field.default is NODEFAULT else field.default
        if field.name not in _SENT_OTHERWISE and value != neutral:
            body[field.name] = value
    return body


def _constraint(constraint: Constraint) -> dict[str, Any]:
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"response_format": {"type": "json_object"}}
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        try:
            schema = msgspec.json.decode(source)  # type: ignore[arg-type]  # text, of this kind
        except ValueError as error:
            raise InvalidParameterError(f"the JSON schema is not JSON: {error}", param="constraint") from None
        named = {"name": SCHEMA_NAME, "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    value = list(source) if isinstance(source, tuple) else source
    return {"structured_outputs": {_STRUCTURED[constraint.kind]: value}}


class _PartialChoice:
    """State of one choice while its answer arrives."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.num_pieces = 0
        """Number of pieces so far; each has at least one token."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Limits beyond which the other server must be malfunctioning."""

    max_chars: int = 1 << 22
    """Maximum characters of an answer: all choices, reasoning and tool calls together. A longer answer is cut off."""
    max_empty_events: int = 1 << 16
    """Maximum number of empty events in a row; no keep-alive of a working server sends so many."""
    usage_s: float = 5.0
    """Time in seconds to wait for the usage after all choices have ended; the answer is complete without it."""


class RemoteAnswer:
    """Answer assembled from the events of one stream.

    The answer is complete when all requested choices have ended. If the server sends more pieces of a choice than
    `max_tokens`, it ignored the limit, and the choice is cut off. Without `max_tokens`, only `AnswerLimits` limits
    the answer.

    Args:
        sent_s: when the request was sent, on the clock of the other times.
    """

    def __init__(
        self, server: ServerName, request: RemoteRequest, sent_s: float, limits: AnswerLimits | None = None
    ) -> None:
        self._limits = limits or AnswerLimits()
        self._server = server
        self._request = request
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._decoder = msgspec.json.Decoder(CompletionChunk)
        self._choices = [_PartialChoice() for _ in range(request.num_choices)]
        self._usage = ChunkUsage()
        self._num_chars = 0
        self._num_empty = 0
        self.is_cut = False
        """True if a choice was cut off here instead of being ended by the other server."""
        self._last: TokenOutput | None = None

    @property
    def is_finished(self) -> bool:
        """True when all choices have ended; only the usage may follow."""
        return self._last is not None

    def feed(self, data: str, now_s: float) -> list[TokenOutput]:
        """Process an event and return its outputs. The end of the last choice is returned by `end`, after the usage.

        Raises:
            AttemptError: the event is an error or is malformed.
        """
        try:
            chunk = self._decoder.decode(data)
        except (ValueError, UnicodeEncodeError) as error:
            raise self._malformed(f"an event that is not a completion chunk ({error})") from None
        if chunk.error is not None:
            raise of_error_event(self._server, chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage
        outputs = [output for choice in chunk.choices for output in self._outputs(choice, now_s)]
        self._num_empty = 0 if outputs else self._num_empty + 1
        if self._num_empty > self._limits.max_empty_events:
            raise self._malformed(f"more than {self._limits.max_empty_events} empty events in a row")
        return outputs

    def end(self, now_s: float, queue_s: float) -> TokenOutput:
        """Return the last output, with the whole answer."""
        assert self._last is not None, "all choices have ended"
        usage = self._usage
        num_pieces = sum(so_far.num_pieces for so_far in self._choices)
        details = usage.prompt_tokens_details
        output = RequestOutput(
            request_id=0,
            prompt_token_ids=(),
            completions=tuple(
                Completion(
                    index,
                    "".join(so_far.texts),
                    (),
                    cast("FinishReason", so_far.finish_reason),
                    so_far.stop_reason,
                    None,
                    "".join(so_far.thoughts),
                )
                for index, so_far in enumerate(self._choices)
            ),
            num_cached_tokens=(details.cached_tokens if details else None) or 0,
            num_preemptions=0,
            timings=Timings(
                queue_s, None if self._first_s is None else self._first_s - self._sent_s, now_s - self._sent_s
            ),
            counted=TokenCounts(
                usage.prompt_tokens or 0, usage.completion_tokens or (num_pieces if self.is_cut else 0)
            ),
        )
        return msgspec.structs.replace(self._last, request=output)

    def _outputs(self, choice: ChunkChoice, now_s: float) -> list[TokenOutput]:
        if not 0 <= choice.index < len(self._choices):
            raise self._malformed(f"choice index {choice.index}, although n is {len(self._choices)}")
        so_far = self._choices[choice.index]
        output = self._output(choice)
        has_news = bool(output.text or output.reasoning or output.calls)
        if so_far.finish_reason is not None:
            if has_news and not self.is_cut:
                raise self._malformed(f"more of choice {choice.index} after its end")
            return []
        is_over = so_far.num_pieces == self._request.max_tokens or self._num_chars > self._limits.max_chars
        if has_news and is_over and choice.finish_reason is None:
            self.is_cut = True
            return self._ended(choice.index, FinishReason.LENGTH, None)
        if has_news:
            self._first_s = now_s if self._first_s is None else self._first_s
            so_far.num_pieces += bool(output.text or output.reasoning or any(part.arguments for part in output.calls))
            so_far.texts.append(output.text)
            so_far.thoughts.append(output.reasoning)
        news = [output] if has_news else []
        return news if choice.finish_reason is None else [*news, *self._finish(choice)]

    def _output(self, choice: ChunkChoice) -> TokenOutput:
        delta = choice.delta or Delta()
        calls = tuple(_part(call) for call in delta.tool_calls or ())
        if calls and not self._request.has_tools:
            raise self._malformed("a tool call, although the request has no tools")
        text, thoughts = f"{choice.text or ''}{delta.content or ''}{delta.refusal or ''}", choice.thoughts
        self._num_chars += len(text) + len(thoughts) + sum(len(part.arguments) for part in calls)
        return TokenOutput(0, choice.index, (), text, reasoning=thoughts, calls=calls)

    def _finish(self, choice: ChunkChoice) -> list[TokenOutput]:
        reason = choice.finish_reason or ""
        if reason not in _ENDINGS:
            raise AttemptError(RemoteFailedError(f"{self._server} ended its answer with {reason[:64]!r}"))
        return self._ended(choice.index, _ENDINGS[reason], _FILTERED if reason == _FILTERED else choice.stop_reason)

    def _ended(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> list[TokenOutput]:
        so_far = self._choices[index]
        so_far.finish_reason, so_far.stop_reason = reason, stop_reason
        output = TokenOutput(0, index, (), "", reason, stop_reason)
        if any(other.finish_reason is None for other in self._choices):
            return [output]
        self._last = output
        return []

    def _malformed(self, what: str) -> AttemptError:
        return AttemptError(RemoteFailedError(f"{self._server} sent {what}; is it an OpenAI-compatible server?"))


def _part(call: ToolCallDelta) -> CallPart:
    function = call.function or FunctionPart()
    return CallPart(call.index, function.arguments or "", call.id, function.name)


class AttemptError(Exception):
    """Failure of one attempt. `RemoteModel` catches it and raises ``error``.

    Args:
        error: error for the caller.
        is_fault: whether the failure counts against the other server.
        may_retry: whether the same request may be sent again at once, because no part of an answer has arrived.
        reply: text of the other server, for the log; clients do not see it.
    """

    def __init__(self, error: RequestError, *, is_fault: bool = True, may_retry: bool = False, reply: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.is_fault = is_fault
        self.may_retry = may_retry
        self.reply = reply


@dataclass(frozen=True, slots=True)
class ServerName:
    """Name of the other server in messages."""

    id: str
    api_key_env: str | None = None

    def __str__(self) -> str:
        return f"the remote server of {self.id!r}"


def of_status(server: ServerName, status: int, retry_after: str | None, body: bytes) -> AttemptError:
    """Return the failure for an HTTP response that is not an answer."""
    if 300 <= status < 400:
        return AttemptError(
            RemoteFailedError(
                f"{server} answered with a redirect ({status}), which is not followed; correct its base_url"
            )
        )
    if status in (401, 403):
        given = "no api_key_env" if server.api_key_env is None else f"the key in {server.api_key_env}"
        return AttemptError(
            RemoteFailedError(f"{server} rejected our API key ({status}); its entry has {given}"), is_fault=False
        )
    message, param, code = _error_of(body)
    if status in (400, 413, 422):
        kind = PromptTooLongError if code == "context_length_exceeded" else InvalidParameterError
        text = f"{server} rejected the request ({status}): {message or NO_REASON}"
        return AttemptError(kind(text, param=param), is_fault=False)
    if status in (408, 504):
        error: RequestError = DeadlineError(f"{server} did not answer in time ({status})")
        return AttemptError(error, is_fault=status == 504, reply=message)
    if status in (429, 503, 529):
        is_overloaded = status in (429, 529)
        how = "accepts no more requests now" if is_overloaded else "is unavailable now"
        wait_s = _seconds(retry_after)
        error = UnavailableError(f"{server} {how} ({status}); try again in {wait_s:g} s", retry_after_s=wait_s)
        may_retry = not is_overloaded and retry_after is None
        return AttemptError(error, is_fault=not is_overloaded, may_retry=may_retry, reply=message)
    if status == 404:
        how = "has no such model or path (404); correct its remote.base_url (OpenAI's ends in /v1) or remote.model"
    else:
        how = f"failed with status {status}"
    is_fault = status < 400 or status >= 500
    return AttemptError(RemoteFailedError(f"{server} {how}"), is_fault=is_fault, may_retry=status >= 500, reply=message)


def of_error_event(server: ServerName, error: Any) -> AttemptError:
    """Return the failure for an error event in the middle of a stream."""
    type_ = error.get("type") if isinstance(error, dict) else None
    message = error_message(error)
    if type_ == "invalid_request_error":
        return AttemptError(RemoteFailedError(f"{server} ended its answer: {message or NO_REASON}"), is_fault=False)
    if type_ == "timeout_error":
        return AttemptError(DeadlineError(f"{server} did not answer in time"), is_fault=False, reply=message)
    return AttemptError(RemoteFailedError(f"{server} ended its answer with an error"), reply=message)


def _error_of(body: bytes) -> tuple[str, str | None, str | None]:
    """Return the message (possibly empty), parameter and code of an error body in OpenAI's form or any other."""
    try:
        value: Any = msgspec.json.decode(body)
    except ValueError:
        value = body.decode("utf-8", "replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    param, code = (error.get("param"), error.get("code")) if isinstance(error, dict) else (None, None)
    return error_message(error), param if isinstance(param, str) else None, code if isinstance(code, str) else None


def _seconds(retry_after: str | None) -> float:
    """Parse ``Retry-After`` in seconds; dates are ignored."""
    if retry_after is None or not retry_after.isascii() or not retry_after.strip().isdigit():
        return RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, float(retry_after)))
