"""Flags that name LoRA adapters: `--lora-modules NAME=PATH`, in the forms that vLLM accepts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lockstep.engine.options import AdapterSource
from lockstep.errors import UsageError
from lockstep.spelling import listed

FLAG = "--lora-modules"


class _Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


def adapters_of(values: Sequence[str] | None, bases: Sequence[str] = ()) -> tuple[AdapterSource, ...]:
    """Read the values of the flag.

    Args:
        bases: names of the adapters' model, of which ``base_model_name`` must be one; empty: it may be any.

    Raises:
        UsageError: a value is neither ``NAME=PATH`` nor JSON with ``name`` and ``path``, a name occurs twice, or an
            adapter is declared for another model.
    """
    found: dict[str, AdapterSource] = {}
    for value in values or ():
        if value.startswith("{"):
            try:
                module = msgspec.json.decode(value, type=_Module)
            except msgspec.DecodeError as error:
                raise UsageError(f'{FLAG}: {error}; it must be NAME=PATH or {{"name": …, "path": …}}') from None
            name, path, base = module.name, module.path, module.base_model_name
            if base is not None and bases and base not in bases:
                raise UsageError(
                    f"{FLAG}: base_model_name of {name!r} is {base!r}; this server's model is {listed(bases, 'or')}: "
                    "leave it out, or add this name with --served-model-name"
                )
        else:
            name, _, path = value.partition("=")
        if not name.strip() or not path.strip():
            raise UsageError(f"{FLAG} is {value!r}; it must be NAME=PATH, e.g. billing=adapters/billing")
        if name in found:
            raise UsageError(f"{FLAG} names {name!r} twice; a name has one adapter")
        found[name] = AdapterSource(name, path)
    return tuple(found.values())
