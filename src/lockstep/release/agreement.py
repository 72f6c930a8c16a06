"""Agreement where answers may differ: a field that has to be the same, where tokens part, how far probabilities are
apart.

For the field, a text is JSON as a whole, or has it between fences (```` ```json ````) or in `<tool_call>` blocks, as
models write it where only the prompt demands JSON, without a grammar. A field is a path of names and places with dots
(``result.total``, ``0.name``); where a name on the way holds JSON in a string, as the arguments of tool calls do, it is
read. ``tool_call`` is every call of the answer, its name and its arguments. Values are compared as canonical JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.release.observation import SIDES
from lockstep.release.outputs import BOTH_ANSWERS, BOTH_SIDES, COMPARED, DIFFERENT, Output, is_unlike, unlike_cases
from lockstep.release.store import Store, floats
from lockstep.release.verdict import with_fractions

TOOL_CALL = "tool_call"
NO_FIELD = "no such field in either"
"""Reason for which two answers are not compared: the field is not theirs."""
MAX_TEXT = 1 << 20
"""Longer answers have no field."""
MAX_DIVERGING = 10_000
"""Pairs of unlike tokens that are looked at for where they part."""
_FENCED = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _NothingThereError(Exception):
    """No JSON, or no such field in it."""


def field_of(text: str, path: str) -> str | None:
    """Canonical JSON of a field of an answer; None: it has none.

    Args:
        path: names and places with dots, or ``tool_call``.
    """
    if len(text) > MAX_TEXT:
        return None
    try:
        value = _document(text)
        value = _calls(value) if path == TOOL_CALL else _at(value, path)
        return msgspec.json.encode(with_fractions(value, _whole), order="sorted").decode()
    except (_NothingThereError, RecursionError):
        return None


def _document(text: str) -> Any:
    """The JSON of an answer: of one tool call, it alone; of several, the list of them."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        pass
    calls = _CALL.findall(text)
    if calls:
        return _decoded(calls[0]) if len(calls) == 1 else [_decoded(call) for call in calls]
    fenced = _FENCED.findall(text)
    if len(fenced) == 1:
        return _decoded(fenced[0])
    raise _NothingThereError


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError):
        raise _NothingThereError from None


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, str):
            value = _decoded(value)
        if isinstance(value, list) and name.isdecimal() and len(name) < 10 and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise _NothingThereError
    return value


def _calls(value: Any) -> list[tuple[str, Any]]:
    """Names and arguments of tool calls, in their order."""
    if isinstance(value, Mapping) and "tool_calls" in value:
        value = value["tool_calls"]
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        call = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise _NothingThereError
        arguments = call.get("arguments", call.get("parameters", {}))
        found.append((call["name"], _decoded(arguments) if isinstance(arguments, str) and arguments else arguments))
    return found


