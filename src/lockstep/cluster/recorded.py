"""Recorded models: names whose requests get recorded answers again, token by token, behind the events of a live one.

Nothing is computed. Conversations are rendered and tokenised with the recorded template and vocabulary, so that a
prompt is found by its tokens; rules of the request that asks (stop strings, limits) hold for the tokens that come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.cluster.base import Accepted, EventStream, Health
from lockstep.cluster.manifest import Entry, Remote, Tier
from lockstep.cluster.prompt_tokeniser import PromptTokeniser
from lockstep.cluster.recorded_index import ENDS, Match, RecordedIndex, Wish
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
from lockstep.worker.flight.content import parameters_as_bytes

SCHEME = "recorded://"
US = 1e-6


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Text side of a recorded model, and the context that it had."""

    tokenizer: Tokenizer
    max_model_len: int


class RecordedModel:
    """One model of a recording. Used from one event loop.

    Args:
        name: as requests call it.
        index: its answers.
        speed: divides recorded times; 0: nothing is waited for.
        is_strict: a request has to be a recorded one, prompt, parameters and seed.
        clock: seconds.
    """

    status = "resident"
    """The state that it is shown in: it answers at once."""

    def __init__(
        self,
        name: str,
        text: RecordedText,
        index: RecordedIndex,
        speed: float = 1.0,
        *,
        is_strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.text = text
        self.index = index
        self._speed = speed
        self._is_strict = is_strict
        self._clock = clock
        self._prompts = PromptTokeniser()
        self._open: dict[asyncio.Future[None], None] = {}
        """Calls that are being answered; who sets an exception ends one with it."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    def health(self) -> Health:
        return Health(True, "")

    async def stream(self, call: GenerationRequest) -> EventStream:
        """Answer a call, as `lockstep.cluster.cluster.Cluster.stream`.

        Raises:
            NotRecordedError: no recorded request fits.
            InvalidParameterError: log-probabilities or embeddings, which are not recorded.
            DeadlineError: the call's time is up, or it was when it was recorded.
            RequestFailedError: the recorded answer failed, or its client left.
        """
        began_s = self._clock()
        _check_recordable(call)
        call = await self._prompts.tokenised(self.tokenizer, self.text.max_model_len, call)
        prompt_ids: tuple[int, ...] = tuple(call.prompt)  # type: ignore[arg-type]  # tokens by now
        match = self._match(call, prompt_ids)
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
            yield (Accepted(self.name, prompt_ids, recorded=_described(match)),)
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
            raise _as_it_ended(match)
        finally:
            del self._open[ended]
            ended.cancel()

    def abort_all(self, error: LockstepError) -> None:
        """End every open call with this error."""
        for ended in self._open:
            if not ended.done():
                ended.set_exception(error)

    async def close(self) -> None:
        """End what is open."""
        self.abort_all(UnavailableError("the server is closing"))

    def _match(self, call: GenerationRequest, prompt_ids: tuple[int, ...]) -> Match:
        wish = Wish(prompt_ids, parameters_as_bytes(call), call.params.n, call.params.seed)
        match = self.index.find(wish, is_strict=self._is_strict)
        if match is not None:
            return match
        least, most = self.index.lengths
        what = "this prompt, parameters and seed" if self._is_strict else "this prompt, or a beginning of it"
        raise NotRecordedError(
            f"no recorded request of {self.name} has {what}: it has {len(prompt_ids)} tokens, and recorded are "
            f"{self.index.num_prompts:,} prompts of {least:,} to {most:,}; record such a request with "
            "`lockstep serve --trace DIR --trace-content`" + (", or leave --strict out" if self._is_strict else ""),
            param="prompt",
        )

    async def _wait_until(
        self, due_s: float, ended: asyncio.Future[None], call: GenerationRequest, began_s: float
    ) -> None:
        """Wait for a recorded moment.

        Raises:
            DeadlineError: the call's deadline comes before it.
            LockstepError: what ended the call.
        """
        last_s = due_s if call.deadline_s is None else min(due_s, began_s + call.deadline_s)
        await asyncio.wait((ended,), timeout=max(0.0, last_s - self._clock()))
        if ended.done():
            ended.result()
        if last_s < due_s:
            raise DeadlineError(f"the answer was not complete within {call.deadline_s:g} s")


class RecordedBackend:
    """Backend of a manifest's models: all of them recorded, whatever their sources are.

    Args:
        models: by name.
        other: makes the model of a name that no recorded request had.
    """

    def __init__(self, models: Mapping[str, RecordedModel], other: Callable[[str], RecordedModel]) -> None:
        self._models = models
        self._other = other

    def __str__(self) -> str:
        return "recorded"

    def model(self, entry: Entry) -> RecordedModel:
        """The model of an entry as this backend serves it."""
        return self._models.get(entry.id) or self._other(entry.id)

    def served(self, entry: Entry) -> Entry:
        """An entry of a manifest, answered by the recording."""
        source = f"{SCHEME}{entry.id}"
        return replace(entry, source=source, tier=Tier.REMOTE, remote=Remote(source), max_active_sessions=None)


def _check_recordable(call: GenerationRequest) -> None:
    wanted = {
        "logprobs": call.params.logprobs is not None,
        "prompt_logprobs": call.prompt_logprobs is not None,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        raise InvalidParameterError(
            f"{name}: a recording has tokens and no log-probabilities; leave it out", param=name
        )
    if call.pooling is not None:
        raise InvalidParameterError("a recording has no embeddings; ask a server that computes", param="input")


def _described(match: Match) -> str:
    how = "exact" if match.is_exact else "prefix"
    return f"{how}; request={match.answer.name}; tokens={match.num_prompt_tokens}"


def _as_it_ended(match: Match) -> LockstepError:
    """The error of a recorded answer that has none of the good ends."""
    reasons = [sequence.reason for sequence in match.answer.sequences]
    what = f"the recorded answer to {match.answer.name}"
    if FinishReason.DEADLINE in reasons:
        return DeadlineError(f"{what} ended here: its time was up")
    if FinishReason.ABORT in reasons:
        return RequestFailedError(f"{what} ends here: its client left, or it was aborted")
    return RequestFailedError(f"{what} ended here with an error")
