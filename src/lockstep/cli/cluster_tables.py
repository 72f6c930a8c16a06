"""Tables of a running cluster: columns for `lockstep ps` and `lockstep top`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.cli.top_layout import Column, Row, Value
from lockstep.cluster.cluster_stats import EngineStats
from lockstep.cluster.snapshot import (
    ClusterSnapshot,
    HostSnapshot,
    ModelSnapshot,
    PlaceSnapshot,
    ReplicaSnapshot,
    SessionSnapshot,
)
from lockstep.report.document import ABSENT
from lockstep.server.request_rows import RequestRow
from lockstep.shown import duration, milliseconds, percent, rate, size

SHARED = "·"
"""Mark of stats that the row of another model with the same engine shows."""
_MIN_NAME = 14
"""Minimum width of a table's first column in `lockstep top`."""
STYLES = {
    **dict.fromkeys(("resident", "ready", "active", "running"), "green"),
    **dict.fromkeys(("loading", "unloading", "starting", "draining", "waiting"), "yellow"),
    **dict.fromkeys(("failed", "dropped", "dead", "lost", "unreachable"), "bold red"),
    **dict.fromkeys(("standby", "idle", "ended"), "dim"),
}
"""Terminal style by state."""


class ModelRow(NamedTuple):
    """A model with its replica and its engine's stats."""

    model: ModelSnapshot
    replica: ReplicaSnapshot | None
    engine: EngineStats
    shown_with: str
    """Id of the model whose row shows the bytes and stats of the shared replica; empty: this row shows them."""


def model_rows(cluster: ClusterSnapshot, engines: Sequence[EngineStats] = ()) -> list[ModelRow]:
    """Rows of a cluster's models in order of definition. A replica's stats are in the row of its first model."""
    replicas, stats = {each.key: each for each in cluster.replicas}, {each.model: each for each in engines}
    rows = []
    for model in cluster.models:
        replica = replicas.get(model.replica or "")
        first = replica.models[0] if replica is not None and replica.models else ""
        engine = stats.get(first, EngineStats(model.id))
        rows.append(ModelRow(model, replica, engine, "" if first == model.id else first))
    return rows


def model_columns(
    columns: Sequence[Column[ModelRow]], cluster: ClusterSnapshot, engines: Sequence[EngineStats] = ()
) -> list[Column[ModelRow]]:
    """Columns for a cluster's models, with their tasks if one of them is for anything but text, with their adapters if
    one of them has one, and with the share of accepted drafts if there are drafts."""
    has_tasks = any(model.task not in (None, "generate") for model in cluster.models)
    has_adapters = any(model.adapter is not None for model in cluster.models)
    more = [*([TASK] if has_tasks else []), *([ADAPTER] if has_adapters else [])]
    has_drafts = any(engine.draft_share is not None for engine in engines)
    stats = [column for column in columns[len(_NAMES) :] if column is not DRAFTS or has_drafts]
    return [*columns[: len(_NAMES)], *more, *stats]


def _of_engine(
    head: str,
    rank: int,
    value: Callable[[EngineStats], Value],
    form: Callable[[float], str] = str,
    width: int = 0,
    style: str = "",
) -> Column[ModelRow]:
    """Column of an engine's stat, which is shown once for all models that share the engine."""

    def shown(row: ModelRow) -> Value:
        return SHARED if row.shown_with else value(row.engine)

    return Column(head, rank, shown, form, width, style=style, key=lambda row: value(row.engine))


def _state(rank: int, value: Callable[[Row], str], width: int) -> Column[Row]:
    return Column("STATE", rank, value, str, width, is_word=True, style=lambda row: STYLES.get(value(row), ""))


def _name(row: ModelRow) -> str:
    return row.model.id if row.model.set is None else f"{row.model.set}.{row.model.id}"


def _blocks(engine: EngineStats) -> str | None:
    if engine.num_blocks is None or engine.kv_share is None:
        return None
    return f"{round(engine.kv_share * engine.num_blocks)}/{engine.num_blocks}"


def _sessions(row: ModelRow) -> str:
    limit = row.model.max_active_sessions
    return f"{row.model.num_sessions}/{ABSENT if limit is None else limit}"


def _predicted(row: ModelRow) -> str | None:
    if row.shown_with:
        return f"with {row.shown_with}"
    return None if row.replica is None else size(row.replica.predicted_bytes)


def _measured(row: ModelRow) -> str | None:
    if row.shown_with or row.replica is None or row.replica.measured_bytes is None:
        return None
    return size(row.replica.measured_bytes)


