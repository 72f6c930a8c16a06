"""Names as messages speak of them: the known name that was meant, lists of names, and letters in disguise."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

MAX_LISTED = 16
"""Names in one message."""
MAX_COMPARED_CHARS = 200
_LOOKS_LIKE = dict(
    zip(
        "аԁеһіјӏкорԛѕтԝхусАВЕЅІЈКМНОРСТХУαεικνορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧօսոհցզı",
        "adehijlkopqstwxycABESIJKMHOPCTXYaeikvoptuxABEZHIKMNOPTYXounhgqi",
        strict=True,
    )
)
"""Letters of other scripts that are drawn as one of ours; what is a wide, bold or otherwise dressed form of a letter
is known to Unicode."""
_UNSEEN = ("Cf", "Cc", "Zs", "Zl", "Zp", "Mn", "Me", "Co", "Cn")
"""Categories of characters that show nothing, or nothing of their own."""


def nearest(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that are nearest to another one, whatever its case and whatever its letters look like.

    Args:
        n: how many at most.
        cutoff: how near, 0 to 1.
    """
    from difflib import get_close_matches  # asked for where something went wrong; it takes longer than this module

    by_lower: Mapping[str, str] = {each.lower(): each for each in known}
    plain = _plain_letters(name.lower()[:MAX_COMPARED_CHARS])
    return [by_lower[each] for each in get_close_matches(plain, list(by_lower), n, cutoff)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names; empty where none is near."""
    near = nearest(name, known)
    return f"did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """``a, b and c``, no more of them than a sentence bears."""
    few = [*names[:MAX_LISTED], "…"] if len(names) > MAX_LISTED else list(names)
    return f" {word} ".join([", ".join(few[:-1]), few[-1]]) if len(few) > 1 else "".join(few)


def odd_character(text: str, *, only_unseen: bool = False) -> str:
    """A half-sentence about the first character that is not what it looks like; empty where all are."""
    for character in text:
        if character.isascii() and character.isprintable():
            continue
        if character == "\t":
            return "has a tab; write spaces"
        code = f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()
        if unicodedata.category(character) in _UNSEEN:
            return f"has the character {code}, which cannot be seen; delete it, or write a space"
        plain = _plain_letters(character)
        if plain != character and not only_unseen:
            return f"has the letter {code}, which looks like {plain}; write {plain}"
    return ""


def _plain_letters(text: str) -> str:
    """The text with the letters that its own look like, and without what cannot be seen."""
    shown_as = (_LOOKS_LIKE.get(each, unicodedata.normalize("NFKC", each)) for each in text)
    return "".join(each for each in shown_as if each.isascii() or unicodedata.category(each[0]) not in _UNSEEN)
