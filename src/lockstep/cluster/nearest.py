"""Dispatch by nearest examples: an embedding model turns the message into a vector, and the model with the most similar
example answers. Pure.

The similarity is the cosine of two vectors, computed by the native library, so that a message has the same scores on
every machine. Of equal scores, the model that is named first wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from lockstep.cluster.dispatch import NearestRule as NearestRule
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest, Prompt
from lockstep.errors import DeadlineError, InvalidParameterError
from lockstep.executors.row_math import row_math
from lockstep.executors.sampling_params import SamplingParams

Vector = npt.NDArray[np.float32]
Scores = tuple[tuple[str, float], ...]
"""Best cosine of each model's examples, in order of definition."""
MAX_EXAMPLES = 1_024
"""Maximum number of examples of a rule, all models together. Each is compared with every message."""


@dataclass(frozen=True, slots=True)
class NearestDecision:
    """Decision for one message."""

    target: str | None
    """Id of the model with the most similar example; None: no example is similar enough."""
    scores: Scores


def decide(rule: NearestRule, examples: Sequence[Vector], message: Vector) -> NearestDecision:
    """Decide which model answers a message.

    Args:
        examples: vectors of ``rule.texts``, in order.
        message: vector of the message.
    """
    cosines = iter(_cosines(examples, message))
    scores = tuple((id_, max(next(cosines) for _ in texts)) for id_, texts in rule.examples.items())
    best = max(scores, key=lambda each: each[1])  # the first of equal ones
    is_similar = rule.min_score is None or best[1] >= rule.min_score
    return NearestDecision(best[0] if is_similar else None, scores)


def _cosines(examples: Sequence[Vector], message: Vector) -> list[float]:
    """Cosine of each example and the message, with the bits of `engine.scoring.cosine`. The event loop waits for it, so
    all lengths are computed at once."""
    math = row_math()
    *units, other = math.unit(np.stack([*examples, message]))
    wide = other.astype(np.float64)
    return [math.total(unit * wide) for unit in units]


def embedding_of(text: str, entry: str, call: GenerationRequest) -> GenerationRequest:
    """Request for the vector of a text, with the caller and the deadlines of a call."""
    return replace(
        call,
        model=entry,
        prompt=text,
        params=SamplingParams(),
        pooling="model",
        truncate_prompt_tokens=-1,
        prompt_logprobs=None,
        shown_specials=(),
        session_id=None,
    )


def message_of(prompt: Prompt) -> str:
    """Text that decides: the last message of a user, or the whole prompt.

    Raises:
        InvalidParameterError: the prompt has no text.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Conversation):
        for message in reversed(prompt.messages):
            if message.get("role") == "user" and isinstance(content := message.get("content"), str) and content:
                return content
    raise InvalidParameterError(
        "the request has no text of a user by which it could be routed; name a model, or send text", param="messages"
    )


def answer_with_vector(outputs: Sequence[TokenOutput]) -> tuple[RequestOutput, Vector]:
    """Return the whole answer to an embedding request, and its vector.

    Raises:
        LockstepError: the request ended with an error, or before its vector was complete.
    """
    answer = outputs[-1].request
    assert answer is not None, "the last output of a stream has the whole answer"
    if answer.error is not None:
        raise answer.error
    if answer.embedding is None:
        raise DeadlineError("the message could not be embedded before the request's deadline")
    return answer, answer.embedding
