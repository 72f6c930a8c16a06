"""Tables of docs/gate.md and docs/gate-reference.md, generated from the code that they describe.

    python -m tools.gate_reference          write them
    python -m tools.gate_reference --check  exit code 1 if the documents differ from them

A table follows a line ``<!-- NAME -->`` and ends at the next empty line.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.option_fields import field_docs
from lockstep.release.caveats import WARNINGS
from lockstep.release.formats import FORMATS
from lockstep.release.observation import FIELDS
from lockstep.release.policy import Policy
from lockstep.release.triage import KINDS
from lockstep.release.verdict import Verdict

PAGES = (Path("docs/gate.md"), Path("docs/gate-reference.md"))


def _fields() -> Iterator[str]:
    yield from ("| field | type | |", "|---|---|---|")
    for field in FIELDS:
        yield f"| `{field.name}` | {field.type.lower()} | {field.meaning} |"


def _formats() -> Iterator[str]:
    yield from ("| format | written by | identified by its members |", "|---|---|---|")
    for each in FORMATS:
        yield f"| {each.name} | {each.tool} | {', '.join(f'`{name}`' for name in each.markers)} |"


def _policy() -> Iterator[str]:
    sentences = field_docs(Policy)
    yield from ("| field | default | |", "|---|---|---|")
    for field in dataclasses.fields(Policy):
        default = field.default if field.default is not dataclasses.MISSING else {}
        shown = "null" if default is None else "none" if default in ((), {}) else default
        yield f"| `{field.name}` | {shown} | {sentences[field.name]} |"


def _signals() -> Iterator[str]:
    yield from ("| signal | owner by default | next |", "|---|---|---|")
    for name, kind in KINDS.items():
        yield f"| `{name}` | {kind.owner} | {kind.action} |"


def _warnings() -> Iterator[str]:
    yield from ("| warning | |", "|---|---|")
    for name, meaning in WARNINGS.items():
        yield f"| `{name}` | {meaning} |"


def _verdict() -> Iterator[str]:
    sentences = field_docs(Verdict)
    yield from ("| member | |", "|---|---|")
    for name in Verdict.__struct_fields__:
        yield f"| `{name}` | {sentences.get(name, '')} |"


TABLES = {
    "fields": _fields,
    "formats": _formats,
    "policy": _policy,
    "signals": _signals,
    "warnings": _warnings,
    "verdict": _verdict,
}


def with_tables(text: str) -> str:
    """Document with its current tables."""
    lines = text.split("\n")
    done: list[str] = []
    while lines:
        line = lines.pop(0)
        done.append(line)
        name = line.removeprefix("<!-- ").removesuffix(" -->")
        if line.startswith("<!-- ") and name in TABLES:
            while lines and lines[0].startswith("|"):
                lines.pop(0)
            done += TABLES[name]()
    return "\n".join(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args()
    texts = {page: page.read_text() for page in PAGES}
    if args.check:
        sys.exit(any(with_tables(text) != text for text in texts.values()))
    for page, text in texts.items():
        page.write_text(with_tables(text))


if __name__ == "__main__":
    main()
