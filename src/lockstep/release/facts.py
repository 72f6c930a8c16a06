"""Facts of observations: computes a few scalars per observation with DuckDB, in one pass over a side.

Lists are read only once, since later stages need only their length, mean and hash. Facts are stored in a
column-oriented file. Labels, which many observations share, are stored in a separate table.
"""

from __future__ import annotations

from lockstep.errors import EvidenceError
from lockstep.release.joining import EMPTY, GIVEN_OK, NAME, OK
from lockstep.release.observation import LeftOutReason, Side
from lockstep.release.store import Store

LABELS = (
    "model",
    "model_version",
    "artifact",
    "precision",
    "backend",
    "accelerator",
    "route_id",
    "replica_id",
    "scheduler",
    "segment",
    "deterministic",
)
"""Fields of the table ``labels_`` of a side, whose key is ``label``."""
_FINITE = "must be a finite number, 0 or above"
_RULES: tuple[tuple[str, str, str], ...] = (
    *(
        (name, f"{name} < 0 OR NOT isfinite({name})", _FINITE)
        for name in ("latency_ms", "queue_depth", "ttft_ms", "kv_used", "kv_total")
    ),
    ("ts", "NOT isfinite(ts)", "must be a finite number"),
    (
        "token_latencies_ms",
        "list_min(token_latencies_ms) < 0 OR NOT isfinite(list_avg(token_latencies_ms))",
        "must be finite numbers, 0 or above",
    ),
    (
        "stream_events",
        "len(list_filter(stream_events, lambda e: e.elapsed_ms < 0 OR NOT isfinite(e.elapsed_ms))) > 0",
        "has an elapsed_ms that is negative or not finite",
    ),
    ("vector", "NOT (isfinite(list_max(vector)) AND isfinite(list_min(vector)))", "must be finite numbers"),
    ("logprobs", "NOT (isfinite(list_max(logprobs)) AND isfinite(list_min(logprobs)))", "must be finite numbers"),
    ("health", "health NOT IN ('ready', 'degraded', 'down')", "must be ready, degraded or down"),
    ("kv_total", "kv_used > kv_total", "is less than kv_used; both must have the same unit"),
    ("ttft_ms", "ttft_ms > 10 * latency_ms", "is more than ten times latency_ms; both must be in milliseconds"),
)
"""Rules for valid observations: the field, the SQL condition of a violation, and the message."""
_FAULTS = " + ".join(
    f"CASE WHEN {condition} THEN {1 << place} ELSE 0 END" for place, (_, condition, _) in enumerate(_RULES)
)
_EVENTS = "list_sort(stream_events)"
_ANY_TOKENS = "output_tokens IS DISTINCT FROM 0"


def _hash(*fields: str, as_: str = "") -> str:
    """SQL of a hash of fields. The hash of a single field is NULL if the field is NULL."""
    if len(fields) > 1:
        return f"hash({', '.join(fields)})"
    [name] = fields
    return f"CASE WHEN {name} IS NOT NULL THEN hash({name}) END AS {as_ or name}"


NUM_DRAWN = 30_000
"""Approximate number of sampled observations whose gaps are stored with their facts."""
_WITH_EVENTS = f"""
CREATE VIEW timed_{{side}} AS
  SELECT *, {_EVENTS} AS events,
    coalesce(len(list_distinct(list_transform(stream_events, lambda e: e.index))) < len(stream_events), false)
      AS doubled,
    coalesce(len(list_filter(range(2, len(stream_events) + 1), lambda i:
      ({_EVENTS})[i].elapsed_ms < ({_EVENTS})[i - 1].elapsed_ms)) > 0, false) AS falling
  FROM {{side}};
CREATE VIEW observed_{{side}} AS
  SELECT * EXCLUDE (events),
    coalesce(token_ids, CASE
      WHEN NOT doubled AND list_bool_and(list_transform(events, lambda e: e.token_id IS NOT NULL))
      THEN list_transform(events, lambda e: e.token_id) END) AS tokens,
    coalesce(token_latencies_ms, CASE WHEN NOT (doubled OR falling) THEN
      list_transform(range(2, len(events) + 1), lambda i: events[i].elapsed_ms - events[i - 1].elapsed_ms) END) AS gaps,
    coalesce(ttft_ms, CASE WHEN NOT (doubled OR falling) THEN events[1].elapsed_ms END) AS first_ms
  FROM timed_{{side}}
"""
_WITHOUT_EVENTS = """
CREATE VIEW observed_{side} AS
  SELECT *, token_ids AS tokens, token_latencies_ms AS gaps, ttft_ms AS first_ms, false AS doubled, false AS falling
  FROM {side}
"""
"""SQL of the view ``observed_`` of a side. Without stream events it needs no copies of lists."""
_LABELLED = (
    f"CREATE TABLE labels_{{side}} AS SELECT DISTINCT {_hash(*LABELS)} AS label, {', '.join(LABELS)} FROM {{side}}"
)
_COLUMNS = f"""
row, ts, {OK} AS ok, {GIVEN_OK} AND {EMPTY} AS is_empty, {_hash(*LABELS)} AS label, seed,
{_hash("prompt_digest")}, {_hash("params_digest")}, {_hash("environment")},
coalesce(output_tokens, len(tokens), len(stream_events))::DOUBLE AS num_tokens,
latency_ms, first_ms AS ttft_ms, list_avg(gaps) AS decode_ms, kv_used / nullif(kv_total, 0) AS kv_pressure, queue_depth,
coalesce(len(gaps), 0) AS num_gaps, hash(gaps) AS gaps_hash,
coalesce(len(gaps) > 0 OR len(stream_events) = 1 AND NOT doubled, false) AS streamed,
route_id IS NOT NULL AND scheduler IS NOT NULL AS routed,
{_hash("tokens", as_="tokens_hash")}, len(tokens) = 0 AND {_ANY_TOKENS} AS is_blank_tokens,
{_hash("vector", as_="vector_hash")}, len(vector) = 0 AS is_blank_vector,
{_hash("text", as_="text_hash")}, text = '' AND {_ANY_TOKENS} AS is_blank_text,
fingerprint, token_trace_fingerprint, doubled, falling, {_FAULTS} AS faults,
hash(request_id, traceparent, engine_id, conversation_id, turn, "index", nullif(error, ''), prompt_tokens,
  output_tokens) AS names
"""
_DIGESTED = (
    "ts, ok, label, seed, prompt_digest, params_digest, environment, latency_ms, ttft_ms, gaps_hash, kv_pressure,"
    " queue_depth, tokens_hash, vector_hash, text_hash, fingerprint, token_trace_fingerprint, doubled, falling, names"
)


