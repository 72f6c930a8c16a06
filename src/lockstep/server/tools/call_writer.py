"""Text of past calls in a format, for models whose templates show functions but do not write calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.server.tools.call_formats import CallFormat, CallKind, LiteralSyntax

_PYTHON_WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}


def calls_text(call_format: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Names and arguments of calls as a model of the format writes them."""
    form = call_format
    texts = [_call(form, name, arguments) for name, arguments in calls]
    if form.each:
        return form.layout.join(f"{form.begin}{form.layout}{text}{form.layout}{form.close}" for text in texts)
    written = form.separator.join(texts)
    return f"{form.begin}{form.open}{form.layout}{written}{form.layout}{form.close}{form.end}"


def _call(form: CallFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if form.kind is CallKind.NAMED:
        return f"{name}{form.arguments_marker}{_json(arguments)}"
    if form.kind is CallKind.TAGGED:
        values = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
        pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<function={name}>\n{pairs}</function>"
    if form.syntax is None:
        return _json({"name": name, form.key: arguments})
    syntax = form.syntax
    written = syntax.separator.join(
        f"{key}{syntax.assign}{_literal(value, syntax)}" for key, value in arguments.items()
    )
    return f"{syntax.prefix}{name}{syntax.open}{written}{syntax.close}"


def _literal(value: object, syntax: LiteralSyntax) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{syntax.separator.join(_literal(item, syntax) for item in value)}]"
    if isinstance(value, Mapping):
        assign = ":" if syntax.has_bare_keys else ": "
        keys = {key: key if syntax.has_bare_keys else _json(key) for key in value}
        pairs = (f"{keys[key]}{assign}{_literal(item, syntax)}" for key, item in value.items())
        return f"{{{syntax.separator.join(pairs)}}}"
    if isinstance(value, str) and not syntax.has_escapes:
        return f"{syntax.quotes[0]}{value}{syntax.quotes[0]}"
    text = _json(value)
    return text if syntax.has_bare_keys else _PYTHON_WORDS.get(text, text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
