"""Pairing of observations: joins the baseline's and the candidate's records of the same request.

Keys are tried from the best to the weakest. If several records of one side share a key, it pairs none of them. Each
unpaired record has a reason. Nothing here depends on the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from lockstep.release.observation import SIDES, LeftOutReason, Side
from lockstep.release.store import Store

MAX_EXAMPLES = 5
WINDOW_S = 1.0
"""Maximum difference in seconds between the arrivals of requests that are paired by prompt. Each side's arrivals are
relative to its first one."""
EMPTY = (
    "coalesce(coalesce(output_tokens, len(token_ids)) = 0 AND coalesce(len(vector), 0) = 0 AND fingerprint IS NULL"
    " AND coalesce(text, '') = '', false)"
)
"""SQL: the answer of a record is known to be empty: 0 tokens, and no other output."""
GIVEN_OK = "coalesce(ok, health <> 'down', coalesce(error, '') = '')"
"""SQL: a record reports success."""
OK = f"({GIVEN_OK} AND NOT {EMPTY})"
"""SQL: a record is a successful answer. An empty answer is a failure, whatever its status."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key that identifies records of the same request."""

    name: str
    value: str
    """SQL of a record's key; NULL if the record has none."""
    is_id: bool = True
    """True if the key identifies one request, so that no two requests of a side should share it."""
    is_weak: bool = False
    """True if a pair with the same key may be two different requests."""


_TRACE_ID = "coalesce(nullif(regexp_extract(traceparent, '^[0-9a-f]{2}-([0-9a-f]{32})-', 1), ''), traceparent)"
_STRIPPED = "regexp_replace(regexp_replace({0}, '^cmpl-(.*)-0$', '\\1'), '^(chatcmpl|cmpl)-', '')"
KEYS: tuple[Key, ...] = (
    Key("traceparent", _TRACE_ID, is_id=False),  # one trace of an agent contains several requests
    Key("request_id", "request_id"),
    Key("engine_id", f"coalesce({_STRIPPED.format('engine_id')}, {_STRIPPED.format('request_id')})"),
    Key("conversation", "conversation_id || '/' || turn"),
    Key("index", '"index"::VARCHAR', is_id=False),
    Key("pair", "pair", is_id=False),
    Key("prompt", "prompt_digest", is_id=False, is_weak=True),
)
"""All keys, from the best to the weakest."""
NAME = "coalesce(request_id, engine_id, conversation_id || '/' || turn, traceparent, \"index\"::VARCHAR)"
"""SQL of a record's id in reports; NULL if it has none."""


class Unjoined(msgspec.Struct, frozen=True):
    """Unpaired records of one side with the same reason."""

    side: Side
    """Side of the records: baseline or candidate."""
    reason: LeftOutReason
    """Reason why these records are in no pair."""
    count: int
    """Number of records."""
    examples: tuple[str, ...]
    """Ids of the first of these records."""


class Joining(msgspec.Struct, frozen=True):
    """Result of the pairing: each record is in a pair, or is unpaired for a reason."""

    records: dict[Side, int]
    """Number of records of each side."""
    pairs: int
    """Number of pairs."""
    by_key: dict[str, int]
    """Number of pairs by the key that joined them."""
    unjoined: tuple[Unjoined, ...]
    """Records in no pair, by side and reason."""

    @property
    def num_tried(self) -> int:
        """Number of records of the larger side that could be paired: all except retried ones."""
        retried = {each.side: each.count for each in self.unjoined if each.reason is LeftOutReason.RETRIED}
        return max(count - retried.get(side, 0) for side, count in self.records.items())