_NAMES: tuple[Column[ModelRow], ...] = (
    Column("MODEL", 0, _name, width=_MIN_NAME, is_word=True),
    Column("TIER", 9, lambda row: row.model.tier, is_word=True, style="dim"),
    _state(2, lambda row: row.model.state, 8),
)
TASK: Column[ModelRow] = Column("TASK", 5, lambda row: row.model.task, width=8, is_word=True)
ADAPTER: Column[ModelRow] = Column("ADAPTER", 6, lambda row: row.model.adapter, is_word=True)
_COUNTS: tuple[Column[ModelRow], ...] = (
    Column("SESSIONS", 7, _sessions, key=lambda row: row.model.num_sessions),
    Column("REQUESTS", 11, lambda row: row.model.num_requests),
)
DRAFTS: Column[ModelRow] = _of_engine("DRAFTS", 6, lambda engine: engine.draft_share, percent, 6)
MODELS: tuple[Column[ModelRow], ...] = (
    *_NAMES,
    Column("RUN", 1, lambda row: row.model.num_running, width=3, style="bold green"),
    Column("WAIT", 1, lambda row: row.model.num_waiting, width=4, style="bold yellow"),
    _of_engine("TOK/S", 3, lambda engine: engine.tokens_per_s, rate, 6, "bold"),
    _of_engine("TTFT p50", 4, lambda engine: engine.ttft_p50_s, milliseconds, 8),
    _of_engine("p95", 4, lambda engine: engine.ttft_p95_s, milliseconds, 7),
    _of_engine("KV", 5, lambda engine: engine.kv_share, percent, 4),
    _of_engine("HITS", 6, lambda engine: engine.hit_share, percent, 4),
    DRAFTS,
    _of_engine("BLOCKS", 8, _blocks, width=6),
    _of_engine("PROMPT/S", 10, lambda engine: engine.prompt_tokens_per_s, rate, 8),
    *_COUNTS,
    Column("IDLE", 12, lambda row: row.model.idle_s, duration, 6, style="dim"),
)
"""Columns of models in `lockstep top`."""
MODELS_WITH_BYTES: tuple[Column[ModelRow], ...] = (
    *_NAMES,
    Column("PREDICTED", 3, _predicted),
    Column("MEASURED", 3, _measured),
    Column("RUNNING", 1, lambda row: row.model.num_running),
    Column("WAITING", 1, lambda row: row.model.num_waiting),
    *_COUNTS,
    Column("IDLE", 12, lambda row: row.model.idle_s, "{:.0f} s".format),
)
"""Columns of models in `lockstep ps`."""
SESSIONS: tuple[Column[SessionSnapshot], ...] = (
    Column("SESSION", 0, lambda session: session.id, width=_MIN_NAME, is_word=True),
    _state(1, lambda session: session.state, 7),
    Column("DEVICE", 1, lambda session: session.num_tokens, width=6),
    Column("STORED", 1, lambda session: session.num_stored_tokens, width=6),
    Column("IDLE", 2, lambda session: session.idle_s, duration, 6),
    Column("REQUESTS", 4, lambda session: session.num_requests),
    Column("MODEL", 3, lambda session: session.model, is_word=True),
)


def _of_ms(ms: float) -> str:
    return milliseconds(ms / 1e3)


def _outcome(row: RequestRow) -> str:
    return row.error or ",".join(row.finish_reasons)


def _waits(row: RequestRow) -> str:
    return "; ".join(wait.reason for wait in row.waits)


REQUESTS: tuple[Column[RequestRow], ...] = (
    Column("REQUEST", 0, lambda row: row.id, width=_MIN_NAME, is_word=True),
    _state(1, lambda row: row.state, 7),
    Column("MODEL", 2, lambda row: row.model, is_word=True),
    Column("WAITED", 3, lambda row: row.waited_ms, _of_ms, 8),
    Column("TTFT", 4, lambda row: row.ttft_ms, _of_ms, 8),
    Column("TOTAL", 2, lambda row: row.total_ms, _of_ms, 8),
    Column("TOK/S", 5, lambda row: row.tokens_per_second, rate, 6),
    Column("PROMPT", 7, lambda row: row.prompt_tokens, width=6),
    Column("CACHED", 6, lambda row: row.cached_tokens, width=6),
    Column("OUTPUT", 5, lambda row: row.output_tokens, width=6),
    Column("SESSION", 8, lambda row: row.session_id, is_word=True),
    Column("ENDED", 3, _outcome, width=6, is_word=True, style=lambda row: "red" if row.error else "dim"),
    Column("WHY IT WAITED", 9, _waits, is_word=True, style="yellow"),
)


def _host_state(host: HostSnapshot) -> str:
    states = (("lost", not host.is_there), ("drained", host.is_drained))
    return ", ".join(state for state, is_so in states if is_so) or "there"


def _free(host: HostSnapshot) -> str | None:
    parts = []
    for name, amount in host.resources.items():
        left = host.free.get(name, 0.0)
        if name == "memory":
            parts.append(f"{size(int(left))} of {size(int(amount))} memory")
        else:
            parts.append(f"{left:g} of {amount:g} {name}")
    return ", ".join(parts) if parts and host.is_there else None


def _absence(place: PlaceSnapshot) -> str | None:
    return f"{place.num_away}x, {place.away_s:.1f} s" if place.num_away else None


HOSTS: tuple[Column[HostSnapshot], ...] = (
    Column("HOST", 0, lambda host: host.name, width=_MIN_NAME, is_word=True),
    Column("ADDRESS", 3, lambda host: host.address, is_word=True),
    _state(1, _host_state, 5),
    Column("REPLICAS", 2, lambda host: host.num_replicas),
    Column("FREE", 4, _free, is_word=True),
)
REPLICAS: tuple[Column[PlaceSnapshot], ...] = (
    Column("REPLICA", 0, lambda place: place.name, width=_MIN_NAME, is_word=True),
    _state(1, lambda place: place.state, 8),
    Column("HOST", 2, lambda place: place.host or None, is_word=True),
    Column("ADDRESS", 8, lambda place: place.address or None, is_word=True),
    Column("RUNNING", 3, lambda place: place.num_running),
    Column("ROUTED", 4, lambda place: place.num_routed, width=6),
    Column("RETRIED", 6, lambda place: place.num_retried),
    Column("CACHED", 7, lambda place: place.num_cached_blocks, width=6),
    Column("STARTS", 5, lambda place: place.num_starts),
    Column("AWAY", 9, _absence),
    Column("PID", 10, lambda place: place.pid or None),
)
