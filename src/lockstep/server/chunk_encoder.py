"""Encoders of chunked streams: encode the frames that all chunk-based endpoints share, and chat completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NotRequired

from lockstep.cluster.base import Hop
from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.answer import (
    DATA,
    END,
    SSE,
    AnswerFunction,
    AnswerToolCall,
    Extension,
    ResponseMetadata,
    Usage,
    data_frame,
    dispatch_calls,
    encode,
)
from lockstep.server.answer_response import Answer
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.fields import FinishReasonName, Shape
from lockstep.server.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from lockstep.server.tools.parser import CallDelta

DONE = data_frame(b"[DONE]")
_CHUNK_END = b"}" + END


class ChunkEncoder(ABC):
    """Encoder of answers that are streamed as chunks of choices. Implements `lockstep.server.answer_response.Encoder`.

    The parts that all chunks of a choice share are encoded once, so a token only costs the encoding of its text.

    Args:
        kind: value of the member `object`.
        plain: members of a choice without content, in the order in which they are sent.
        text: bytes before and after the new text of a choice that has nothing else.
        num_choices: number of choices of the whole answer.
    """

    framing = SSE

    def __init__(
        self,
        metadata: ResponseMetadata,
        kind: str,
        plain: Mapping[str, Any],
        text: tuple[bytes, bytes],
        num_choices: int,
    ) -> None:
        self.metadata = metadata
        shared = {
            "id": metadata.id,
            "object": kind,
            "created": metadata.created_s,
            "model": metadata.model,
            "system_fingerprint": metadata.fingerprint,
            **metadata.tier,
        }
        self._plain = plain
        self._head = DATA + encode(shared)[:-1] + b',"choices":['
        before, self._after = text
        self._text_heads = [self._head + b'{"index":%d,' % index + before for index in range(num_choices)]
        self._text_tail = self._after + self._usage_member(None, 0) + _CHUNK_END

    @abstractmethod
    def beginning(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        """Members of the frames before the content of a choice."""

    @abstractmethod
    def updates(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        """Members of the frames with the new output of a choice."""

    @abstractmethod
    def ending(self, choice: Choice) -> Mapping[str, Any]:
        """Members of the last frame of a choice."""

    @abstractmethod
    def whole(self, answer: Answer) -> bytes: ...

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        frames: list[bytes] = []
        if not choice.has_begun:
            choice.has_begun = True
            frames += [self.frame(choice, each, 0) for each in self.beginning(choice)]
        if choice.is_plain:
            frames.append(self._text_frame(choice))
            return b"".join(frames)
        frames += [self.frame(choice, each, choice.num_tokens) for each in self.updates(choice)]
        if choice.finish_reason is not None:
            more = b""
            if answer is not None and not self.metadata.include_usage:
                more = b',"lockstep":' + encode(answer.extension)
            frames.append(self.frame(choice, self.ending(choice), choice.num_tokens, more))
        return b"".join(frames)

    def end(self, answer: Answer) -> bytes:
        if not self.metadata.include_usage:
            return DONE
        last = encode({"usage": answer.usage, "lockstep": answer.extension})
        return self._head + b"]," + last[1:] + END + DONE

    def failed(self, error: HttpError) -> bytes:
        return data_frame(encode(error.body())) + DONE

    def frame(self, choice: Choice, members: Mapping[str, Any], num_tokens: int, more: bytes = b"") -> bytes:
        """Encode one chunk of a choice. ``num_tokens`` is the choice's token count so far; ``more`` is appended."""
        body = encode({"index": choice.index, **self._plain, **members})
        return self._head + body + b"]" + self._usage_member(choice, num_tokens) + more + _CHUNK_END

    def _text_frame(self, choice: Choice) -> bytes:
        tail = self._text_tail
        if self.metadata.continuous_usage:
            tail = self._after + self._usage_member(choice, choice.num_tokens) + _CHUNK_END
        return self._text_heads[choice.index] + encode(choice.text) + tail

    def _usage_member(self, choice: Choice | None, num_tokens: int) -> bytes:
        """Encode the usage member of a chunk; empty if chunks have none."""
        if self.metadata.continuous_usage:
            return b',"usage":' + encode(choice and choice.usage(num_tokens))
        return b',"usage":null' if self.metadata.include_usage else b""


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    """Reasoning that precedes the content."""
    reasoning: NotRequired[str | None]
    """Same as `reasoning_content`, under the name that newer clients read."""
    tool_calls: NotRequired[list[AnswerToolCall] | None]
    function_call: NotRequired[AnswerFunction | None]
    """Replaces `tool_calls` if the request has `functions`."""


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    """Stop string or stop token id that ended the answer; null for the model's own end token."""
    token_ids: NotRequired[Sequence[int] | None]


