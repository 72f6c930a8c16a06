"""Generation requests: one type from the HTTP server, through the cluster and a worker's messages, to the engine.

A station that adds something (the model that answers, the prompt's tokens, the time that is left) passes on a copy with
that field replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lockstep.core.request import Priority
from lockstep.engine.output_rules import Pooling, Reasoning
from lockstep.executors.sampling_params import SamplingParams

DEFAULT_MAX_ACTIVE_SESSIONS = 16
"""Sessions of one owner whose blocks stay on the device."""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template writes."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI's shape, text only."""
    template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Further variables of the template: ``tools``, ``enable_thinking`` and the like."""
    reasoning: str = "auto"
    """``auto`` keeps thoughts apart where the template has tags for them, ``off`` never does."""
    add_generation_prompt: bool = True
    """The prompt ends with the beginning of an assistant's message."""
    continue_final: bool = False
    """It ends with the content of the last message, and the answer goes on with that."""


Prompt = str | Sequence[int] | Conversation


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to an engine, or to a cluster of models."""

    prompt: Prompt
    """Text, tokenised with the model's special tokens, token ids that are taken as they are, or a conversation."""
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = Priority.NORMAL
    """Lower is served first."""
    tenant: str = ""
    """Whose share this counts against under ``order="fair"``."""
    cache_salt: str = ""
    """Requests share prefix-cache blocks only with requests of the same salt."""
    deadline_s: float | None = None
    """Seconds from submission after which the request ends with ``deadline``."""
    queue_deadline_s: float | None = None
    """Seconds from submission after which it ends with ``deadline`` if none of its tokens was ever computed."""
    reasoning: Reasoning | None = None
    """How thoughts are told from content; None: everything is content, but for a conversation, which says it itself.
    Stop strings look at content only."""
    pooling: Pooling | None = None
    """Not None: the answer is one vector made of the prompt's hidden states, and no text; ``params`` is unused."""
    shown_specials: tuple[str, ...] = ()
    """Special tokens whose text is part of the answer's text; others are skipped. Tool calls are written with some."""
    prompt_logprobs: int | None = None
    """Not None: log-probabilities of the prompt's tokens and of so many most likely ones; the cache is not read."""
    session_id: str | None = None
    """Not None: the prompt's full blocks stay on the device for the session's next request; see `engine.sessions`."""
    session_owner: str = ""
    """Whose session it is, where several share an engine: sessions of different owners are apart, and counted apart. A
    cluster takes its caller here, and tells the engine the model."""
    max_active_sessions: int = DEFAULT_MAX_ACTIVE_SESSIONS
    """Sessions of its owner that the device keeps, this one included."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt; -1: as many as the context holds beside the tokens of output."""
    cuts_to_context: bool = False
    """True: a ``max_tokens`` that the context cannot hold beside the prompt is cut to what the context leaves. False:
    such a request is refused."""
    external_id: str = ""
    """The caller's name for it, as ``x-request-id`` has it; decides nothing, and recordings have it."""
    segment: str = ""
    """The caller's label for the part of the traffic that it belongs to; decides nothing, and recordings have it."""
    model: str | None = None
    """The requested model name; None: the model that takes requests without a name. An engine has
    one model."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of a prompt that is tokenised."""
        assert not isinstance(self.prompt, str | Conversation), "the prompt is tokenised"
        return tuple(self.prompt)