def join(store: Store) -> tuple[Joining, list[str]]:
    """Pair the records of both sides, and create the table ``pairs`` with row ids, the key's name, and the pair's id.

    Returns:
        Result of the pairing, and notes on keys that were not used or are weak.
    """
    store.run("CREATE TABLE pairs (b BIGINT, c BIGINT, key_name VARCHAR, key VARCHAR)")
    found = [_make_keys(store, side) for side in SIDES]
    num_left = min(store.number(f"SELECT count(*) FROM keys_{side}") for side in SIDES)
    notes = []
    by_key = {}
    index_fault = _index_fault(store) if all("index" in names for names in found) else ""
    if index_fault:
        notes.append(index_fault)
    for key in KEYS:
        is_of_both = all(key.name in names for names in found)
        if not num_left or not is_of_both or (key.name == "index" and index_fault):
            continue
        num_new = _match_prompts(store) if key.name == "prompt" else _match(store, key)
        num_left -= num_new
        if num_new:
            by_key[key.name] = num_new
            if key.is_weak:
                notes.append(
                    "some pairs are joined by prompt and time of arrival only, which is weak; give requests ids"
                )
            store.run("DELETE FROM keys_baseline WHERE row IN (SELECT b FROM pairs)")
            store.run("DELETE FROM keys_candidate WHERE row IN (SELECT c FROM pairs)")
    unjoined = tuple(each for side in SIDES for each in _unjoined(store, side, bool(index_fault)))
    records = {side: store.number(f"SELECT count(*) FROM {side}") for side in SIDES}
    return Joining(records, sum(by_key.values()), by_key, unjoined), notes


def _make_keys(store: Store, side: Side) -> set[str]:
    """Compute the keys of a side's records, and set aside failed records of requests that were retried later.

    Creates the tables ``keys_`` and ``retried_`` of the side.

    Returns:
        Names of the keys that at least one record has.
    """
    values = ", ".join(f"{key.value} AS key_{key.name}" for key in KEYS)
    store.run(
        f"CREATE TABLE keys_{side} AS SELECT row, ts, ts - first AS since, {OK} AS ok, {NAME} AS name, {values}"
        f" FROM {side}, (SELECT min(ts) AS first FROM {side})"
    )
    store.run(f"CREATE TABLE retried_{side} (row BIGINT, name VARCHAR)")
    counted = ", ".join(f"count(key_{key.name}), count(key_{key.name}) FILTER (NOT ok)" for key in KEYS)
    [counts] = store.rows(f"SELECT {counted} FROM keys_{side}")
    of_failed = dict(zip(KEYS, counts[1::2], strict=True))
    for key in (f"key_{key.name}" for key in KEYS if key.is_id and of_failed[key]):
        failed = f"(SELECT row, name, ts, {key} FROM keys_{side} WHERE NOT ok AND {key} IS NOT NULL)"
        latest = (
            f"(SELECT {key}, max(ts) AS latest FROM keys_{side} WHERE {key} IN (SELECT {key} FROM {failed}) GROUP BY 1)"
        )
        store.run(
            f"INSERT INTO retried_{side} SELECT row, name FROM {failed} JOIN {latest} USING ({key}) WHERE ts < latest"
        )
        store.run(f"DELETE FROM keys_{side} WHERE row IN (SELECT row FROM retried_{side})")
    names = {key.name for key, count in zip(KEYS, counts[::2], strict=True) if count}
    if "pair" in names:
        doubled = f"(SELECT key_request_id FROM keys_{side} GROUP BY 1 HAVING count(*) > 1)"
        store.run(f"UPDATE keys_{side} SET key_pair = NULL WHERE key_request_id IN {doubled}")
    return names


def _match(store: Store, key: Key) -> int:
    """Pair the remaining records by one key, if exactly one record of each side has it.

    Returns:
        Number of new pairs.
    """
    alone = (
        "(SELECT key_{0} AS key, min(row) AS row, min(name) AS name FROM keys_{1} WHERE key_{0} IS NOT NULL GROUP BY 1"
        " HAVING count(*) = 1)"
    )
    name = "key" if key.is_id else "coalesce(b.name, c.name)"
    return store.number(
        f"INSERT INTO pairs SELECT b.row, c.row, '{key.name}', {name} FROM {alone.format(key.name, 'baseline')} b"
        f" JOIN {alone.format(key.name, 'candidate')} c USING (key)"
    )


