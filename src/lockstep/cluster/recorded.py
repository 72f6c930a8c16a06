"""Recorded models: answer requests with recorded answers, token by token, with the same events as a live model.

Nothing is computed. Conversations are rendered and tokenised with the recorded template and vocabulary, so that a
prompt is found by its tokens. Stop strings and limits of the new request apply to the recorded tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.cluster.base import Accepted, EventStream, Health
from lockstep.cluster.manifest import ModelEntry, Remote, Tier
from lockstep.cluster.prompt_tokeniser import PromptTokeniser
from lockstep.cluster.recorded_index import ENDS, AnswerQuery, Match, RecordedIndex
from lockstep.core.request import FinishReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.token_replay import TokenReplay
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    LockstepError,
    NotRecordedError,
    RequestFailedError,
    UnavailableError,
)
from lockstep.system import SYSTEM, System
from lockstep.worker.flight.content import parameters_as_bytes

SCHEME = "recorded://"
US = 1e-6


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Tokenizer and context length of a recorded model."""

    tokenizer: Tokenizer
    max_model_len: int


class RecordedModel:
    """One model of a recording. Used from one event loop.

    Args:
        name: name in requests.
        index: recorded answers of the model.
        speed: factor by which recorded times are divided; 0: answers are not delayed.
        is_strict: a request must match a recorded one in prompt, parameters and seed.
        system: clock, and threads that tokenise long prompts.
    """

    status = "resident"
    """State shown in snapshots: the model answers at once."""

    def __init__(
        self,
        name: str,
        text: RecordedText,
        index: RecordedIndex,
        speed: float = 1.0,
        *,
        is_strict: bool = False,
        system: System = SYSTEM,
    ) -> None:
        self.name = name
        self.text = text
        self.index = index
        self._speed = speed
        self._is_strict = is_strict
        self._clock = system.now_s
        self._prompts = PromptTokeniser(system)
        self._open: dict[asyncio.Future[None], None] = {}
        """Calls in progress; an exception set on a future ends its call with that error."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    def health(self) -> Health:
        return Health(True, "")

    async def stream(self, call: GenerationRequest) -> EventStream:
        """Answer a call; see `lockstep.cluster.cluster.Cluster.stream`.

        Raises:
            NotRecordedError: no recorded request matches.
            InvalidParameterError: log-probabilities or embeddings were requested, which are not recorded.
            DeadlineError: the call's deadline has passed, or had passed in the recording.
            RequestFailedError: the recorded answer failed, or its client disconnected.
        """
        began_s = self._clock()
        _check_recordable(call)
        call = await self._prompts.tokenised(self.tokenizer, self.text.max_model_len, call)
        match = self._match(call)
        answer, scale = match.answer, US / self._speed if self._speed else 0.0
        replay = TokenReplay(
            self.tokenizer,
            call,
            self.text.max_model_len,
            began_s,
            queue_s=answer.queue_us * scale,
            num_cached_tokens=answer.num_cached_tokens,
            num_preemptions=answer.num_preemptions,
        )
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[ended] = None
        try:
            yield (Accepted(self.name, call.prompt_ids, recorded=_described(match)),)
            given = [0] * len(answer.sequences)
            for at_us, index, num_tokens in answer.deliveries:
                sequence, first = answer.sequences[index], given[index]
                given[index] = first + num_tokens
                if index >= call.params.n:
                    continue
                await self._wait_until(began_s + at_us * scale, ended, call, began_s)
                is_last = given[index] == len(sequence.tokens) and sequence.reason in ENDS
                outputs = replay.append(
                    index,
                    sequence.tokens[first : given[index]],
                    sequence.reason if is_last else None,
                    self._clock(),
                )
                if outputs:
                    yield outputs
                if replay.is_complete:
                    return
            raise _recorded_error(match)
        finally:
            del self._open[ended]
            ended.cancel()

    def abort_all(self, error: LockstepError) -> None:
        """End every open call with this error."""
        for ended in self._open:
            if not ended.done():
                ended.set_exception(error)

    async def close(self) -> None:
        """End open calls."""
        self.abort_all(UnavailableError("the server is closing"))

    def _match(self, call: GenerationRequest) -> Match:
        query = AnswerQuery(call.prompt_ids, parameters_as_bytes(call), call.params.n, call.params.seed)
        match = self.index.find(query, is_strict=self._is_strict)
        if match is not None:
            return match
        least, most = self.index.lengths
        what = "this prompt, parameters and seed" if self._is_strict else "this prompt or a prefix of it"
        raise NotRecordedError(
            f"no recorded request of {self.name} has {what}: the prompt has {len(call.prompt_ids)} tokens; "
            f"recorded are {self.index.num_prompts:,} prompts of {least:,} to {most:,} tokens; record the request with "
            "`lockstep serve --trace DIR --trace-content`" + (", or leave --strict out" if self._is_strict else ""),
            param="prompt",
        )

    async def _wait_until(
        self, due_s: float, ended: asyncio.Future[None], call: GenerationRequest, began_s: float
    ) -> None:
        """Wait until a recorded time.

        Raises:
            DeadlineError: the call's deadline comes first.
            LockstepError: the call was ended with this error.
        """
        last_s = due_s if call.deadline_s is None else min(due_s, began_s + call.deadline_s)
        await asyncio.wait((ended,), timeout=max(0.0, last_s - self._clock()))
        if ended.done():
            ended.result()
        if last_s < due_s:
            raise DeadlineError(f"the answer was not complete within {call.deadline_s:g} s")


class RecordedBackend:
    """Backend that serves all of a manifest's models from a recording, whatever their sources.

    Args:
        models: recorded models by name.
        other: builds the model for a name that no recorded request has.
    """

    def __init__(self, models: Mapping[str, RecordedModel], other: Callable[[str], RecordedModel]) -> None:
        self._models = models
        self._other = other

    def __str__(self) -> str:
        return "recorded"

    def model(self, entry: ModelEntry) -> RecordedModel:
        """Recorded model that serves an entry."""
        return self._models.get(entry.id) or self._other(entry.id)

    def served(self, entry: ModelEntry) -> ModelEntry:
        """Entry of a manifest, changed to be served from the recording."""
        source = f"{SCHEME}{entry.id}"
        return replace(entry, source=source, tier=Tier.REMOTE, remote=Remote(source), max_active_sessions=None)


def _check_recordable(call: GenerationRequest) -> None:
    wanted = {
        "logprobs": call.params.logprobs is not None,
        "prompt_logprobs": call.prompt_logprobs is not None,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        raise InvalidParameterError(f"{name}: a recording has no log-probabilities; leave it out", param=name)
    if call.pooling is not None:
        raise InvalidParameterError("a recording has no embeddings; use a live server", param="input")


def _described(match: Match) -> str:
    how = "exact" if match.is_exact else "prefix"
    return f"{how}; request={match.answer.name}; tokens={match.num_prompt_tokens}"


def _recorded_error(match: Match) -> LockstepError:
    """Error of a recorded answer that did not end normally."""
    reasons = [sequence.reason for sequence in match.answer.sequences]
    what = f"the recorded answer to {match.answer.name}"
    if FinishReason.DEADLINE in reasons:
        return DeadlineError(f"{what} ended here at its deadline")
    if FinishReason.ABORT in reasons:
        return RequestFailedError(f"{what} ended here: its client disconnected, or it was aborted")
    return RequestFailedError(f"{what} ended here with an error")
