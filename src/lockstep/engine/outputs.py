"""Outputs of an engine: defines the outputs of steps and requests as plain values that may be passed between threads.

They are structs rather than dataclasses because one ``TokenOutput`` is created per token, and msgspec creates it in a
fifth of the time. They are array-like because a device worker sends the same structs, and field names would be most of
its bytes.
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
    """One of the ``n`` answers, complete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    reasoning: str = ""
    """Reasoning before the text; empty if the request did not separate it."""


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Durations of a request in seconds, measured at engine steps."""

    queue_s: float
    """Time from submission to the first step that computed one of its tokens."""
    ttft_s: float | None
    """Time from submission to the first token; None: there was none."""
    total_s: float


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of an answer from another server, whose token ids are not known here."""

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
    """Vector of an embedding request: [hidden_size], not normalised."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token if requested. The first token has none."""
    counted: TokenCounts | None = None
    """Token counts if all token ids are empty; None: the ids are given."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text if self.completions else ""

    @property
    def reasoning(self) -> str:
        """Reasoning of the first completion."""
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
    """New part of one function call, from a server that separates calls from content itself."""

    index: int
    """Number of the call, in order."""
    arguments: str
    """A fragment. All fragments together are a JSON object."""
    id: str | None = None
    """Set only in the first part of a call, like `name`."""
    name: str | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens and text of one sequence in one step. The last output of a sequence has its finish reason."""

    request_id: int
    index: int
    """Number of the completion, of ``n``."""
    token_ids: tuple[int, ...]
    text: str
    """New text. May be empty while a character or a possible stop string is incomplete."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The end token or stop string that ended the sequence."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: LockstepError | None = None
    request: RequestOutput | None = None
    """The whole answer, only in a request's last output."""
    reasoning: str = ""
    """New reasoning text; never part of a tag."""
    calls: tuple[CallPart, ...] = ()
    """Parts of function calls. Always empty from an engine, whose calls are text."""

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """Start of a request's computation."""

    request_id: int
    seq_id: int
    """Id of its first sequence in the scheduler and in recordings."""
    step: int
    queue_s: float
    """Time from submission to the start of that step."""


class WaitReason(msgspec.Struct, frozen=True, array_like=True):
    """Reason for which a waiting request was passed over."""

    request_id: int
    limit: str
    """Name of a `lockstep.core.step.Limit`, or of a reason outside of the planner."""
    used: int = 0
    most: int = 0
    needed: int = 0
    num_others: int = 0
    """Number of other requests that the limit involves. Their ids are not included, since clients may not see them."""


class Published(NamedTuple):
    """Everything that an engine has published for all of its requests since the last `Engine.take`."""

    accepted: list[int]
    """Requests that entered the queue."""
    outputs: list[TokenOutput]
    started: list[Started]
    waits: list[WaitReason]


class StepOutputs(NamedTuple):
    """Plan and outputs of one step of an engine."""

    plan: StepPlan | None
    """Plan of the step; None: there was nothing to compute."""
    outputs: list[TokenOutput]
    """Outputs of every request, with or without a callback, including requests that the step aborted, rejected or ended
    for their deadline."""
