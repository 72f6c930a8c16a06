"""Generation requests: one type from the HTTP server, through the cluster and a worker's messages, to the engine.

Whoever learns something on the way (which model answers, the prompt's tokens, the time that is left) passes on a copy
with that field replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lockstep.core.request import Priority
from lockstep.engine.output_rules import Pooling, Reasoning
from lockstep.errors import InvalidParameterError
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
    """Whose session it is, where several share an engine: sessions of different owners are apart, and counted apart."""
    max_active_sessions: int = DEFAULT_MAX_ACTIVE_SESSIONS
    """Sessions of its owner that the device keeps, this one included."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt; -1: as many as the context holds beside the tokens of output."""
    model: str | None = None
    """The served name that a cluster is asked for; None: whoever takes requests without a name. An engine has one
    model."""


ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 16_384
MAX_CONTENT_PARTS = 4_096


def checked_messages(messages: object, *, knows_developer: bool) -> list[dict[str, object]]:
    """Copies of the messages in the form that templates expect.

    Content becomes one string: text parts are joined by newlines, as vLLM does, and an absent content is empty.
    Arguments of tool calls become objects. `developer` becomes `system` unless the template knows it.

    Raises:
        InvalidParameterError: `param` names the place, e.g. ``messages[2].content``.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, (list, Sequence)):
        raise _wrong("messages", messages, "a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidParameterError(
            f"messages has {len(messages)} entries; it must have 1..{MAX_MESSAGES}", param="messages"
        )
    return [_checked(message, f"messages[{index}]", knows_developer) for index, message in enumerate(messages)]


def _checked(message: object, where: str, knows_developer: bool) -> dict[str, object]:
    if not isinstance(message, (dict, Mapping)):
        raise _wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    checked: dict[str, object] = {str(key): value for key, value in message.items()}
    checked["role"] = "system" if role == "developer" and not knows_developer else role
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    may_be_absent = role == "assistant" and (bool(calls) or bool(message.get("reasoning_content")))
    checked["content"] = _content(message.get("content"), f"{where}.content", may_be_absent)
    return checked


def _content(content: object, where: str, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _wrong(where, content, "a string or a list of text parts")
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidParameterError(
            f"{where} has {len(content)} parts; it must have at most {MAX_CONTENT_PARTS}", param=where
        )
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text"), str):
        return text
    raise _wrong(where, part, 'a text part, {"type": "text", "text": "..."}; other kinds are not served')


def _tool_calls(calls: object, where: str) -> list[object]:
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise _wrong(where, calls, "a list of tool calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(where, call, "an object with function.name and function.arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):  # no JSON, or more nested than the parser goes
            arguments = None
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.function.arguments", function.get("arguments"), "a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _wrong(where: str, value: object, right: str) -> InvalidParameterError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return InvalidParameterError(f"{where} is {shown}; it must be {right}", param=where)