class ChatCompletion(Shape):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default"] | None]
    """Present if the request set one."""
    lockstep: Extension
    prompt_token_ids: NotRequired[Sequence[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class ChatEncoder(ChunkEncoder):
    """Encodes chat completions: the chunks of a stream, or the complete answer.

    Args:
        has_functions: return calls in their deprecated form, `function_call`.
        echo: text that starts every choice.
        hops: models that were called earlier, shown as function calls.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        num_choices: int,
        *,
        has_logprobs: bool = False,
        returns_ids: bool = False,
        has_functions: bool = False,
        echo: str = "",
        hops: Sequence[Hop] = (),
    ) -> None:
        text = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]'
        plain: Mapping[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": None}
        super().__init__(metadata, "chat.completion.chunk", plain, text, num_choices)
        self._tokenizer = tokenizer
        self._echo = echo
        self._dispatched = dispatch_calls(metadata.id, hops)
        self._has_logprobs = has_logprobs
        self._returns_ids = returns_ids
        self._has_functions = has_functions

    def opening(self, choices: Sequence[Choice]) -> bytes:
        if not self._dispatched:
            return b""
        calls = [{"index": index, **call} for index, call in enumerate(self._dispatched)]
        delta = {"role": "assistant", "content": self._echo, "tool_calls": calls}
        for choice in choices:
            choice.has_begun = True
        return b"".join([self.frame(choice, {"delta": delta}, 0) for choice in choices])

    def beginning(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        yield {"delta": {"role": "assistant", "content": self._echo}}

    def updates(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        if choice.reasoning:
            yield {"delta": {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}}
        if choice.text or choice.entries or choice.token_ids:
            members: dict[str, Any] = {"delta": {"content": choice.text} if choice.text else {}}
            if choice.entries:
                members["logprobs"] = chat_logprobs(choice.entries)
            if choice.token_ids:
                members["token_ids"] = choice.token_ids
            yield members
        for call in choice.calls:
            yield {"delta": self._call_delta(call)}

    def ending(self, choice: Choice) -> Mapping[str, Any]:
        return {"finish_reason": self._finish_reason(choice), "stop_reason": choice.stop_reason}

    def whole(self, answer: Answer) -> bytes:
        metadata, [output] = self.metadata, answer.outputs
        completion: ChatCompletion = {
            "id": metadata.id,
            "object": "chat.completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": [self._whole_choice(choice) for choice in answer.choices],
            "usage": answer.usage,
            "system_fingerprint": metadata.fingerprint,
            **metadata.tier,  # type: ignore[typeddict-item]  # a final `Tier` has no other members
            "lockstep": answer.extension,
        }
        if self._returns_ids:
            completion["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            logprobs = prompt_logprobs(self._tokenizer, output.prompt_token_ids, output.prompt_logprobs)
            completion["prompt_logprobs"] = logprobs
        return encode(completion)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        calls = choice.whole_calls
        content = self._echo + choice.text
        message: AnswerMessage = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if calls and self._has_functions:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls or self._dispatched:
            message["tool_calls"] = self._dispatched + [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        whole: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.entries) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self._returns_ids:
            whole["token_ids"] = choice.token_ids
        return whole

    def _finish_reason(self, choice: Choice) -> FinishReasonName:
        is_old = self._has_functions and choice.finish_reason == "tool_calls"
        return "function_call" if is_old else choice.ended_by

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        """Encode new output of a call as a separate delta, because clients read only the first call of a delta."""
        named = {} if call.name is None else {"name": call.name}
        function = {**named, "arguments": call.arguments}
        if self._has_functions:
            return {"function_call": function}
        about = {} if call.id is None else {"id": call.id, "type": "function"}
        return {"tool_calls": [{"index": call.index, **about, "function": function}]}
