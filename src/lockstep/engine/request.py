"""Generation requests: define the one type that the HTTP server, the cluster, the worker and the engine pass on.

A layer that adds something (the model, the prompt's tokens, the remaining time) passes on a copy with that field
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from lockstep.artifacts.task import Pooling
from lockstep.core.request import Priority
from lockstep.engine.output_rules import Reasoning
from lockstep.executors.sampling_params import SamplingParams

DEFAULT_MAX_ACTIVE_SESSIONS = 16
"""Maximum number of sessions per owner whose blocks stay on the device."""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that is rendered with the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in OpenAI's format, text only."""
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Additional template variables, such as ``tools`` and ``enable_thinking``."""
    reasoning: str = "auto"
    """``auto`` separates reasoning from content if the template has tags for it; ``off`` never does."""
    add_generation_prompt: bool = True
    """True to end the prompt with the start of an assistant message."""
    continue_final: bool = False
    """True to end the prompt with the content of the last message, which the answer continues."""


Prompt = str | Sequence[int] | Conversation
TextRole = Literal["query", "document"]
"""Role of a text in a score by an embedding model, and name of the model's prompt for it."""


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to an engine, or to a cluster of models."""

    prompt: Prompt
    """A text, which is tokenised with the model's special tokens; token ids, which are used unchanged; or a
    conversation."""
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = Priority.NORMAL
    """Priority in the queue; a lower number is served first."""
    tenant: str = ""
    """Tenant whose share the request counts against with ``order="fair"``."""
    cache_salt: str = ""
    """Requests share prefix-cache blocks only with requests of the same salt."""
    deadline_s: float | None = None
    """Seconds from submission after which the request ends with ``deadline``."""
    queue_deadline_s: float | None = None
    """Seconds from submission after which it ends with ``deadline`` if none of its tokens was computed."""
    reasoning: Reasoning | None = None
    """Reasoning tags that separate reasoning from content; None: everything is content, except in a conversation, which
    has its own setting. Stop strings apply only to content."""
    pooling: Pooling | Literal["model", "score"] | None = None
    """Pooling of an embedding request, whose answer is one vector of the prompt's hidden states and no text, and whose
    ``params`` are unused; ``model``: the pooling that the model's files describe, else the mean; ``score``: the value
    of a classifier for a pair of texts, as `engine.scoring` requests it. None: no pooling."""
    logit_ids: tuple[int, ...] = ()
    """Tokens whose logits after the prompt are the answer, as one vector, in place of text; empty: none. ``params`` are
    unused."""
    document: str | None = None
    """Document of a request for a score, whose prompt is a query, as text. The answer is the vector from which
    `engine.scoring` computes how relevant the document is to it. None: no score."""
    max_document_tokens: int | None = None
    """Number of first tokens that are read of the document, or of the text of an embedding request; None: all."""
    instruction: str | None = None
    """What relevance means, for a model that scores documents by an answer; None: its default."""
    num_lasting_tokens: int = 0
    """Number of first prompt tokens with which the next turn of the conversation will begin as well; 0: unknown."""
    prompt_name: str | None = None
    """Name of one of the model's prompts, which is put before the text of an embedding request; empty: no prompt;
    None: the model's default prompt."""
    text_role: TextRole | None = None
    """Role of the text of an embedding request in a score, which replaces ``prompt_name``: the model's prompt of this
    name is put before the text, and no prompt if the model has none of this name. None: ``prompt_name`` holds."""
    shown_specials: tuple[str, ...] = ()
    """Special tokens whose text is part of the answer, e.g. those of tool calls. Other special tokens are skipped."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned for each prompt token, in addition to its own.
    With a number, the prefix cache is not read; None: no log-probabilities."""
    session_id: str | None = None
    """Session id. The prompt's full blocks stay on the device for the session's next request; see `engine.sessions`.
    None: no session."""
    session_owner: str = ""
    """Owner of the session, if several owners share an engine. Sessions of different owners are separate and are
    counted separately. In a request to a cluster this is the caller; the cluster passes the model to the engine."""
    max_active_sessions: int = DEFAULT_MAX_ACTIVE_SESSIONS
    """Maximum number of its owner's sessions on the device, including this one."""
    truncate_prompt_tokens: int | None = None
    """Number of last prompt tokens to keep; -1: as many as the context holds besides the output tokens."""
    cuts_to_context: bool = False
    """True: reduce ``max_tokens`` to what the context leaves after the prompt. False: reject a request that does not
    fit."""
    external_id: str = ""
    """The caller's id of the request, from ``x-request-id``. It affects no decision and is recorded."""
    segment: str = ""
    """The caller's label for a part of the traffic. It affects no decision and is recorded."""
    adapter: str = ""
    """Name of the adapter with which the request is computed, as it is known to the engine; empty: none."""
    model: str | None = None
    """The requested model name; None: the default model for requests without a name. An engine has one model."""

    @property
    def gives_vector(self) -> bool:
        """True if the answer is a vector and no text."""
        return self.pooling is not None or bool(self.logit_ids) or self.document is not None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of a prompt that is tokenised."""
        assert not isinstance(self.prompt, str | Conversation), "the prompt is tokenised"
        return tuple(self.prompt)
