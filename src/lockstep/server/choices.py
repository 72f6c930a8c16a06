"""Choices of an answer: collect generated text, reasoning, tool calls and log-probabilities until they are sent.

Streams and complete answers use the same code, so that their contents cannot differ. A stream sends the collected
output repeatedly, a complete answer once at the end.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import CallPart, TokenOutput
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import RequestFailedError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.fields import FinishReasonName
from lockstep.server.logprobs import Entry, Tracer
from lockstep.server.tools.parser import CallDelta, Delta, ToolCall, ToolParser
from lockstep.server.tools.tool_use import ToolUse

LOGPROB_BYTES = 128
"""Approximate size of a pending log-probability with its token, in bytes."""


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of an answer. `feed` adds a sequence's outputs; an encoder reads them and then calls `shown`."""

    index: int
    """Index among the choices of the whole answer."""
    _: KW_ONLY
    tracer: Tracer | None = None
    """Set if log-probabilities are requested."""
    parser: ToolParser | None = None
    """Set if functions can be called. Separates calls from content."""
    calls_end: bool = True
    """Whether an answer with a complete call ends with ``tool_calls`` instead of ``stop``."""
    end_ids: frozenset[int] = frozenset()
    """End tokens of the model. They are not reported as `stop_reason`."""
    returns_ids: bool = False
    """Whether token ids are requested."""
    shows_end: bool = False
    """Whether a stop token that has text is part of the answer."""
    is_silent: bool = False
    """Whether generated output is hidden. A request about its prompt only still has to generate one token."""
    num_prompt_tokens: int = 0
    """Number of prompt tokens; 0: not known yet."""
    num_tokens: int = 0
    calls: list[CallDelta] = field(default_factory=list)
    """New output of calls. The next two fields are new log-probabilities and token ids."""
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None
    num_reasoning_tokens: int = 0
    """Number of tokens up to the first one of the content, if there is reasoning."""
    num_pending_bytes: int = 0
    """Approximate number of bytes that have not been sent. A character counts as one byte."""
    has_thoughts: bool = False
    has_begun: bool = False
    """True once a frame was sent. Used by the encoder."""
    is_queued: bool = False
    """True while the choice is queued for sending. Used by the answer."""
    _held: deque[Entry] = field(default_factory=deque)
    _num_chars: int = 0
    _content_seen: bool = False
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _remote_calls: dict[int, list[CallPart]] = field(default_factory=dict)
    """Calls that a remote server returned in parsed form, by index."""

    @property
    def text(self) -> str:
        """New content."""
        return self._texts[0] if len(self._texts) == 1 else "".join(self._texts)

    @property
    def reasoning(self) -> str:
        """New reasoning."""
        return "".join(self._thoughts)

    @property
    def whole_calls(self) -> Sequence[ToolCall]:
        """All complete calls."""
        read = [] if self.parser is None else self.parser.calls
        return [*read, *map(_joined, self._remote_calls.values())] if self._remote_calls else read

    @property
    def num_unread_calls(self) -> int:
        """Number of times that text which started like a call could not be parsed."""
        return 0 if self.parser is None else self.parser.num_unread

    @property
    def ended_by(self) -> FinishReasonName:
        """`finish_reason` of a choice that has ended."""
        assert self.finish_reason is not None, "the choices of a complete answer have ended"
        return self.finish_reason

    @property
    def has_updates(self) -> bool:
        news = self._texts or self._thoughts or self.calls or self.entries or self.token_ids
        return bool(news) or self.finish_reason is not None

    @property
    def is_plain(self) -> bool:
        """True if there is new text and nothing else, as for almost every token."""
        return bool(self._texts) and not (
            self.finish_reason or self._thoughts or self.calls or self.entries or self.token_ids
        )

    def usage(self, num_own: int) -> dict[str, int] | None:
        """Usage with the given number of output tokens; None if the number of prompt tokens is not known yet."""
        num_prompt = self.num_prompt_tokens
        if not num_prompt:
            return None
        return {"prompt_tokens": num_prompt, "completion_tokens": num_own, "total_tokens": num_prompt + num_own}

    def set_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Set the prompt tokens, if they were not known when the choice was created."""
        self.num_prompt_tokens = len(prompt_ids)
        if self.tracer is not None:
            self.tracer.follow(prompt_ids[-1])

    def feed(self, output: TokenOutput) -> None:
        """Add the output of one step.

        Raises:
            RequestFailedError: the sequence ended with another reason than `stop` or `length` and without an engine
                error.
        """
        if self.is_silent:
            self.finish_reason = "length" if output.finish_reason is not None else None
            return
        text = output.text
        self.num_tokens += len(output.token_ids)
        if text:
            self.num_pending_bytes += len(text)
            self._num_chars += len(text)
            self._content_seen = True
            if self.parser is None:
                self._texts.append(text)
            else:
                self._sort(self.parser.append(text))
        if output.reasoning:
            self.has_thoughts = True
            self._thoughts.append(output.reasoning)
            self.num_pending_bytes += len(output.reasoning)
        if output.calls:
            self._take_calls(output.calls)
        if not self._content_seen:
            self.num_reasoning_tokens += len(output.token_ids)
        if self.returns_ids:
            self.token_ids += output.token_ids
            self.num_pending_bytes += 8 * len(output.token_ids)
        if self.tracer is not None and output.logprobs is not None:
            self._trace(output, self.tracer)
        if output.finish_reason is not None:
            self._finish(output)

    def shown(self) -> None:
        """Clear the new output, because it has been sent."""
        self._texts = []
        self.num_pending_bytes = 0
        if self.calls:
            self.calls = []
        if self._thoughts:
            self._thoughts = []
        if self.entries:
            self.entries = []
        if self.token_ids:
            self.token_ids = []

    def _sort(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, CallDelta):
                self._add(delta)
            else:
                self._texts.append(delta.text)

    def _add(self, news: CallDelta) -> None:
        """Add new output of a call. Pieces of one call are merged, because clients read only the first of a chunk."""
        last = self.calls[-1] if self.calls else None
        if last is not None and last.index == news.index:
            self.calls[-1] = replace(last, arguments=last.arguments + news.arguments)
        else:
            self.calls.append(news)

    def _take_calls(self, parts: Sequence[CallPart]) -> None:
        for part in parts:
            self._add(CallDelta(part.index, part.arguments, part.id, part.name))
            self.num_pending_bytes += len(part.arguments)
            self._remote_calls.setdefault(part.index, []).append(part)

    def _trace(self, output: TokenOutput, tracer: Tracer) -> None:
        for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
            entry = tracer.entry(token_id, logprobs)
            self._held.append(entry)
            self.num_pending_bytes += LOGPROB_BYTES * (1 + len(entry.top))
        if output.finish_reason is None:
            self._release()

    def _release(self) -> None:
        """Release entries whose text is complete. A stop string may still cut other text, but never reasoning."""
        while self._held and (self.has_thoughts or self._held[0].offset < self._num_chars):
            self.entries.append(self._held.popleft())

    def _finish(self, output: TokenOutput) -> None:
        reason, stop_reason = output.finish_reason, output.stop_reason
        if reason is FinishReason.STOP:
            self.finish_reason = "stop"
        elif reason is FinishReason.LENGTH:
            self.finish_reason = "length"
        else:
            raise RequestFailedError(f"the request ended with {reason and reason.value} before its answer was complete")
        if self.parser is not None:
            self._sort(self.parser.flush(is_cut=reason is FinishReason.LENGTH))
            if self.calls_end and self.finish_reason == "stop" and self.whole_calls:
                self.finish_reason = "tool_calls"
        if isinstance(stop_reason, str) or stop_reason not in self.end_ids:
            self.stop_reason = stop_reason
        if isinstance(stop_reason, int) and self._held and not self._is_text(self._held[-1]):
            self._held.pop()
        self._release()
        if not isinstance(stop_reason, str):
            self.entries += self._held
        self._held.clear()

    def _is_text(self, end: Entry) -> bool:
        """True if the token that ended the answer is part of its text."""
        return self.shows_end and self.tracer is not None and end.offset < self.tracer.num_chars


def open_choices(
    params: SamplingParams,
    tokenizer: Tokenizer,
    accepted: Accepted,
    *,
    first_index: int = 0,
    tool_use: ToolUse | None = None,
    new_call_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    returns_ids: bool = False,
) -> list[Choice]:
    """Create the choices of an accepted call, without any output."""
    prompt_ids, end_ids = accepted.prompt_token_ids, frozenset(tokenizer.end_token_ids)
    specials = () if tool_use is None else tool_use.shown_specials
    end_ids |= frozenset(() if tool_use is None else tool_use.stop_ids)

    def tracer() -> Tracer:
        return Tracer(
            tokenizer,
            prompt_ids[-1] if prompt_ids else None,
            verbatim=params.constraint is not None,
            shown_specials=specials if params.skip_special_tokens else None,
        )

    def parser() -> ToolParser | None:
        return tool_use.parser(new_call_id) if tool_use is not None and tool_use.names else None

    return [
        Choice(
            first_index + index,
            tracer=None if params.logprobs is None else tracer(),
            parser=parser(),
            calls_end=tool_use is None or tool_use.calls_end,
            end_ids=end_ids,
            returns_ids=returns_ids,
            shows_end=params.include_stop_str_in_output,
            num_prompt_tokens=len(prompt_ids),
        )
        for index in range(params.n)
    ]


def _joined(parts: Sequence[CallPart]) -> ToolCall:
    first = parts[0]
    return ToolCall(first.index, first.id or "", first.name or "", "".join(part.arguments for part in parts))
