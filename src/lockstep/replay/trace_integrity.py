"""Trace integrity: finds files of a recording that are missing, repeated, misplaced, empty or cut.

Each file names its run and has a number in it. A recorder deletes its oldest files and leaves no gaps between the
numbers of the others. If it could not write a part, the next file reports a gap. A missing number therefore means that
another process removed a file, while a reported gap is not a fault of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

FileNumber = tuple[str, int]
"""A run, and the number of a file in it."""
NO_FILE_NUMBER = ("", 0)
_NAME = re.compile(r"(.+)-(\d{6,})")
"""Name of a recorder's file without the suffix: run and number."""


def place_in(name: str) -> FileNumber:
    """Run and number in a file's name; `NO_FILE_NUMBER`: none."""
    match = _NAME.fullmatch(Path(name).stem)
    return (match[1], int(match[2])) if match else NO_FILE_NUMBER


class Part(NamedTuple):
    """One file of a recording: its header and its end."""

    path: Path
    run: str
    """Run; empty if the file cannot be read."""
    number: int
    """Number in the run, from 1; 0 if the file cannot be read."""
    num_bytes: int
    gap: str = ""
    """Reason why the part before it was not written; empty: no gap."""
    is_whole: bool = True
    """True if the file was written to its end."""
    goes_on: bool = False
    """True if its end announces another file."""
    is_simulated: bool = False
    """True for a recording of a replay: a single run with a file name that its user chose."""

    @property
    def is_empty(self) -> bool:
        """True if nothing in the file can be read."""
        return not self.number

    @property
    def named(self) -> FileNumber:
        """Run and number in the file's name."""
        return place_in(self.path.name)

    @property
    def place(self) -> FileNumber:
        """Run and number in the header, or in the name if the header cannot be read."""
        return self.named if self.is_empty else (self.run, self.number)


class Kind(Enum):
    """Kinds of findings about the files of a recording."""

    MISSING = "missing"
    EMPTY = "empty"
    CUT = "cut"
    REPEATED = "repeated"
    MISPLACED = "misplaced"
    CHANGED = "changed"
    ADDED = "added"
    GAP = "gap"
    """The recorder could not write a part."""
    OPEN = "open"
    """The last file of a run was not written to its end: the server was killed, or still runs."""

    @property
    def is_hole(self) -> bool:
        """True if recorded data is missing."""
        return self in (Kind.MISSING, Kind.EMPTY, Kind.CUT)

    @property
    def is_fault(self) -> bool:
        """True if a recorder never leaves files in this state."""
        return self not in (Kind.GAP, Kind.OPEN)


class Loss(NamedTuple):
    """Missing steps and turns between two files, from the second one's checkpoints."""

    steps: Mapping[int, int]
    """Number of missing steps by engine."""
    num_turns: int

    def __str__(self) -> str:
        counts = [f"{_counted(count, 'step')} of engine {number}" for number, count in self.steps.items()]
        return ", ".join([*counts, f"{_counted(self.num_turns, 'turn')}"])


class Finding(NamedTuple):
    """One finding about the files of a recording."""

    kind: Kind
    file: str
    """Name of the file; of several missing files, the first."""
    what: str
    """Description as a sentence."""
    before: FileNumber | None = None
    """Run and number of the file after the missing part."""
    loss: Loss | None = None
    byte: int | None = None
    """Offset at which the file is cut."""
    last_missing: int = 0
    """Number of the last of several missing files of a run."""

    def __str__(self) -> str:
        return self.what if self.loss is None else f"{self.what}; missing are {self.loss}"

    def covers(self, name: str) -> bool:
        """True if the finding is about the file of this name, alone or with others."""
        if name == self.file:
            return True
        (run, number), (its_run, first) = place_in(name), place_in(self.file)
        is_between = run == its_run and first < number <= self.last_missing
        return is_between and Path(name).suffix == Path(self.file).suffix

    def facts(self) -> dict[str, Any]:
        """The finding as an object."""
        lost = {} if self.loss is None else {"missing_steps": self.loss.steps, "missing_turns": self.loss.num_turns}
        where = {} if self.byte is None else {"byte": self.byte}
        kind = {"kind": self.kind.value, "fault": self.kind.is_fault}
        return {**kind, "file": self.file, **where, "what": self.what, **lost}


def arranged(parts: Sequence[Part], is_alone: bool = False) -> tuple[tuple[Part, ...], tuple[Finding, ...]]:
    """Parts of a directory in recorded order, without repeats, and findings about them.

    Args:
        parts: parts in the order of their names.
        is_alone: a single file was named, so its name and the files beside it do not matter.
    """
    findings: list[Finding] = []
    runs: dict[str, dict[int, Part]] = {}
    for part in parts:
        run, number = part.place
        if not number:
            findings.append(_empty(part))
            continue
        files = runs.setdefault(part.path.name if part.is_simulated else run, {})
        if number in files:
            again, part = sorted((files[number], part), key=lambda each: not each.is_empty and each.named == each.place)
            findings.append(_repeated(again, part))
        files[number] = part
    ordered: list[Part] = []
    for _, files in sorted(runs.items()):
        by_number = [files[number] for number in sorted(files)]
        findings += _of_run(by_number, is_first=not ordered)
        ordered += [part for part in by_number if not part.is_empty]
    return tuple(ordered), tuple([each for each in findings if not (is_alone and each.kind.is_fault)])


