"""Pairs: which observation of the candidate answers the same request as which one of the baseline.

Keys are tried from the best to the weakest; a key that several records of one side share pairs none of them. Each record
that is in no pair has a reason. Nothing here depends on the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.release.observation import Reason
from lockstep.release.reading import SIDES, Side, Store

MAX_EXAMPLES = 5
WINDOW_S = 1.0
"""Requests of equal prompts pair only if their arrivals, each counted from its side's first, are this near."""


@dataclass(frozen=True, slots=True)
class Key:
    """One way of telling that two records are of the same request."""

    name: str
    value: str
    """SQL over one record; NULL: it has none."""
    is_weak: bool = False


_ENGINE_ID = r"regexp_replace(regexp_replace({}, '^(chatcmpl|cmpl)-', ''), '-\d+$', '')"
KEYS: tuple[Key, ...] = (
    Key(
        "traceparent",
        r"coalesce(nullif(regexp_extract(traceparent, '^[0-9a-f]{2}-([0-9a-f]{32})-', 1), ''), traceparent)",
    ),
    Key("request_id", "request_id"),
    Key("engine_id", f"coalesce({_ENGINE_ID.format('engine_id')}, {_ENGINE_ID.format('request_id')})"),
    Key("conversation", "conversation_id || '/' || turn"),
    Key("index", '"index"::VARCHAR'),
    Key("prompt", f"prompt_digest || '/' || floor((ts - min(ts) OVER ()) / {WINDOW_S})::BIGINT", is_weak=True),
)
"""From the best to the weakest."""


@dataclass(frozen=True, slots=True)
class Unjoined:
    """Records of one side that are in no pair, for one reason."""

    side: Side
    reason: Reason
    count: int
    examples: tuple[str, ...]
    """Their ids, the first in order."""


@dataclass(frozen=True, slots=True)
class Joining:
    """Account of all records: each is in a pair, or is unjoined for a reason."""

    num_records: tuple[int, int]
    num_pairs: int
    pairs_by_key: tuple[tuple[str, int], ...]
    unjoined: tuple[Unjoined, ...]
    notes: tuple[str, ...] = ()

    def num_unjoined(self, side: Side) -> int:
        """Records of a side without a partner."""
        return sum(each.count for each in self.unjoined if each.side == side)


def join(store: Store) -> Joining:
    """Pair the tables of the sides; leaves a table ``pairs`` of their row ids, the key's name and the key.

    Returns:
        What became of every record.
    """
    run = store.connection.execute
    run("CREATE OR REPLACE TABLE pairs (b BIGINT, c BIGINT, key_name VARCHAR, key VARCHAR)")
    for side in SIDES:
        values = ", ".join(f"{key.value} AS key_{key.name}" for key in KEYS)
        run(f"CREATE OR REPLACE TABLE keys_{side} AS SELECT row, ts, {OK} AS ok, {values} FROM {side}")
        _drop_retries(store, side)
    notes = []
    by_key = []
    for key in KEYS:
        if key.name == "index" and (why := _index_fault(store)):
            notes.append(why)
            continue
        before = store.number("SELECT count(*) FROM pairs")
        run(_matching(key))
        num_new = store.number("SELECT count(*) FROM pairs") - before
        if num_new:
            by_key.append((key.name, num_new))
            run("DELETE FROM keys_baseline WHERE row IN (SELECT b FROM pairs)")
            run("DELETE FROM keys_candidate WHERE row IN (SELECT c FROM pairs)")
    unjoined = tuple(each for side in SIDES for each in _unjoined(store, side))
    records = tuple(store.number(f"SELECT count(*) FROM {side}") for side in SIDES)
    weak = [name for name, _ in by_key for key in KEYS if key.name == name and key.is_weak]
    if weak:
        notes.append("some pairs are joined by prompt and time of arrival only, which is weak: give requests an id")
    return Joining(
        (records[0], records[1]),
        sum(count for _, count in by_key),
        tuple(by_key),
        unjoined,
        tuple(notes),
    )


OK = "coalesce(ok, health <> 'down', coalesce(error, '') = '')"
"""Whether a record is of an answer."""


def _drop_retries(store: Store, side: Side) -> None:
    """Take failed records out that a later record of the same request follows."""
    store.connection.execute(f"CREATE OR REPLACE TABLE retried_{side} (row BIGINT)")
    store.connection.execute(
        f"INSERT INTO retried_{side} SELECT row FROM (SELECT row, ok, ts, max(ts) OVER (PARTITION BY key_request_id) AS"
        f" latest FROM keys_{side} WHERE key_request_id IS NOT NULL AND ts IS NOT NULL) WHERE NOT ok AND ts < latest"
    )
    store.connection.execute(f"DELETE FROM keys_{side} WHERE row IN (SELECT row FROM retried_{side})")


def _matching(key: Key) -> str:
    """SQL that pairs what is left by one key, where it is of one record on each side."""
    alone = "(SELECT key_{0} AS key, min(row) AS row FROM keys_{1} WHERE key_{0} IS NOT NULL GROUP BY 1 HAVING count(*) = 1)"
    return (
        f"INSERT INTO pairs SELECT b.row, c.row, '{key.name}', key FROM {alone.format(key.name, 'baseline')} b"
        f" JOIN {alone.format(key.name, 'candidate')} c USING (key)"
    )


def _index_fault(store: Store) -> str:
    """Why places in a data set do not pair; empty: they do, or there are none."""
    nums = [store.number(f'SELECT count("index") FROM {side}') for side in SIDES]
    if not all(nums):
        return ""
    if nums[0] != nums[1]:
        return f"not joined by index: {nums[0]:,} and {nums[1]:,} requests were not sent from one data set"
    unlike = store.number(
        'SELECT count(*) FROM baseline b JOIN candidate c USING ("index") WHERE b.prompt_tokens <> c.prompt_tokens',
    )
    if unlike:
        return f"not joined by index: {unlike:,} prompts have unlike lengths, so the data sets or their seeds differ"
    return ""


def _unjoined(store: Store, side: Side) -> list[Unjoined]:
    """The records that are left, by reason."""
    has_key = " OR ".join(f"key_{key.name} IS NOT NULL" for key in KEYS)
    again = " OR ".join(
        f"(key_{key.name} IS NOT NULL AND count(*) OVER (PARTITION BY key_{key.name}) > 1)" for key in KEYS[:4]
    )
    rows = store.rows(
        f"WITH left_over AS (SELECT row, CASE WHEN NOT ({has_key}) THEN '{Reason.NO_ID.value}'"
        f" WHEN {again} THEN '{Reason.DUPLICATE.value}' ELSE '{Reason.NO_PARTNER.value}' END AS reason FROM keys_{side}"
        f" UNION ALL SELECT row, '{Reason.RETRIED.value}' FROM retried_{side})"
        f' SELECT reason, count(*), list_sort(min(coalesce(request_id, engine_id, traceparent, conversation_id, "index"::'
        f"VARCHAR, '?'), {MAX_EXAMPLES})) FROM left_over JOIN {side} USING (row) GROUP BY 1 ORDER BY 1"
    )
    return [Unjoined(side, Reason(reason), count, tuple(examples)) for reason, count, examples in rows]
