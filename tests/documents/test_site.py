"""Links lead somewhere: on a code forge from page to page, and in the site, which is built without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.documents.pages import ROOT
from tools.site import MOVED, SITE, gathered, links_of, navigation, place_of, without_code

PAGES = sorted({*MOVED, *(path for path in gathered() if path.endswith(".md")), "llms.txt", "tools/pocket/README.md"})
_ANCHOR = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]*)#([^)\s]+)")
_URL = re.compile(r"(?:https?|ftp)://[^\s<>\"'`)\]]+")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@cache
def anchors_of(path: str) -> frozenset[str]:
    """Anchors of a page's headings as code forges make them: letters, digits, dashes; doubled ones are numbered."""
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    assert [written for target, written in links_of(page) if not (ROOT / unquote(target)).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_anchors_that_a_page_links_to_are_headings(page: str) -> None:
    missing = [
        f"{path}#{anchor}"
        for path, anchor in _ANCHOR.findall(without_code((ROOT / page).read_text()))
        if anchor
        not in anchors_of((ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix() if path else page)
    ]
    assert missing == []


@cache
def others() -> dict[str, str]:
    """Texts of files that are no pages and name some: sources, deployments, examples."""
    folders = ("src", "deploy", "examples", "tools", "benchmarks", ".github")
    suffixes = {".py", ".yaml", ".yml", ".json", ".service", ".example", ".html", ".js", ""}
    paths = [ROOT / "Makefile", ROOT / "pyproject.toml"]
    paths += [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path.is_file()}


def test_pages_that_other_files_name_are_there() -> None:
    """But those of other projects, such as ggml's."""
    named = {
        (name, page)
        for name, text in others().items()
        for page in re.findall(r"(?<![\w/])(?<!'s )(?<!'s `)docs/[\w-]+\.md", text)
    }
    assert len(named) >= 5
    assert [f"{name}: {page}" for name, page in sorted(named) if not (ROOT / page).is_file()] == []


def test_addresses_elsewhere_are_whole() -> None:
    """Nobody asks them here: there is no network. Each is one that could be asked."""
    urls = {url.rstrip(".,;:") for page in PAGES for url in _URL.findall(without_code((ROOT / page).read_text()))}
    urls |= {
        url.rstrip(".,;:")
        for name, text in others().items()
        if name.startswith(("deploy/", "examples/")) and name.endswith((".yaml", ".yml", ".service", "Dockerfile"))
        for url in _URL.findall(text)
        if url.startswith("https://")  # others are of the reader's own network
    }
    assert len(urls) > 20
    for url in sorted(urls):
        parts = urlsplit(url)
        assert parts.scheme == "https" or parts.hostname in ("127.0.0.1", "localhost"), f"{url}: is not encrypted"
        assert parts.hostname is not None
        assert "." in parts.hostname or parts.hostname == "localhost", url


def test_every_page_has_its_place_in_the_navigation_and_in_llms_txt() -> None:
    pages = [path for path in gathered() if path.endswith(".md")]
    assert sorted(navigation()) == sorted(place_of(page) for page in pages)
    lines = (ROOT / "llms.txt").read_text().splitlines()
    assert lines[0] == "# Lockstep"
    assert lines[2].startswith("> ")
    assert sorted(target for target, _ in links_of("llms.txt")) == sorted(pages)
    entries = [line for line in lines if line.startswith("- ")]
    assert [line for line in entries if not re.fullmatch(r"- \[[^\]]+\]\([^)]+\): .+[^.]", line)] == []


def test_pictures_are_shown_small_and_in_both_schemes() -> None:
    pictures = {path.name for path in (ROOT / "docs").glob("*.png")}
    shown = {Path(target).name for page in PAGES for target, _ in links_of(page) if target.endswith(".png")}
    assert pictures == shown
    assert {name.replace("-dark.", "-light.") for name in pictures} == {name for name in pictures if "-light." in name}
    assert [name for name in sorted(pictures) if (ROOT / "docs" / name).stat().st_size > 300_000] == []


class Page(HTMLParser):
    """Links and anchors of a built page, and what it would fetch by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        for name in ("src", "srcset"):
            self.fetched += [values[name]] if name in values else []
        if tag == "link" and values.get("rel") != "canonical":
            self.fetched.append(values.get("href", ""))


def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere() -> None:
    built = subprocess.run(
        [sys.executable, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Warning" not in built.stdout + built.stderr
    pages = {path: Page(path) for path in SITE.glob("*.html")}
    assert len(pages) > len(navigation())
    faults = [
        f"{path.name}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # it is shown at any address, and has absolute links
        for link in (*page.links, *page.fetched)
        if not leads_somewhere(path, link, pages)
    ]
    assert faults == []
    assert [f"{path.name}: {link}" for path, page in pages.items() for link in page.fetched if "//" in link] == []
    assert len((SITE / "llms-full.txt").read_text()) > 100_000


def leads_somewhere(path: Path, link: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (
        not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
    )
