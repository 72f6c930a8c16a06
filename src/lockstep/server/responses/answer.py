"""The answer to a response request while it comes: from the outputs of a call to frames of events, or to one object."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.cluster.base import Event
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.server.answer import encode
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.hops import Route
from lockstep.server.logprobs import Entry, chat_logprobs
from lockstep.server.record import RequestRecord
from lockstep.server.responses.conversation import JsonObject
from lockstep.server.responses.events import ResponseWriter
from lockstep.server.usage import extension_of

_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Of errors in a response object, by HTTP status; OpenAI's names."""


class ResponseAnswer:
    """Implements `lockstep.server.sse.Shown` for one call with one choice.

    Args:
        writer: a new one.
        choice: what the call's outputs are read into.
        record: of the HTTP request.
        session_id: of the call.
        route: how the request came to who answers it.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        choice: Choice,
        record: RequestRecord,
        session_id: str | None = None,
        route: Route | None = None,
    ) -> None:
        self._writer = writer
        self._choice = choice
        self._record = record
        self._session_id = session_id
        self._route = route
        self._output: RequestOutput | None = None
        self._final: JsonObject | None = None
        self._entries: list[Entry] = []
        """Log-probabilities whose text has not come yet."""
        self._has_text = False
        writer.begin()

    @property
    def is_complete(self) -> bool:
        return self._output is not None

    @property
    def outputs(self) -> list[RequestOutput]:
        return [] if self._output is None else [self._output]

    @property
    def num_pending_bytes(self) -> int:
        return self._choice.num_pending_bytes

    def feed(self, call: int, events: Sequence[Event]) -> None:
        """Take events of the call, in order; ``call`` is 0."""
        for event in events:
            if isinstance(event, TokenOutput):
                self._choice.feed(event)
                self._output = event.request or self._output

    def take(self) -> bytes:
        self._write()
        return self._frames()

    def final(self) -> JsonObject:
        """The response object of an answer that is complete."""
        if self._final is None:
            self._write()
            is_cut = self._choice.finish_reason == "length"
            self._end_text(is_cut)
            for call in self._choice.whole_calls:
                self._writer.write_call(call.id, call.name, call.arguments)
            extension = extension_of(self._record.request_id, self._session_id, self.outputs, self._record.warnings)
            if self._route is not None:
                extension |= self._route.told(self.outputs)
            usage = {"usage": self._usage(), "lockstep": extension}
            if is_cut:
                self._final = self._writer.cut(**usage)
            else:
                self._final = self._writer.complete(int(time.time()), **usage)
        return self._final

    def end(self) -> bytes:
        self._writer.end(self.final())
        return self._frames()

    def failed(self, error: HttpError) -> bytes:
        self._write()
        self._writer.end(self._writer.fail(_CODES.get(error.status, "server_error"), error.message))
        return self._frames()

    def whole(self) -> bytes:
        return encode(self.final())

    def _write(self) -> None:
        """Give the writer what is new. Calls are told at the end: until then one may turn out to be text."""
        choice, writer = self._choice, self._writer
        if choice.reasoning:
            writer.write_thoughts(choice.reasoning)
        if choice.text or not choice.reasoning:  # what came with thoughts alone is theirs
            self._entries += choice.entries
        if choice.text:
            writer.write_text(choice.text, self._take_entries())
            self._has_text = True
        choice.shown()

    def _end_text(self, is_cut: bool) -> None:
        if self._entries and self._has_text and not self._choice.whole_calls:  # else they are the calls'
            self._writer.write_text("", self._take_entries())
        self._writer.end_text(is_cut=is_cut)

    def _take_entries(self) -> Sequence[JsonObject]:
        entries, self._entries = self._entries, []
        told: Sequence[JsonObject] = chat_logprobs(entries)["content"]
        return told

    def _frames(self) -> bytes:
        events = self._writer.take_events()
        return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events])

    def _usage(self) -> dict[str, Any]:
        output, choice = self._output, self._choice
        assert output is not None, "an answer has its usage when it is complete"
        num_input, num_output = output.num_prompt_tokens, output.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {
                "reasoning_tokens": choice.num_reasoning_tokens if choice.has_thoughts else 0,
            },
            "total_tokens": num_input + num_output,
        }