def _match_prompts(store: Store) -> int:
    """Pair the remaining records with equal prompts and similar arrival times, if neither side has the same prompt
    again at about that time.

    Returns:
        Number of new pairs.
    """
    for side in SIDES:
        store.run(
            f"CREATE TABLE prompts_{side} AS SELECT row, name, key_prompt AS key, since,"
            f" floor(since / {WINDOW_S}) AS bin FROM keys_{side} WHERE key_prompt IS NOT NULL AND since IS NOT NULL"
            " WINDOW near AS (PARTITION BY key_prompt ORDER BY since)"
            f" QUALIFY coalesce(since - lag(since) OVER near > {2 * WINDOW_S}, true)"
            f" AND coalesce(lead(since) OVER near - since > {2 * WINDOW_S}, true)"
        )
    return sum(
        store.number(
            "INSERT INTO pairs SELECT b.row, c.row, 'prompt', coalesce(b.name, c.name) FROM prompts_baseline b"
            f" JOIN prompts_candidate c ON b.key = c.key AND b.bin + {shift} = c.bin"
            f" WHERE abs(b.since - c.since) <= {WINDOW_S}"
        )
        for shift in (-1, 0, 1)
    )


def _index_fault(store: Store) -> str:
    """Reason why the indexes in a data set cannot be used as a key; empty if they can, or if there are none."""
    counts = [store.rows(f'SELECT count("index"), count(DISTINCT "index") FROM {side}')[0] for side in SIDES]
    nums = [num for num, _ in counts]
    if not all(nums):
        return ""
    if nums[0] != nums[1]:
        return f"not joined by index: {nums[0]:,} and {nums[1]:,} requests were not sent from one data set"
    if any(num != num_distinct for num, num_distinct in counts):
        return "not joined by index: some requests of a side have the same one"
    # failed requests are ignored: their prompt tokens were counted by the client, not by the server
    answered = f'(SELECT "index", prompt_tokens, prompt_digest FROM {{}} WHERE {OK})'
    unlike = store.number(
        f'SELECT count(*) FROM {answered.format("baseline")} b JOIN {answered.format("candidate")} c USING ("index")'
        " WHERE b.prompt_tokens <> c.prompt_tokens OR b.prompt_digest <> c.prompt_digest"
    )
    return (
        f"not joined by index: {unlike:,} prompts are unlike, so the data sets or their seeds differ" if unlike else ""
    )


def _unjoined(store: Store, side: Side, is_unlike_data: bool) -> Iterator[Unjoined]:
    """Unpaired records of a side, by reason."""
    keys = [f"key_{key.name}" for key in KEYS if key.name != "pair"]
    ids = [f"key_{key.name}" for key in KEYS if key.is_id]
    has_key = f"coalesce({', '.join(f'{key}::VARCHAR' for key in keys)}) IS NOT NULL"
    again = " OR ".join(f"({key} IS NOT NULL AND count(*) OVER (PARTITION BY {key}) > 1)" for key in ids)
    by_index_only = f"{str(is_unlike_data).lower()} AND key_index IS NOT NULL AND coalesce({', '.join(ids)}) IS NULL"
    rows = store.rows(
        f"SELECT reason, count(*), list_sort(min(coalesce(name, '?'), {MAX_EXAMPLES})) FROM ("
        f"SELECT name, CASE WHEN NOT ({has_key}) THEN '{LeftOutReason.NO_ID.value}'"
        f" WHEN {again} THEN '{LeftOutReason.DUPLICATE.value}'"
        f" WHEN {by_index_only} THEN '{LeftOutReason.UNLIKE_DATA_SETS.value}'"
        f" ELSE '{LeftOutReason.NO_PARTNER.value}' END AS reason FROM keys_{side}"
        f" UNION ALL SELECT name, '{LeftOutReason.RETRIED.value}' FROM retried_{side}) GROUP BY 1 ORDER BY 1"
    )
    for reason, count, examples in rows:
        yield Unjoined(side, LeftOutReason(reason), count, tuple(examples))
