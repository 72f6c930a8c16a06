"""Pages of Markdown as what can be run: their fenced blocks, the marks above these, and the commands of a shell block.

A mark is a comment on a line of its own above a block, which no reader sees. CONTRIBUTING.md lists them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "sh", "bash", "console")
DATA = ("json", "yaml", "toml")
OUTPUT = ("text",)
"""Shown, not run; after a mark `prints` it is what the block before it prints."""
LANGUAGES = (*SHELL, "python", *DATA, *OUTPUT)
KINDS = ("slow", "by hand", "first", "example", "prints")
_FENCE = re.compile(r"( *)(`{3,})([\w-]*)$")
_MARK = re.compile(r"<!-- run: (.*?) -->")
_SAID = re.compile(r"([a-z ]+?)(?:: ((?:`[^`]+`(?:, )?)+))?(?:,? because (.+))?")
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")


def pages() -> list[str]:
    """Paths of all pages whose blocks are run, from the repository's root."""
    return [path.relative_to(ROOT).as_posix() for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))]


class PageError(Exception):
    """A block or a mark that nobody can act on: where it is, and what would be right."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that is said of a block."""

    kind: str
    texts: tuple[str, ...] = ()
    """Of `slow` and `by hand` parts of the commands that are meant, none for all; of `first` the commands."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block."""

    text: str
    line: int
    shown: tuple[str, ...] = ()
    """Lines of output below it."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    """Of its first line of content."""
    language: str
    text: str
    marks: tuple[Mark, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def has(self, kind: str) -> bool:
        return any(mark.kind == kind for mark in self.marks)

    def marked(self, kind: str, text: str) -> bool:
        """True if a mark of this kind means a text of the block: the whole block, or the commands that it names."""
        return any(
            mark.kind == kind and (not mark.texts or any(part in text for part in mark.texts)) for mark in self.marks
        )

    @property
    def first(self) -> tuple[str, ...]:
        """Commands that are run before it and that nobody sees."""
        return tuple(text for mark in self.marks if mark.kind == "first" for text in mark.texts)

    def commands(self) -> list[Command]:
        """Commands of a shell block: the lines after ``$ ``, or all lines but empty ones and comments."""
        lines = self.text.splitlines()
        has_prompts = any(line.startswith("$ ") for line in lines)
        found: list[Command] = []
        number = 0
        while number < len(lines):
            line, start = lines[number], number
            number += 1
            if has_prompts and not line.startswith("$ "):
                if found:
                    found[-1] = Command(found[-1].text, found[-1].line, (*found[-1].shown, line))
                continue
            if not line.strip() or line.startswith("#"):
                continue
            text = line.removeprefix("$ ")
            heredoc = _HEREDOC.search(text)
            while number < len(lines) and (text.endswith("\\") or (heredoc and lines[number - 1] != heredoc[1])):
                text += "\n" + lines[number]
                number += 1
            found.append(Command(text, self.line + start))
        return found


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks of a page in order."""
    found: list[Block] = []
    marks: list[Mark] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if said := _MARK.fullmatch(line.strip()):
            marks.append(_mark(said[1], f"{page}:{number}"))
            continue
        fence = _FENCE.fullmatch(line)
        if fence is None:
            if line.strip() and marks:
                raise PageError(
                    f"{page}:{number}: a mark `run:` stands above no block; put it on the line above the fence"
                )
            continue
        start = number
        while number < len(lines) and lines[number].strip() != fence[2]:
            number += 1
        content = "\n".join(line.removeprefix(fence[1]) for line in lines[start:number])
        found.append(_checked(Block(page, start + 1, fence[3], content, tuple(marks))))
        marks = []
        number += 1
    return found


def _mark(said: str, where: str) -> Mark:
    parts = _SAID.fullmatch(said)
    if parts is None or parts[1] not in KINDS:
        raise PageError(f"{where}: `run: {said}` is no mark; CONTRIBUTING.md lists them: {', '.join(KINDS)}")
    mark = Mark(parts[1], tuple(re.findall(r"`([^`]+)`", parts[2] or "")), parts[3] or "")
    if mark.kind == "by hand" and not mark.reason:
        raise PageError(f"{where}: what is run by hand says why: <!-- run: by hand, because it needs ... -->")
    return mark


def _checked(block: Block) -> Block:
    if block.language not in LANGUAGES:
        raise PageError(
            f"{block.where}: nobody knows how to run {block.language!r}; a block is a shell's (without a language), "
            f"{', '.join(LANGUAGES[1:-1])}, or `text`, which is only shown"
        )
    texts = [command.text for command in block.commands()] if block.language in SHELL else [block.text]
    for mark in block.marks:
        for part in mark.texts if mark.kind in ("slow", "by hand") else ():
            if not any(part in text for text in texts):
                raise PageError(f"{block.where}: a mark `{mark.kind}` means {part!r}, which is not in the block")
    return block
