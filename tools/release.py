"""Release checks: compares the version of the package, the changelog and the tag, and prints the release notes.

python -m tools.release check             the newest section of CHANGELOG.md is of the package's version
python -m tools.release check --tag v0.1.0    the same; its date is set, and the tag has that version
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
    """Date of the release in ISO 8601, or `unreleased`."""
    text: str


def sections(changelog: str) -> list[Section]:
    """Versions of a changelog, newest first."""
    found = list(_HEADING.finditer(changelog))
    ends = [*(heading.start() for heading in found[1:]), len(changelog)]
    return [
        Section(heading["version"], heading["day"], changelog[heading.end() : end].strip())
        for heading, end in zip(found, ends, strict=False)  # without headings there is still one end
    ]


def faults(changelog: str, version: str, tag: str | None = None) -> list[str]:
    """Reasons against a release of this version; with a tag there are more checks than for a build."""
    newest, *older = sections(changelog) or [Section("", UNRELEASED, "")]
    told = []
    if newest.version != version:
        told.append(
            f"the newest section of CHANGELOG.md has {newest.version or 'no version'}, but the package has {version}"
        )
    if version in {section.version for section in older}:
        told.append(f"CHANGELOG.md has {version} among the older versions; set a new version in the package")
    if tag is not None and tag != f"v{version}":
        told.append(f"the tag is {tag!r}, but the package has {version}; the tag must be v{version}")
    if tag is not None and newest.day == UNRELEASED:
        told.append(f"CHANGELOG.md has {version} as unreleased; write its date, e.g. ## {version} (2026-01-31)")
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["check", "notes"])
    parser.add_argument("--tag", help="tag to release")
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
