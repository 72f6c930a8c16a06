"""From the events of another server's stream to ours: text as it comes, and the whole answer at the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from lockstep.cluster.remote_errors import AttemptError, Named, of_frame
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import CallPart, Completion, RequestOutput, Timings, TokenCounts, TokenOutput
from lockstep.errors import RemoteFailedError

DONE = "[DONE]"
MAX_ANSWER_CHARS = 1 << 22
"""Of all choices, thoughts and calls together; a server that says more is out of its mind, and is cut."""
MAX_EMPTY_EVENTS = 1 << 16
"""In a row, that bring nothing; no server keeps a connection alive by so many."""
_ENDINGS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_FILTERED = "content_filter"
"""The one ending that is told as the stop reason: there is no finish reason for it here."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    """``delta`` of chats, ``text`` of completions."""

    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Told:
    """One choice so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.num_pieces = 0
        """Each of at least one token."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


class RemoteAnswer:
    """Fed with the data of one stream's events.

    Args:
        num_choices: how many were asked for; an answer is whole when all have ended.
        has_tools: whether functions may be called.
        max_tokens: of each choice; who sends more pieces than that did not hear, and is cut. None: only
            `MAX_ANSWER_CHARS` bounds it.
        sent_s: when the request was sent, on the clock of the other times.
    """

    def __init__(self, who: Named, num_choices: int, has_tools: bool, max_tokens: int | None, sent_s: float) -> None:
        self._who = who
        self._has_tools = has_tools
        self._max_tokens = max_tokens
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._choices = [_Told() for _ in range(num_choices)]
        self._usage = _Usage()
        self._num_chars = 0
        self._num_empty = 0
        self.is_cut = False
        """A choice was ended here, and not by the other server."""
        self._last: TokenOutput | None = None

    @property
    def is_finished(self) -> bool:
        """All choices have ended; what may follow is the usage."""
        return self._last is not None

    def feed(self, data: str, now_s: float) -> list[TokenOutput]:
        """What an event brings. The last choice's end waits for the usage: see `end`.

        Raises:
            AttemptError: the event is an error, or none that is known.
        """
        try:
            chunk = self._decoder.decode(data)
        except (ValueError, UnicodeEncodeError) as error:
            raise self._malformed(f"an event that is no completion chunk ({error})") from None
        if chunk.error is not None:
            raise of_frame(self._who, chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage
        outputs = [output for choice in chunk.choices for output in self._outputs(choice, now_s)]
        self._num_empty = 0 if outputs else self._num_empty + 1
        if self._num_empty > MAX_EMPTY_EVENTS:
            raise self._malformed(f"more than {MAX_EMPTY_EVENTS} events in a row that bring nothing")
        return outputs

    def end(self, now_s: float, queue_s: float) -> TokenOutput:
        """The very last output, with the whole answer."""
        assert self._last is not None, "all choices have ended"
        usage = self._usage
        num_told = sum(told.num_pieces for told in self._choices)
        details = usage.prompt_tokens_details
        output = RequestOutput(
            request_id=0,
            prompt_token_ids=(),
            completions=tuple(
                Completion(
                    index,
                    "".join(told.texts),
                    (),
                    cast("FinishReason", told.finish_reason),
                    told.stop_reason,
                    None,
                    "".join(told.thoughts),
                )
                for index, told in enumerate(self._choices)
            ),
            num_cached_tokens=(details.cached_tokens if details else None) or 0,
            num_preemptions=0,
            timings=Timings(
                queue_s, None if self._first_s is None else self._first_s - self._sent_s, now_s - self._sent_s
            ),
            counted=TokenCounts(usage.prompt_tokens or 0, usage.completion_tokens or (num_told if self.is_cut else 0)),
        )
        return msgspec.structs.replace(self._last, request=output)

    def _outputs(self, choice: _Choice, now_s: float) -> list[TokenOutput]:
        if not 0 <= choice.index < len(self._choices):
            raise self._malformed(f"choice {choice.index} of {len(self._choices)}")
        told = self._choices[choice.index]
        output = self._news(choice)
        has_news = bool(output.text or output.reasoning or output.calls)
        if told.finish_reason is not None:
            if has_news and not self.is_cut:
                raise self._malformed(f"more of choice {choice.index} after its end")
            return []
        is_over = told.num_pieces == self._max_tokens or self._num_chars > MAX_ANSWER_CHARS
        if has_news and is_over and choice.finish_reason is None:
            self.is_cut = True
            return self._ended(choice.index, FinishReason.LENGTH, None)
        if has_news:
            self._first_s = now_s if self._first_s is None else self._first_s
            told.num_pieces += bool(output.text or output.reasoning or any(part.arguments for part in output.calls))
            told.texts.append(output.text)
            told.thoughts.append(output.reasoning)
        news = [output] if has_news else []
        return news if choice.finish_reason is None else [*news, *self._finish(choice)]

    def _news(self, choice: _Choice) -> TokenOutput:
        delta = choice.delta or _Delta()
        calls = tuple(_part(call) for call in delta.tool_calls or ())
        if calls and not self._has_tools:
            raise self._malformed("a call of a function, and there are none in the request")
        text = f"{choice.text or ''}{delta.content or ''}{delta.refusal or ''}"
        reasoning = delta.reasoning_content or delta.reasoning or ""
        self._num_chars += len(text) + len(reasoning) + sum(len(part.arguments) for part in calls)
        return TokenOutput(0, choice.index, (), text, reasoning=reasoning, calls=calls)

    def _finish(self, choice: _Choice) -> list[TokenOutput]:
        reason = choice.finish_reason or ""
        if reason not in _ENDINGS:
            raise AttemptError(RemoteFailedError(f"{self._who} ended its answer with {reason[:64]!r}"))
        return self._ended(choice.index, _ENDINGS[reason], _FILTERED if reason == _FILTERED else choice.stop_reason)

    def _ended(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> list[TokenOutput]:
        told = self._choices[index]
        told.finish_reason, told.stop_reason = reason, stop_reason
        output = TokenOutput(0, index, (), "", reason, stop_reason)
        if any(other.finish_reason is None for other in self._choices):
            return [output]
        self._last = output
        return []

    def _malformed(self, what: str) -> AttemptError:
        return AttemptError(RemoteFailedError(f"{self._who} sent {what}; is it an OpenAI-compatible server?"))


def _part(call: _Call) -> CallPart:
    function = call.function or _Function()
    return CallPart(call.index, function.arguments or "", call.id, function.name)
