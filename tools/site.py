"""Site of the documents: gathers the pages in one folder, builds them with Zensical, and writes one text of all.

    python -m tools.site        # build/site, from README, docs/ and their linked files; any warning is an error

The pages stay where a code forge shows them. In build/pages README is the index, links are adapted, and the marks of
the document tests are removed. The site also has the unchanged pages, which `llms.txt` links to, and `llms-full.txt`
with all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "zensical.toml"
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
MOVED: Mapping[str, str] = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/lockstep/pocket/MODEL_CARD.md": "model-card.md",
}
"""Pages outside of docs/ by their path in the site; pages in docs/ keep their name, other files their path."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)|(?<=src=\")(?!\w+:)([^\"#]+)|(?<=srcset=\")(?!\w+:)([^\"# ]+)")
"""Relative links of Markdown, and of pictures in HTML."""
_MARK = re.compile(r"^<!-- run: .*? -->\n", re.MULTILINE)
_CODE = re.compile(r"^( *)(```+).*?^\1\2$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Gather the pages, build the site, and write the text of all pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in gathered():
        place = PAGES / place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith((".md", ".txt")):
            place.write_text(staged(path))
        else:
            shutil.copyfile(ROOT / path, place)
    program = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [program, "build", "--clean", "--strict", "--config-file", ROOT / CONFIG], cwd=ROOT, text=True, check=False
    )
    if built.returncode:
        sys.exit(f"the site was not built: exit code {built.returncode}")
    for page in navigation():  # unchanged, for readers without a browser; llms.txt links to these
        shutil.copyfile(PAGES / page, SITE / page)
    (SITE / "llms-full.txt").write_text("\n\n".join((PAGES / page).read_text().strip() for page in navigation()) + "\n")
    print(f"{len(navigation())} pages in {SITE.relative_to(ROOT)}")


def gathered() -> list[str]:
    """Paths of all files of the site, from the repository's root: the pages and their linked files."""
    pages = [*MOVED, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md")))]
    linked = {target for page in pages for target, _ in links_of(page) if (ROOT / target).is_file()}
    return [*pages, *sorted(linked - set(pages)), "llms.txt"]


def links_of(page: str) -> Iterator[tuple[str, str]]:
    """Relative links of a page outside of code: the target path from the root, and the link's text."""
    for found in LINK.finditer(without_code((ROOT / page).read_text())):
        written = found[0]
        yield os.path.normpath(os.path.join(os.path.dirname(page), written)), written


def without_code(text: str) -> str:
    """Page with its code blanked out; line lengths stay the same."""
    return _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def place_of(path: str) -> str:
    """Path in the site of a path in the repository."""
    return MOVED.get(path, path.removeprefix("docs/"))


def staged(page: str) -> str:
    """Page as in the site: links have the new paths, and marks of blocks are removed."""
    text = (ROOT / page).read_text()
    folder = os.path.dirname(place_of(page))
    parts: list[str] = []
    at = 0
    for found in LINK.finditer(without_code(text)):
        target = os.path.normpath(os.path.join(os.path.dirname(page), found[0]))
        parts += [text[at : found.start()], os.path.relpath(place_of(target), folder or ".")]
        at = found.end()
    return _MARK.sub("", "".join([*parts, text[at:]]))


def navigation() -> list[str]:
    """Pages of the site in the order of its navigation."""

    def pages(entries: list[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages(value)

    return list(pages(tomllib.loads((ROOT / CONFIG).read_text())["project"]["nav"]))


if __name__ == "__main__":
    main()