def _whole(number: float) -> float | int:
    """1 for 1.0."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


# -- pairs ------------------------------------------------------------------------------------------------------------

_OF_REQUESTS = ("prompt", "parameters", "seed")
"""What makes two answers incomparable; not their environment, which such a candidate changes."""
_COMMON = (
    "coalesce(nullif(list_position(list_transform(list_zip(x.tokens, y.tokens),"
    " lambda t: t[1] IS NOT DISTINCT FROM t[2]), false), 0) - 1, len(x.tokens))"
)
"""Tokens before the first one that differs."""


def compare_field(store: Store, field: str) -> tuple[NDArray[np.int8], dict[str, int]]:
    """Compare the answers of all pairs in one field.

    A field that only one of them has is a difference; one that neither has shows nothing.

    Returns:
        The outputs in the order of pairs, and the incomparable ones by reason.
    """
    store.connection.create_function("answer_field", lambda text: field_of(text, field) or "", ["VARCHAR"], "VARCHAR")
    store.run(
        "CREATE TABLE answers AS SELECT place, x.text IS NOT NULL AS has_b, y.text IS NOT NULL AS has_c,"
        " md5(nullif(answer_field(x.text), '')) AS answer_b, md5(nullif(answer_field(y.text), '')) AS answer_c"
        f" FROM {BOTH_ANSWERS}"
    )
    store.run(
        f"""CREATE TABLE agreements AS
        SELECT place, reason, CASE WHEN NOT is_ok THEN {Output.FAILED:d}
          WHEN NOT has_b AND NOT has_c THEN {Output.NO_MATERIAL:d}
          WHEN reason IS NOT NULL THEN {Output.INCOMPARABLE:d}
          WHEN answer_b = answer_c THEN {Output.SAME:d} ELSE {Output.DIFFERS:d} END AS output
        FROM (SELECT place, b.ok AND c.ok AS is_ok, has_b, has_c, answer_b, answer_c,
            CASE {unlike_cases(_OF_REQUESTS)} WHEN NOT has_b OR NOT has_c THEN 'no text'
              WHEN answer_b IS NULL AND answer_c IS NULL THEN '{NO_FIELD}' END AS reason
          FROM {BOTH_SIDES} JOIN answers USING (place))"""
    )
    output = store.columns("SELECT output FROM agreements ORDER BY place")["output"]
    rows = store.rows(
        f"SELECT reason, count(*) FROM agreements WHERE output = {Output.INCOMPARABLE:d} GROUP BY 1 ORDER BY 1"
    )
    return output.astype(np.int8), {reason: int(count) for reason, count in rows}


class DivergencePoints(NamedTuple):
    """Places of first differing tokens, over pairs whose tokens differ."""

    num_pairs: int
    median: int | None
    earliest: int | None


def divergence(store: Store) -> DivergencePoints:
    """First differing places of differing answers, of the first `MAX_DIVERGING` in the order of time."""
    differing = (
        f"SELECT o.place FROM {BOTH_SIDES} WHERE b.ok AND c.ok AND b.tokens_hash <> c.tokens_hash"
        f" AND NOT ({is_unlike(_OF_REQUESTS)}) ORDER BY o.place LIMIT {MAX_DIVERGING}"
    )
    figures = f"count(*), quantile_disc({_COMMON}, 0.5), min({_COMMON})"
    return DivergencePoints(*store.rows(f"SELECT {figures} FROM {BOTH_ANSWERS} WHERE place IN ({differing})")[0])


def logprob_gaps(store: Store, output: NDArray[np.int8]) -> NDArray[np.float64]:
    """Mean difference of log-probabilities of the same tokens, a number per pair; NaN where not both sides give them.

    Tokens are the same before the first one that differs; where no tokens are given, in answers that are the same.
    """
    gaps = np.full(len(output), math.nan)
    if not all(store.number(f"SELECT count(logprobs) FROM {side}") for side in SIDES):
        return gaps
    num = f"least(len(x.logprobs), len(y.logprobs), coalesce({_COMMON}, len(x.logprobs)))"
    rows = store.columns(
        f"SELECT place, x.tokens IS NOT NULL AND y.tokens IS NOT NULL AS has_tokens, list_avg(list_transform("
        f"range(1, {num} + 1), lambda i: abs(x.logprobs[i] - y.logprobs[i]))) AS gap FROM {BOTH_ANSWERS}"
        " WHERE x.logprobs IS NOT NULL AND y.logprobs IS NOT NULL ORDER BY place"
    )
    places = rows["place"].astype(np.int64)
    is_usable = np.where(rows["has_tokens"], np.isin(output[places], COMPARED), output[places] == Output.SAME)
    gaps[places] = np.where(is_usable, floats(rows["gap"]), math.nan)
    return gaps


def excess_mismatches(
    store: Store, output: NDArray[np.int8], second: Store, second_output: NDArray[np.int8]
) -> NDArray[np.float64]:
    """Mismatches of the candidate less those of a second baseline, a number from -1 to 1 per pair.

    Args:
        output: of the pairs of the baseline and the candidate.
        second, second_output: of the pairs of the same baseline and the second one.

    Returns:
        NaN for requests that not all three answered comparably.
    """
    excess = np.full(len(output), math.nan)
    mine, theirs = np.flatnonzero(np.isin(output, COMPARED)), np.flatnonzero(np.isin(second_output, COMPARED))
    requests = _requests(store)[mine], _requests(second)[theirs]
    _, here, there = np.intersect1d(*requests, return_indices=True)
    differs, noise = np.isin(output[mine[here]], DIFFERENT), np.isin(second_output[theirs[there]], DIFFERENT)
    excess[mine[here]] = differs.astype(np.float64) - noise
    return excess


def _requests(store: Store) -> NDArray[np.uint64]:
    """Digests of the baseline's requests in the order of pairs, the same in every pairing of one baseline."""
    rows = store.columns(
        "SELECT hash(coalesce(x.request_id, key)) AS request FROM ordered o JOIN baseline x ON o.b = x.row"
        " ORDER BY place"
    )
    requests: NDArray[np.uint64] = rows["request"].astype(np.uint64)
    return requests
