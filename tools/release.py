"""Release checks: one version in the package, in the changelog and in the tag, and the notes that go with it.

python -m tools.release check             the newest section of CHANGELOG.md is of the package's version
python -m tools.release check --tag v0.1.0    the same, its day is written, and the tag is of that version
python -m tools.release notes             that section, as the text of the release
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.version import __version__

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
UNRELEASED = "unreleased"
_HEADING = re.compile(r"^## (?P<version>\S+) \((?P<day>\d{4}-\d\d-\d\d|unreleased)\)$", re.MULTILINE)


class Section(NamedTuple):
    """Changes of one version."""

    version: str
    day: str
    """Of its release, as ISO 8601 writes it, or `unreleased`."""
    text: str


def sections(changelog: str) -> list[Section]:
    """The versions of a changelog, newest first."""
    found = list(_HEADING.finditer(changelog))
    ends = [*(heading.start() for heading in found[1:]), len(changelog)]
    return [
        Section(heading["version"], heading["day"], changelog[heading.end() : end].strip())
        for heading, end in zip(found, ends, strict=False)  # without a heading there is an end all the same
    ]


def faults(changelog: str, version: str, tag: str | None = None) -> list[str]:
    """Reasons for which this version cannot be released; a tag asks for more than a build without one."""
    newest, *older = sections(changelog) or [Section("", UNRELEASED, "")]
    told = []
    if newest.version != version:
        told.append(f"the newest section of CHANGELOG.md is of {newest.version or 'no version'}, the package {version}")
    if version in {section.version for section in older}:
        told.append(f"CHANGELOG.md has {version} among the older versions; give the package a new one")
    if tag is not None and tag != f"v{version}":
        told.append(f"the tag is {tag!r} and the package {version}; it must be v{version}")
    if tag is not None and newest.day == UNRELEASED:
        told.append(f"CHANGELOG.md calls {version} unreleased; write its day, e.g. ## {version} (2026-01-31)")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["check", "notes"])
    parser.add_argument("--tag", help="the tag that is to be released")
    asked = parser.parse_args(arguments)
    changelog = CHANGELOG.read_text()
    told = faults(changelog, __version__, asked.tag)
    for fault in told:
        print(f"release: {fault}", file=sys.stderr)
    if not told:
        print(f"release: {__version__}" if asked.action == "check" else sections(changelog)[0].text)
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
