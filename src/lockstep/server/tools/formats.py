"""How families of models write calls: one row each.

Sources: the chat templates of Qwen 2.5 and 3 and Hermes 2 (hermes), of Llama 3.1 and 3.2 (llama3_json), and of Mistral
v0.3 (mistral_list) and Small 3.2 (mistral_named).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls: each as ``{"name": ..., <key>: {...}}``, or as a name, a marker and arguments."""

    name: str
    begin: str
    """The marker that announces calls."""
    close: str = ""
    """What may follow the last call; with `each`, every call."""
    key: str = "arguments"
    open: str = ""
    """What stands between ``begin`` and the first call."""
    between: str = ""
    """What separates calls."""
    each: bool = False
    """Whether every call has its own ``begin`` and ``close``."""
    bare: bool = False
    """Whether an answer may begin with a call and no marker."""
    arguments_marker: str = ""
    """Not empty: a call is written as name, this, arguments."""
    layout: str = ""
    """White space that a forced call has after ``begin`` and before ``close``."""
    has_short_ids: bool = False
    """The template takes ids of 9 letters and digits only."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be seen all the same."""
        return tuple(text for text in (self.begin, self.arguments_marker, self.close) if len(text) > 1)


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", each=True, layout="\n")
"""Also what models are told whose template knows no tools."""
LLAMA3_JSON = CallFormat("llama3_json", "<|python_tag|>", key="parameters", between=";", bare=True)
MISTRAL_LIST = CallFormat("mistral_list", "[TOOL_CALLS]", "]", open="[", between=",", has_short_ids=True)
MISTRAL_NAMED = CallFormat("mistral_named", "[TOOL_CALLS]", arguments_marker="[ARGS]", each=True, has_short_ids=True)

SIGNS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters": ', '{"name": '), LLAMA3_JSON),
)
"""What a template that knows tools must hold, all of it, for a format; the first row that fits."""


def format_of(template: str | None, knows_tools: bool) -> CallFormat:
    """The format that a chat template teaches its model; hermes where it teaches none."""
    if template is None or not knows_tools:
        return HERMES
    return next((row for signs, row in SIGNS if all(sign in template for sign in signs)), HERMES)
