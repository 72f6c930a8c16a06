"""Deny-list of words that are unusual in this field: counts them in packages, names of tests and documents.

It counts in all strings of the sources (docstrings, help, errors, log lines), in names of functions, classes and
modules, and in the documents outside of code. `DENIED` has the words with their replacements. Lines with the comment
``# plain:`` and a reason are skipped.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

DENIED: Mapping[str, str] = {
    "door": "API, adapter",
    "company": "batch composition",
    "house": "codebase",
    "told": "reports, is reported",
    "says": "reports, names, states",
    "said": "reported, named, stated",
    "wish": "demand",
    "sworn": "signed",
    "whereabouts": "session locations",
    "guest": "remote client",
    "retelling": "token replay",
    "wholeness": "integrity",
    "vouch": "permission",
    "powers": "permissions",
    "contender": "backend",
    "contestant": "runner",
    "seats": "slots",
    "borne": "accepted",
    "swept": "evicted",
    "spoilt": "corrupted",
    "knows": "has, reads",
    "nobody": "no client, no process",
    "somebody": "a client, a process",
    "whoever": "the caller, the client",
    "asked": "requested",
    "meant": "intended, valid",
}
"""Replacements by denied word. A word is denied as a whole word or as a part of a name between underscores."""
KEPT = "# plain:"
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
_WORDS = re.compile(r"[a-z]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_TESTS = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`\n]*`")


def denied_in(text: str) -> Counter[str]:
    """Denied words of a text, in singular or plural, with their counts."""
    found: Counter[str] = Counter()
    for word in _WORDS.findall(text.lower()):
        stem = word if word in DENIED else word.removesuffix("s")
        if stem in DENIED:
            found[stem] += 1
    return found


def texts_of(source: str) -> Iterator[str]:
    """Texts of a module for readers: its strings, and the names that it defines."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if KEPT in lines[getattr(node, "lineno", 1) - 1]:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield _CAMEL.sub("_", node.name)


def document_text(text: str) -> str:
    """Prose and headings of a document, without code."""
    return _INLINE.sub("", _FENCED.sub("", text))


def denied_words(root: Path) -> dict[str, Counter[str]]:
    """Denied words by location: each package, ``tests`` (names only), and ``documents``."""
    found: dict[str, Counter[str]] = {}
    package = root / "src" / "lockstep"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        counted = found.setdefault(parts[0], Counter())
        counted.update(denied_in(" ".join(parts).replace("_", " ")))
        for text in texts_of(path.read_text()):
            counted.update(denied_in(text.replace("_", " ")))
    tests = found.setdefault("tests", Counter())
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in _TESTS.findall(path.read_text()):
            tests.update(denied_in(name.replace("_", " ")))
    pages = found.setdefault("documents", Counter())
    for path in (*(root / name for name in DOCUMENTS), *sorted((root / "docs").glob("*.md"))):
        pages.update(denied_in(document_text(path.read_text())))
    return found