def compute_facts(store: Store, side: Side, num_drawn: int = NUM_DRAWN) -> None:
    """Create the view ``facts_`` of a side, its table ``labels_``, and its view ``observed_`` with the tokens and times
    of stream events.

    Args:
        num_drawn: approximate number of answers whose gaps are kept with their facts.

    Raises:
        EvidenceError: a number is not finite, is negative, or has another unit than related fields.
    """
    has_events = store.rows(f"SELECT 1 FROM {side} WHERE stream_events IS NOT NULL LIMIT 1")
    store.run((_WITH_EVENTS if has_events else _WITHOUT_EVENTS).format(side=side))
    store.run(_LABELLED.format(side=side))
    one_in = max(1, store.number(f"SELECT count(*) FROM {side}") // num_drawn)
    drawn = f"CASE WHEN hash(row) % {one_in} = 0 THEN gaps END AS drawn"
    rows = f"SELECT {_COLUMNS}, {drawn} FROM observed_{side}"
    facts = store.save(
        f"SELECT * EXCLUDE (gaps_hash, names), hash({_DIGESTED}) AS digest FROM ({rows})", f"facts-{side}"
    )
    store.run(f"CREATE VIEW facts_{side} AS SELECT * EXCLUDE (file_row_number) FROM {facts}")
    faults = store.number(f"SELECT coalesce(bit_or(faults), 0) FROM facts_{side}")
    for bit, (name, condition, right) in enumerate(_RULES):
        if faults >> bit & 1:
            [[request]] = store.rows(f"SELECT min({NAME}) FROM {side} WHERE {condition}")
            of = f" of request {request}" if request else ""
            raise EvidenceError(f"{store.paths.get(side, side)}: the {side}'s {name}{of} {right}")


def digest_of(store: Store, side: Side) -> str:
    """Digest of a side's observations, independent of their order."""
    [[total]] = store.rows(f"SELECT sum(digest::HUGEINT) FROM facts_{side}")
    return f"{int(total or 0) % (1 << 64):016x}"


def names_of(store: Store, side: Side, label: str, most: int) -> tuple[str, ...]:
    """Values of one of the `LABELS`, sorted, at most `most`."""
    rows = store.rows(f"SELECT DISTINCT {label} FROM labels_{side} WHERE {label} IS NOT NULL ORDER BY 1 LIMIT {most}")
    return tuple(value for (value,) in rows)


def is_deterministic(store: Store, side: Side) -> bool:
    """True if the answers of all observations' engines are independent of batch composition."""
    [[found]] = store.rows(f"SELECT coalesce(bool_and(coalesce(deterministic, false)), false) FROM labels_{side}")
    return bool(found)


def num_empty(store: Store, side: Side) -> int:
    """Number of observations that are failures only because their answers are empty."""
    return store.number(f"SELECT count(*) FROM facts_{side} WHERE is_empty")


def event_faults(store: Store, side: Side) -> list[tuple[Side, LeftOutReason, int]]:
    """Number of observations whose stream events were left out, by reason."""
    columns = (("doubled", LeftOutReason.DOUBLED_INDEX), ("falling", LeftOutReason.FALLING_STAMPS))
    counts = [(reason, store.number(f"SELECT count(*) FROM facts_{side} WHERE {name}")) for name, reason in columns]
    return [(side, reason, count) for reason, count in counts if count]