def is_whole(findings: Sequence[Finding]) -> bool:
    """True if the files are as a recorder leaves them, apart from old files that it deleted."""
    return not any(finding.kind.is_fault for finding in findings)


def are_in_order(findings: Sequence[Finding], allows_gaps: bool) -> bool:
    """True if no finding is a fault.

    Args:
        allows_gaps: accept missing parts, because files were removed on purpose.
    """
    return all(allows_gaps and each.kind.is_hole for each in findings if each.kind.is_fault)


def with_losses(findings: Sequence[Finding], losses: Mapping[FileNumber, Loss]) -> tuple[Finding, ...]:
    """Findings with the loss before each file that does not continue the previous one."""
    return tuple([each if each.before is None else each._replace(loss=losses.get(each.before)) for each in findings])


def _of_run(files: Sequence[Part], is_first: bool) -> list[Finding]:
    """Findings about the files of one run.

    Args:
        files: files in the order of their numbers.
        is_first: True for the first files of the directory, the oldest of which may have been deleted.
    """
    found: list[Finding] = []
    before: Part | None = None
    num_before = 0
    """Number of findings before the last file that is not empty."""
    for part in files:
        number, last = part.place[1], 0 if before is None else before.place[1]
        follows = number == last + 1
        if not part.is_simulated and part.named not in (part.place, NO_FILE_NUMBER):
            found.append(_misplaced(part))
        if part.gap and follows:
            found.append(_gap(before, part))
        elif before is not None and not before.is_empty and not before.is_whole:
            found.append(_cut(before, Kind.CUT, f", and {part.path.name} begins later"))
        if not follows and (before is not None or not is_first):
            found.append(_missing(part, last + 1, number - 1, before))
        if part.is_empty:
            found.append(_empty(part))
        else:
            new = [index for index in range(num_before, len(found)) if found[index].kind is not Kind.MISPLACED]
            for index in new[-1:]:
                found[index] = found[index]._replace(before=part.place)
            num_before = len(found)
        before = part
    if before is not None and not before.is_empty:
        found += _at_the_end(before)
    return found


def _at_the_end(last: Part) -> Iterator[Finding]:
    if not last.is_whole:
        yield _cut(last, Kind.OPEN, "; it was read up to there")
    elif last.goes_on:
        name = _name_of(last, last.number + 1)
        yield Finding(Kind.MISSING, name, f"{name} is missing: {last.path.name} announces another file")


def _missing(part: Part, first: int, last: int, before: Part | None) -> Finding:
    names = [_name_of(part, number) for number in (first, last)]
    what = f"{names[0]} is missing" if first == last else f"{last - first + 1} files, {' to '.join(names)}, are missing"
    where = f"before {part.path.name}" if before is None else f"between {before.path.name} and {part.path.name}"
    return Finding(Kind.MISSING, names[0], f"{what} {where}", last_missing=last)


def _empty(part: Part) -> Finding:
    if not part.num_bytes:
        return Finding(Kind.EMPTY, part.path.name, f"{part.path.name} is empty", byte=0)
    return _cut(part, Kind.EMPTY, ", before anything of it can be read")


def _gap(before: Part | None, part: Part) -> Finding:
    if before is None:
        where = f"before {part.path.name}"
    elif before.is_whole:
        where = f"between {before.path.name} and {part.path.name}"
    else:
        where = f"after byte {before.num_bytes} of {before.path.name} and until {part.path.name}"
    return Finding(Kind.GAP, part.path.name, f"{where}, the recorder could not write ({part.gap})")


def _repeated(again: Part, kept: Part) -> Finding:
    what = f"{again.path.name} repeats {kept.path.name}, as file {kept.number} of run {kept.run}, and is ignored"
    return Finding(Kind.REPEATED, again.path.name, what)


def _misplaced(part: Part) -> Finding:
    what = f"{part.path.name} is file {part.number} of run {part.run} despite its name, and was read as that file"
    return Finding(Kind.MISPLACED, part.path.name, what)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _cut(part: Part, kind: Kind, rest: str) -> Finding:
    what = f"{part.path.name} ends early at byte {part.num_bytes}{rest}"
    return Finding(kind, part.path.name, what, byte=part.num_bytes)


def _name_of(part: Part, number: int) -> str:
    """Name of another file of the part's run."""
    return f"{part.place[0]}-{number:06}{part.path.suffix}"
