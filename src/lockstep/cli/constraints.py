"""The flags that say what an answer must be, and the constraint that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import UsageError
from lockstep.executors.constraint import Constraint

JsonSchema = Annotated[
    str | None, typer.Option(metavar="FILE|JSON", help="The answer is a JSON document that this schema accepts.")
]
Regex = Annotated[str | None, typer.Option(help="The whole answer matches this pattern.")]
Choice = Annotated[list[str] | None, typer.Option(help="The answer is one of these texts; repeat the flag.")]
Grammar = Annotated[Path | None, typer.Option(metavar="FILE", help="The answer is a word of this Lark grammar.")]


def constraint_of(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> Constraint | None:
    """The one constraint that the flags mean, or none.

    Raises:
        UsageError: there are several, or a file cannot be read.
    """
    flags = {"--json-schema": json_schema, "--regex": regex, "--choice": choice or None, "--grammar": grammar}
    given = [name for name, value in flags.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; give one of them")
    if json_schema is not None:
        is_json = json_schema.lstrip().startswith("{")
        return Constraint.json_schema(json_schema if is_json else _read("--json-schema", Path(json_schema)))
    if regex is not None:
        return Constraint.regex(regex)
    if choice:
        return Constraint.choice(choice)
    return None if grammar is None else Constraint.lark(_read("--grammar", grammar))


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error}; give a text file") from None
