"""Flags that name LoRA adapters: `--lora-modules NAME=PATH`, in the forms that vLLM accepts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lockstep.engine.options import AdapterSource
from lockstep.errors import UsageError

FLAG = "--lora-modules"


class _Module(msgspec.Struct, frozen=True):
    """An adapter in vLLM's JSON form."""

    name: str
    path: str
    base_model_name: str | None = None


def separated(argv: Sequence[str]) -> list[str]:
    """Repeat the flag before each further value, since vLLM allows several after one flag."""
    words: list[str] = []
    is_after = False
    for word in argv:
        if is_after and words[-1] != FLAG and not word.startswith("-") and _is_module(word):
            words.append(FLAG)
        elif words and words[-1] != FLAG:
            is_after = False
        is_after = is_after or word == FLAG
        words.append(word)
    return words


def _is_module(word: str) -> bool:
    return "=" in word or word.startswith("{")


def adapters_of(values: Sequence[str] | None) -> tuple[AdapterSource, ...]:
    """Read the values of the flag.

    Raises:
        UsageError: a value is neither ``NAME=PATH`` nor JSON with ``name`` and ``path``, or a name occurs twice.
    """
    found: dict[str, AdapterSource] = {}
    for value in values or ():
        if value.startswith("{"):
            try:
                module = msgspec.json.decode(value, type=_Module)
            except msgspec.DecodeError as error:
                raise UsageError(f'{FLAG}: {error}; it must be NAME=PATH or {{"name": …, "path": …}}') from None
            name, path = module.name, module.path
        else:
            name, _, path = value.partition("=")
        if not name.strip() or not path.strip():
            raise UsageError(f"{FLAG} is {value!r}; it must be NAME=PATH, e.g. billing=adapters/billing")
        if name in found:
            raise UsageError(f"{FLAG} names {name!r} twice; a name has one adapter")
        found[name] = AdapterSource(name, path)
    return tuple(found.values())
