"""Parts of error messages: suggestions for misspelt names, lists of names, confusable characters, faults of values.

A fault of a value is an item of pydantic's `ValidationError.errors()`. Its own text is never used, because it names
pydantic's classes and website and differs between versions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_LISTED = 16
"""Maximum names that one message lists."""
MAX_COMPARED_CHARS = 200
"""Maximum characters of a name that `nearest` compares."""
_LOOKS_LIKE = dict(
    zip(
        "аԁеһіјӏкорԛѕтԝхусАВЕЅІЈКМНОРСТХУαεικνορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧօսոհցզı",
        "adehijlkopqstwxycABESIJKMHOPCTXYaeikvoptuxABEZHIKMNOPTYXounhgqi",
        strict=True,
    )
)
"""Letters of other scripts that look like ASCII letters. Wide, bold and other variants of a letter are not in it,
because Unicode's NFKC form maps them."""
_UNSEEN = ("Cf", "Cc", "Zs", "Zl", "Zp", "Mn", "Me", "Co", "Cn")
"""Unicode categories of characters that are invisible, or visible only together with another character."""

Fault = Mapping[str, Any]
MAX_SHOWN_CHARS = 64
"""Maximum characters of a request's value that a message repeats."""
_DEMANDS: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "be a number"),
    "finite_number": "be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "be true or false"),
    **dict.fromkeys(("string_type", "string_sub_type"), "be a string"),
    "string_unicode": "be a string of whole characters",
    **dict.fromkeys(("list_type", "tuple_type"), "be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "be an object"),
    "none_required": "be null or left out",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "string_pattern_mismatch": "match the pattern {pattern}",
    **dict.fromkeys(("literal_error", "enum"), "be {expected}"),
}
"""Demands by pydantic's type of a fault. Names in braces are those of the fault's context."""
_LENGTH_DEMANDS: Mapping[str, str] = {
    **dict.fromkeys(("string_too_short", "too_short"), "min_length"),
    **dict.fromkeys(("string_too_long", "too_long"), "max_length"),
}
_WORDS = ("literal_error", "enum", "int_parsing", "float_parsing", "bool_parsing")
"""Types of faults whose value is a single word: a choice, or a number or flag in a query string."""
_UNITS: Sequence[tuple[type, tuple[str, str]]] = ((str, ("character", "characters")), (dict, ("entry", "entries")))
_CONSTANTS = re.compile(r"(?<!')\b(?:True|False|None)\b(?!')")
_IN_JSON = {"True": "true", "False": "false", "None": "null"}


def nearest(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names that are most similar to a name, independent of its case and of confusable letters.

    Args:
        n: maximum number of names.
        cutoff: minimum similarity, 0 to 1.
    """
    from difflib import get_close_matches  # needed only after an error; its import takes longer than this module's

    by_lower: Mapping[str, str] = {each.lower(): each for each in known}
    plain = _plain_letters(name.lower()[:MAX_COMPARED_CHARS])
    return [by_lower[each] for each in get_close_matches(plain, list(by_lower), n, cutoff)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question "did you mean 'X'?" with the most similar known name; empty if no name is similar."""
    near = nearest(name, known)
    return f"did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """Names as ``a, b and c``, at most `MAX_LISTED` of them."""
    few = [*names[:MAX_LISTED], "…"] if len(names) > MAX_LISTED else list(names)
    return f" {word} ".join([", ".join(few[:-1]), few[-1]]) if len(few) > 1 else "".join(few)


def odd_character(text: str, *, only_unseen: bool = False) -> str:
    """A predicate such as "has a tab; write spaces" for the first confusable or invisible character; empty: none.

    Args:
        only_unseen: leaves out confusable letters.
    """
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
    """The text with confusable letters replaced by ASCII ones, and without invisible characters."""
    shown_as = (_LOOKS_LIKE.get(each, unicodedata.normalize("NFKC", each)) for each in text)
    return "".join(each for each in shown_as if each.isascii() or unicodedata.category(each[0]) not in _UNSEEN)


# -- faults of values -------------------------------------------------------------------------------------------------


def demand(fault: Fault, otherwise: str) -> str:
    """The demand that a value does not meet: a verb and its object, to follow "it must".

    Args:
        otherwise: demand for types of faults that are in no table.
    """
    kind = fault["type"]
    context = {name: _plain(value) for name, value in (fault.get("ctx") or {}).items()}
    try:
        if kind in _LENGTH_DEMANDS:
            bound = _LENGTH_DEMANDS[kind]
            word = "least" if bound == "min_length" else "most"
            return f"have at {word} {_counted(int(context[bound]), fault.get('input'))}"
        return _DEMANDS.get(kind, otherwise).format(**context)
    except KeyError:  # another version of pydantic
        return otherwise


def _plain(value: object) -> str:
    """A bound, a pattern or the words of a choice, in JSON's notation."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return _CONSTANTS.sub(lambda found: _IN_JSON[found[0]], str(value))


def _counted(number: int, value: object) -> str:
    """A length with the unit of a value: characters, items or entries."""
    one, several = next((names for kind, names in _UNITS if isinstance(value, kind)), ("item", "items"))
    return f"{number} {one if number == 1 else several}"


def described(fault: Fault) -> str:
    """A short form of the value: numbers, lengths and single words, never longer text of the user."""
    value, kind = fault.get("input"), fault["type"]
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return str(value)[:MAX_SHOWN_CHARS]
    if isinstance(value, str) and kind in _WORDS:
        return repr(value[:MAX_SHOWN_CHARS])
    names = ((str, "a string"), (list | tuple, "a list"), (dict, "an object"))
    name = next((name for type_, name in names if isinstance(value, type_)), "something else")
    if kind not in _LENGTH_DEMANDS or not isinstance(value, str | list | tuple | dict):
        return name
    return f"{name} of {_counted(len(value), value)}" if value else f"an empty {name.split()[-1]}"
