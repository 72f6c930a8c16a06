"""Call formats: how each family of models writes calls of functions, one row a family, and the signs by which a chat
template shows its format.

Sources, each a chat template of the family: Qwen 2.5 and 3, Hermes 2, Granite 4 and SmolLM3 with `xml_tools` (hermes);
Llama 3.1 and 3.2 (llama3_json); Mistral v0.3 (mistral_list) and Small 3.2 (mistral_named); Granite 3.3 (granite3);
Firefunction v2, and phi-4-mini with the template that vLLM has for it (functools); Olmo 3.1 Instruct (olmo3); LFM2.5
(lfm2); SmolLM3 with `python_tools` (smollm3_code); Qwen3-Coder, Qwen 3.5 and Nemotron 3 Nano (qwen3_coder); Gemma 4
(gemma4). The templates of phi-4-mini and LFM2 show functions and no calls: their markers are those of the model cards.
FunctionGemma's are in Google's "FunctionGemma formatting and best practices".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class CallKind(Enum):
    """Syntax of a single call."""

    JSON = "json"
    """An object with the name and the arguments."""
    NAMED = "named"
    """The name, a marker, and the arguments as JSON."""
    LITERAL = "literal"
    """The name and each argument as key and literal; `CallFormat.syntax` has the marks."""
    TAGGED = "tagged"
    """XML-like tags of the function and of each parameter, whose values are text."""


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """Marks of a call whose arguments are keys and literals."""

    prefix: str
    """Text before the name."""
    open: str
    close: str
    """Marks around the arguments."""
    assign: str
    """The mark between the key and the value of an argument."""
    separator: str
    """Text between two arguments, as models write it."""
    quotes: tuple[str, ...]
    """Texts that begin and end strings, longer ones first. The first is that of forced calls."""
    has_escapes: bool
    """True if a backslash in a string begins an escape, with Python's meaning."""
    has_bare_keys: bool
    """True if the keys of nested objects may stand without quotes."""


PYTHON = LiteralSyntax("", "(", ")", "=", ", ", ('"""', "'''", '"', "'"), has_escapes=True, has_bare_keys=False)


def _gemma(quote: str) -> LiteralSyntax:
    return LiteralSyntax("call:", "{", "}", ":", ",", (quote,), has_escapes=False, has_bare_keys=True)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    name: str
    begin: str
    """The marker that announces calls."""
    close: str = ""
    """What may follow the last call; with `each`, every call."""
    kind: CallKind = CallKind.JSON
    key: str = "arguments"
    """The key of the arguments in the object of a `CallKind.JSON` call."""
    open: str = ""
    """What stands between ``begin`` and the first call."""
    separator: str = ""
    """What stands between two calls of one list, as models write it; white space alone: each call has its line."""
    end: str = ""
    """A marker that may follow ``close``."""
    each: bool = False
    """Whether every call has its own ``begin`` and ``close``."""
    bare: bool = False
    """Whether an answer may begin with a call and no marker."""
    arguments_marker: str = ""
    """The marker between the name and the arguments of a `CallKind.NAMED` call."""
    id_marker: str = ""
    """A marker that may follow the name, with an id of the model's own."""
    syntax: LiteralSyntax | None = None
    """The marks of a `CallKind.LITERAL` call."""
    layout: str = ""
    """White space that a forced call has after ``begin`` and before ``close``."""
    stop: str = ""
    """A special token that the model writes after its calls, and with which its answer ends."""
    has_short_ids: bool = False
    """The template takes ids of 9 letters and digits only."""

    @property
    def between(self) -> str:
        """The mark that separates calls; empty where white space does."""
        return self.separator.strip()

    @property
    def has_lines(self) -> bool:
        """True if a further call may follow a call without any mark."""
        return bool(self.separator) and not self.between

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be seen all the same."""
        quotes = () if self.syntax is None else self.syntax.quotes
        texts = (self.begin, self.id_marker, self.arguments_marker, *quotes, self.close, self.end)
        return tuple(text for text in texts if len(text) > 1 and not text.startswith(("'", '"')))


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", each=True, layout="\n")
"""Also the instructions for models whose template has no tools."""
LLAMA3_JSON = CallFormat("llama3_json", "<|python_tag|>", key="parameters", separator="; ", bare=True)
MISTRAL_LIST = CallFormat("mistral_list", "[TOOL_CALLS]", "]", open="[", separator=", ", has_short_ids=True)
MISTRAL_NAMED = CallFormat(
    "mistral_named",
    "[TOOL_CALLS]",
    kind=CallKind.NAMED,
    arguments_marker="[ARGS]",
    id_marker="[CALL_ID]",
    each=True,
    has_short_ids=True,
)
GRANITE3 = CallFormat("granite3", "<|tool_call|>", "]", open="[", separator=", ")
PHI4_MINI = CallFormat("phi4_mini", "<|tool_call|>", "]", open="[", separator=", ", end="<|/tool_call|>")
FUNCTOOLS = CallFormat("functools", "functools[", "]", separator=", ")
OLMO3 = CallFormat(
    "olmo3", "<function_calls>", "</function_calls>", kind=CallKind.LITERAL, syntax=PYTHON, separator="\n"
)
LFM2 = CallFormat(
    "lfm2",
    "<|tool_call_start|>",
    "]",
    kind=CallKind.LITERAL,
    syntax=PYTHON,
    open="[",
    separator=", ",
    end="<|tool_call_end|>",
)
SMOLLM3_CODE = CallFormat(
    "smollm3_code", "<code>", "</code>", kind=CallKind.LITERAL, syntax=PYTHON, separator="\n", layout="\n"
)
QWEN3_CODER = CallFormat("qwen3_coder", "<tool_call>", "</tool_call>", kind=CallKind.TAGGED, each=True, layout="\n")
FUNCTION_GEMMA = CallFormat(
    "function_gemma",
    "<start_function_call>",
    "<end_function_call>",
    kind=CallKind.LITERAL,
    syntax=_gemma("<escape>"),
    each=True,
    stop="<start_function_response>",
)
GEMMA4 = CallFormat(
    "gemma4",
    "<|tool_call>",
    "<tool_call|>",
    kind=CallKind.LITERAL,
    syntax=_gemma('<|"|>'),
    each=True,
    stop="<|tool_response>",
)

SIGNS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>", "<tool_call|>"), GEMMA4),
    (("<tool_call>", "<function=", "<parameter="), QWEN3_CODER),
    (("<tool_call>",), HERMES),
    (("<function_calls>", "</functions>"), OLMO3),
    (("<|/tool|>",), PHI4_MINI),
    (("functools[",), FUNCTOOLS),
    (("<|tool_call|>",), GRANITE3),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|tool_call_start|>",), LFM2),
    (("List of tools: ",), LFM2),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters": ', '{"name": '), LLAMA3_JSON),
)
"""Texts that a template with tools must have, all of them, for a format; the first row that fits."""


def format_of(template: str | None, knows_tools: bool) -> CallFormat:
    """The format that a chat template teaches its model; hermes where it teaches none."""
    if template is None or not knows_tools:
        return HERMES
    return next((row for signs, row in SIGNS if all(sign in template for sign in signs)), HERMES)


WORDS: Mapping[str, str] = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
}  # fmt: skip
"""Words that are values: models mix up those of JSON and of Python."""
