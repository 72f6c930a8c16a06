"""Agreement of answers that may differ: compares one field, the first differing tokens, and log-probabilities.

To find the field, a text is read as JSON. The JSON is the whole text, or is inside a fence (```` ```json ````) or
`<tool_call>` blocks, which models write when only the prompt demands JSON, without a grammar. A field is a path of
names and list indexes with dots (``result.total``, ``0.name``). A string on the path is parsed as JSON, because
arguments of tool calls are JSON in a string. The field ``tool_call`` stands for all calls of the answer with their
names and arguments. Values are compared as canonical JSON.
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
"""Reason for not comparing two answers: neither has the field."""
MAX_TEXT = 1 << 20
"""Maximum number of characters of an answer that is parsed; longer answers count as answers without the field."""
MAX_DIVERGING = 10_000
"""Maximum number of differing pairs that are searched for their first differing token."""
_FENCED = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _NothingThereError(Exception):
    """The text is not JSON, or does not have the field."""


def field_of(text: str, path: str) -> str | None:
    """Canonical JSON of a field of an answer; None if the answer does not have the field.

    Args:
        path: names and list indexes with dots, or ``tool_call``.
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
    """JSON of an answer. Several tool calls become a list; one tool call is returned without a list."""
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
    """Names and arguments of tool calls, in order."""
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
    """The number as an integer if it is one, so that 1.0 equals 1."""
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


# -- pairs ------------------------------------------------------------------------------------------------------------

_OF_REQUESTS = ("prompt", "parameters", "seed")
"""Differences that make two answers incomparable. A different environment does not: the candidate changes it."""
_COMMON = (
    "coalesce(nullif(list_position(list_transform(list_zip(x.tokens, y.tokens),"
    " lambda t: t[1] IS NOT DISTINCT FROM t[2]), false), 0) - 1, len(x.tokens))"
)
"""SQL: number of tokens before the first one that differs."""


def compare_field(store: Store, field: str) -> tuple[NDArray[np.int8], dict[str, int]]:
    """Compare one field of the answers of all pairs.

    If only one answer has the field, the answers differ. If neither has it, they are incomparable.

    Returns:
        `Output` of each pair, in order, and the number of incomparable pairs by reason.
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
    """Positions of the first differing token, over pairs whose tokens differ."""

    num_pairs: int
    median: int | None
    earliest: int | None


def divergence(store: Store) -> DivergencePoints:
    """Positions of the first differing token in the first `MAX_DIVERGING` differing pairs, in the order of time."""
    differing = (
        f"SELECT o.place FROM {BOTH_SIDES} WHERE b.ok AND c.ok AND b.tokens_hash <> c.tokens_hash"
        f" AND NOT ({is_unlike(_OF_REQUESTS)}) ORDER BY o.place LIMIT {MAX_DIVERGING}"
    )
    figures = f"count(*), quantile_disc({_COMMON}, 0.5), min({_COMMON})"
    return DivergencePoints(*store.rows(f"SELECT {figures} FROM {BOTH_ANSWERS} WHERE place IN ({differing})")[0])


def logprob_gaps(store: Store, output: NDArray[np.int8]) -> NDArray[np.float64]:
    """Mean absolute difference of the log-probabilities of the same tokens, per pair; NaN without values on both sides.

    Only tokens before the first differing one are compared. Without tokens, only equal answers are compared.
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
    """Mismatch of the candidate minus mismatch of a second baseline, per pair: -1, 0 or 1.

    Args:
        output: `Output` of the pairs of baseline and candidate.
        second: store with the pairs of the same baseline and the second one.
        second_output: `Output` of these pairs.

    Returns:
        One number per pair; NaN for requests without comparable answers of all three.
    """
    excess = np.full(len(output), math.nan)
    mine, theirs = np.flatnonzero(np.isin(output, COMPARED)), np.flatnonzero(np.isin(second_output, COMPARED))
    requests = _requests(store)[mine], _requests(second)[theirs]
    _, here, there = np.intersect1d(*requests, return_indices=True)
    differs, noise = np.isin(output[mine[here]], DIFFERENT), np.isin(second_output[theirs[there]], DIFFERENT)
    excess[mine[here]] = differs.astype(np.float64) - noise
    return excess


def _requests(store: Store) -> NDArray[np.uint64]:
    """Digests of the baseline's requests in the order of pairs. They are equal in every comparison with this
    baseline."""
    rows = store.columns(
        "SELECT hash(coalesce(x.request_id, key)) AS request FROM ordered o JOIN baseline x ON o.b = x.row"
        " ORDER BY place"
    )
    requests: NDArray[np.uint64] = rows["request"].astype(np.uint64)
    return requests
