"""Outputs of an engine, of a step and of a whole request: plain values that may cross threads.

Structs rather than dataclasses: one ``TokenOutput`` is made per token, and msgspec makes it in a fifth of the time.
Array-like, because the same struct is what a device worker sends: names of fields would be most of its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.core.request import FinishReason
from lockstep.core.step import StepPlan
from lockstep.errors import LockstepError
from lockstep.executors.logits import TokenLogprobs


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """One of the ``n`` answers, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    reasoning: str = ""
    """Thoughts before the text; empty where the request did not ask to keep them apart."""


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a request in seconds, measured at engine steps."""

    queue_s: float
    """Submission to the first step that computed one of its tokens."""
    ttft_s: float | None
    """Submission to the first token; None: there was none."""
    total_s: float


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of an answer, where another server counted them and their ids are not known here."""

    num_prompt_tokens: int
    num_output_tokens: int


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """The whole answer to a request."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    """Prompt tokens of the first sequence that came from the prefix cache."""
    num_preemptions: int
    timings: Timings
    error: LockstepError | None = None
    embedding: npt.NDArray[np.float32] | None = None
    """[hidden_size], not normalised, of a request with ``pooling``."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token where they were requested; None for the first, which nothing precedes."""
    counted: TokenCounts | None = None
    """Not None: all token ids are empty, and this is how many there were."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text if self.completions else ""

    @property
    def reasoning(self) -> str:
        """Thoughts of the first completion."""
        return self.completions[0].reasoning if self.completions else ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) if self.counted is None else self.counted.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        if self.counted is not None:
            return self.counted.num_output_tokens
        return sum(len(completion.token_ids) for completion in self.completions)


class CallPart(msgspec.Struct, frozen=True, array_like=True):
    """News of one function call, from a server that tells calls from content itself."""

    index: int
    """Number of the call, in order."""
    arguments: str
    """A fragment; together they are JSON text of an object."""
    id: str | None = None
    """On a call's first part, as is `name`."""
    name: str | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens and text of one sequence in one step; the last one of a sequence carries its finish reason."""

    request_id: int
    index: int
    """Number of the completion, of ``n``."""
    token_ids: tuple[int, ...]
    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The end token or stop string that ended it."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: LockstepError | None = None
    request: RequestOutput | None = None
    """On a request's very last output: the whole answer."""
    reasoning: str = ""
    """New thoughts; never half a tag."""
    calls: tuple[CallPart, ...] = ()
    """Never from an engine, whose calls are text."""

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """Begin of a request's computation."""

    request_id: int
    seq_id: int
    """Its first sequence in the scheduler, and in recordings."""
    step: int
    queue_s: float
    """Submission to the begin of that step."""


class WaitReason(msgspec.Struct, frozen=True, array_like=True):
    """Reason for which a request was passed over."""

    request_id: int
    limit: str
    """Name of a `lockstep.core.step.Limit`, or of a wait that is not the planner's."""
    used: int = 0
    most: int = 0
    needed: int = 0
    num_others: int = 0
    """Requests that the limit is about; which ones is not for everybody to know."""


class Published(NamedTuple):
    """Everything that an engine has for its callers, of all their requests, since it was taken last."""

    accepted: list[int]
    """Requests that got their place in the queue."""
    outputs: list[TokenOutput]
    started: list[Started]
    waits: list[WaitReason]


class StepOutputs(NamedTuple):
    """Plan and outputs of one step of an engine."""

    plan: StepPlan | None
    """None: there was nothing to compute."""
    outputs: list[TokenOutput]
    """Outputs of every request, with a callback or without; also of those that it aborted, refused or found
    past their deadline."""
