"""View of `lockstep top`: the state of a server as lines that fit a terminal of any size. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.text import Text

from lockstep.cli.ps import host_row, place_row
from lockstep.cli.top_client import Event, RequestRow, View, transitions
from lockstep.cli.top_layout import (
    GAP,
    Column,
    Section,
    allot,
    beside,
    count,
    duration,
    grid,
    head_line,
    joined,
    milliseconds,
    number,
    percent,
)
from lockstep.cluster.budget import NO_LIMIT, memory_of
from lockstep.cluster.cluster_stats import EngineStats
from lockstep.cluster.snapshot import EngineSnapshot, ModelSnapshot
from lockstep.report.document import ABSENT
from lockstep.shown import printable, size

SHARED = "·"
"""In the place of stats of an engine that stand with another of its models."""
WIDE = 130
"""Columns from which on sessions and events stand beside each other."""
MIN_NAME = 14
_STYLES = {
    **dict.fromkeys(("resident", "ready", "active", "running"), "green"),
    **dict.fromkeys(("loading", "unloading", "starting", "draining", "waiting"), "yellow"),
    **dict.fromkeys(("failed", "dropped", "dead", "lost", "unreachable"), "bold red"),
    **dict.fromkeys(("standby", "idle", "ended"), "dim"),
}
_TOP_BAR = 24
"""Cells of a bar, at most."""


MODEL_COLUMNS = (
    Column("MODEL", 0, MIN_NAME, True),
    Column("TIER", 9, 0, True),
    Column("STATE", 2, 8, True),
    Column("RUN", 1, 3),
    Column("WAIT", 1, 4),
    Column("TOK/S", 3, 6),
    Column("TTFT p50", 4, 8),
    Column("p95", 4, 7),
    Column("KV", 5, 4),
    Column("HITS", 6, 4),
    Column("BLOCKS", 8, 6),
    Column("PROMPT/S", 10, 8),
    Column("SESSIONS", 7),
    Column("REQUESTS", 11),
    Column("IDLE", 12, 6),
)
_SESSION_COLUMNS = (
    Column("SESSION", 0, MIN_NAME, True),
    Column("STATE", 1, 7, True),
    Column("DEVICE", 1, 6),
    Column("STORED", 1, 6),
    Column("IDLE", 2, 6),
    Column("REQUESTS", 4),
    Column("MODEL", 3, 0, True),
)
_REQUEST_COLUMNS = (
    Column("REQUEST", 0, MIN_NAME, True),
    Column("STATE", 1, 7, True),
    Column("MODEL", 2, 0, True),
    Column("WAITED", 3, 8),
    Column("TTFT", 4, 8),
    Column("TOTAL", 2, 8),
    Column("TOK/S", 5, 6),
    Column("PROMPT", 7, 6),
    Column("CACHED", 6, 6),
    Column("OUTPUT", 5, 6),
    Column("SESSION", 8, 0, True),
    Column("ENDED", 3, 6, True),
    Column("WHY IT WAITED", 9, 0, True),
)
_HOST_COLUMNS = (
    Column("HOST", 0, MIN_NAME, True),
    Column("ADDRESS", 3, 0, True),
    Column("STATE", 1, 5, True),
    Column("REPLICAS", 2),
    Column("FREE", 4, 0, True),
)
_PLACE_COLUMNS = (
    Column("REPLICA", 0, MIN_NAME, True),
    Column("STATE", 1, 8, True),
    Column("HOST", 2, 0, True),
    Column("ADDRESS", 8, 0, True),
    Column("RUNNING", 3),
    Column("ROUTED", 4, 6),
    Column("RETRIED", 6),
    Column("CACHED", 7, 6),
    Column("STARTS", 5),
    Column("AWAY", 9, 0, True),
    Column("PID", 10),
)
SORTS = ("", "MODEL", "STATE", "RUN", "WAIT", "TOK/S", "TTFT p50", "p95", "KV", "HITS", "SESSIONS", "REQUESTS", "IDLE")
"""Heads of columns that models are sorted by, in turn; empty: as the manifest has them."""


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Choices of who looks."""

    sort: str = ""
    is_reversed: bool = False
    is_paused: bool = False
    offset: int = 0
    """Models that were scrolled past."""

    def press(self, key: str, num_models: int) -> ViewOptions:
        """The choices after a key; the same after one that means nothing."""
        if key in ("s", "S"):
            step = 1 if key == "s" else -1
            return replace(self, sort=SORTS[(SORTS.index(self.sort) + step) % len(SORTS)], offset=0)
        if key == "r":
            return replace(self, is_reversed=not self.is_reversed)
        if key in ("p", " "):
            return replace(self, is_paused=not self.is_paused)
        moves = {"j": 1, "down": 1, "k": -1, "up": -1, "page down": 10, "page up": -10}
        moves |= {"home": -num_models, "end": num_models}
        return replace(self, offset=min(max(0, self.offset + moves.get(key, 0)), max(0, num_models - 1)))


def frame(view: View, look: ViewOptions, width: int, height: int | None, keys: str = "") -> list[Text]:
    """Lines of at most ``width`` cells; exactly ``height`` of them, or as many as it takes where that is None.

    Args:
        keys: the last line; empty: none.
    """
    head, foot = _header(view, width), [Text(keys, "dim")] if keys else []
    if look.is_paused and foot:
        foot = [Text.assemble(("paused ", "bold yellow"), (keys, "dim"))]
    memory, models = Section(None, _memory(view, width)), _models(view, look, width)
    is_wide = width >= WIDE
    half = (width - len(GAP)) // 2 if is_wide else width
    sessions, events = _sessions(view, half), _events(view, half)
    middle = [*_hosts(view, width), *_requests(view, width)]
    below = [max(sessions.height, events.height)] if is_wide else [sessions.height, events.height]
    wants = [each.height for each in (models, memory, *middle)] + below
    heights = wants if height is None else allot(height - len(head) - len(foot), wants)
    lines = [*head, *memory.fit(heights[1]), *models.fit(heights[0])]
    for section, lines_of_it in zip(middle, heights[2:], strict=False):
        lines += section.fit(lines_of_it)
    if is_wide:
        lines += beside(sessions.fit(heights[-1]), events.fit(heights[-1]), half)
    else:
        lines += [*sessions.fit(heights[-2]), *events.fit(heights[-1])]
    if height is not None:
        lines = lines[: max(0, height - len(foot))]
        lines += [Text()] * (height - len(lines) - len(foot))
    lines += foot
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[:height]


def _header(view: View, width: int) -> list[Text]:
    reading, cluster, stats = view.reading, view.reading.cluster, view.reading.stats
    generated = [each.tokens_per_s for each in stats.engines if each.tokens_per_s is not None]
    first = [
        Text.assemble(("lockstep top", "bold"), GAP, (printable(cluster.cluster), "bold cyan")),
        Text(printable(reading.status), _STYLES.get(reading.status, "bold red")),
        *(Text(words) for words in _kernels(each.engine for each in cluster.replicas)),
        Text(f"up {duration(stats.uptime_s)}"),
        Text(printable(reading.version)),
        Text(view.url, "dim"),
    ]
    in_engines = sum(engine.num_waiting for engine in stats.engines)
    waiting = sum(model.num_waiting for model in cluster.models) + in_engines
    running = max(0, sum(model.num_running for model in cluster.models) - in_engines)
    second = [
        _number("running", str(running)),
        _number("waiting", str(waiting), "bold yellow" if waiting else "bold"),
        _number("tokens/s", number(sum(generated) if generated else None)),
        _number("requests/s", number(stats.requests_per_s)),
        _number("sessions", str(cluster.sessions_live)),
        _number("requests", str(cluster.counters.requests_total)),
        _number("promotions", str(cluster.counters.promotions)),
        _number("demotions", str(cluster.counters.demotions)),
    ]
    told = [Text(printable(warning), "yellow") for warning in cluster.warnings]
    told += [Text(printable(f"{model.id}: {model.reason}"), "yellow") for model in cluster.models if model.reason]
    sentences = [place.sentence for place in cluster.places if place.sentence not in ("", *cluster.warnings)]
    told += [Text(printable(sentence), "yellow") for sentence in sentences]
    notes = [*told[:2], *([Text(f"… {len(told) - 2} more", "dim")] if len(told) > 2 else [])]
    trouble = [Text(f"trying again: {printable(view.trouble)}", "bold red")] if view.trouble else []
    return [joined(first, width), *trouble, joined(second, width), *notes]


def _number(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble(f"{name} ", (value, style))


def _kernels(engines: Iterable[EngineSnapshot | None]) -> Iterable[str]:
    """Instruction set and threads of the loaded models' forward passes, each once."""
    return dict.fromkeys(f"{each.isa}, {each.threads} threads" for each in engines if each and each.isa)


def _memory(view: View, width: int) -> list[Text]:
    """A bar for each budget and for each tier of the store."""
    cells = max(8, min(_TOP_BAR, width - 60))
    rows = []
    for budget in view.reading.cluster.budgets:
        if budget.effective_bytes is None and not budget.used_bytes:
            continue
        if budget.effective_bytes is None:
            name = memory_of(printable(budget.name))
            rows.append(Text.assemble((name, "cyan"), f"  {size(budget.used_bytes)} in use, {NO_LIMIT}"))
            continue
        bar = _bar(budget.used_bytes, budget.effective_bytes, cells)
        rows.append(Text.assemble((f"{printable(budget.name):<12}", "cyan"), bar))
    for tier in view.reading.stats.tiers:
        bar = _bar(tier.num_bytes, tier.budget_bytes, cells)
        parts = [
            Text.assemble((f"{'kv on ' + printable(tier.name):<12}", "cyan"), bar),
            Text(f"loaded {tier.num_loaded}"),
            Text(f"rejected {tier.num_rejected}", "bold red" if tier.num_rejected else ""),
            Text(f"evicted {tier.num_evicted}"),
            Text(f"{tier.num_blocks} blocks"),
        ]
        rows.append(joined(parts, width))
    return rows


def _bar(used: int, whole: int | None, cells: int) -> Text:
    if whole is None:
        return Text.assemble((" " * cells, ""), f" {size(used):>8} in use, {NO_LIMIT}")
    share = min(1.0, used / whole) if whole else 0.0
    full = round(share * cells) or int(used > 0)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    text = f" {size(used):>8} of {size(whole):<8} {100 * share:3.0f}%"
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"), text)


class _ModelRow(NamedTuple):
    model: ModelSnapshot
    engine: EngineStats
    is_shared: bool
    """Whether the engine's stats stand with another model."""


def _models(view: View, look: ViewOptions, width: int) -> Section:
    cluster = view.reading.cluster
    first_of = {replica.key: replica.models[0] for replica in cluster.replicas if replica.models}
    engines = {each.model: each for each in view.reading.stats.engines}
    rows = []
    for model in cluster.models:
        first = first_of.get(model.replica or "")
        stats = engines.get(first or "", EngineStats(model.id))
        rows.append(_ModelRow(model, stats, first not in (None, model.id)))
    rows = _sorted(rows, look)
    mark = " ▲" if look.is_reversed else " ▼"
    columns = [each._replace(head=each.head + mark) if each.head == look.sort else each for each in MODEL_COLUMNS]
    head, *lines = grid(columns, [_model_cells(row) for row in rows], width)
    return Section(head, lines, look.offset)


def _sorted(rows: list[_ModelRow], look: ViewOptions) -> list[_ModelRow]:
    """Numbers from the largest, words from A; what has no value is last, and ties stay as the manifest has them."""
    index = next((at for at, each in enumerate(MODEL_COLUMNS) if each.head == look.sort), None)
    if index is None:
        return rows[::-1] if look.is_reversed else rows
    is_word = MODEL_COLUMNS[index].is_word
    known = [(value, row) for row in rows if (value := _values(row)[index]) is not None]
    known.sort(key=lambda each: each[0], reverse=is_word == look.is_reversed)
    return [row for _, row in known] + [row for row in rows if _values(row)[index] is None]


def _values(row: _ModelRow) -> tuple[str | float | None, ...]:
    """Values of the columns, in their order."""
    model, engine = row.model, row.engine
    return (
        *(model.id if model.set is None else f"{model.set}.{model.id}", model.tier, model.state),
        *(model.num_running, model.num_waiting, engine.tokens_per_s, engine.ttft_p50_s, engine.ttft_p95_s),
        *(engine.kv_share, engine.hit_share, engine.num_blocks, engine.prompt_tokens_per_s),
        *(model.num_sessions, model.num_requests, model.idle_s),
    )


def _model_cells(row: _ModelRow) -> list[Text]:
    model, engine = row.model, row.engine
    blocks = ABSENT
    if engine.num_blocks is not None and engine.kv_share is not None:
        blocks = f"{round(engine.kv_share * engine.num_blocks)}/{engine.num_blocks}"
    shared = SHARED if row.is_shared else None
    name, tier, state = (str(each) for each in _values(row)[:3])
    return [
        Text(printable(name)),
        Text(tier, "dim"),
        Text(state, _STYLES.get(state, "")),
        count(model.num_running, "bold green"),
        count(model.num_waiting, "bold yellow"),
        Text(shared or number(engine.tokens_per_s), "bold" if engine.tokens_per_s and not shared else "dim"),
        Text(shared or milliseconds(engine.ttft_p50_s)),
        Text(shared or milliseconds(engine.ttft_p95_s)),
        Text(shared or percent(engine.kv_share)),
        Text(shared or percent(engine.hit_share)),
        Text(shared or blocks),
        Text(shared or number(engine.prompt_tokens_per_s)),
        Text(f"{model.num_sessions}/{ABSENT if model.max_active_sessions is None else model.max_active_sessions}"),
        Text(str(model.num_requests)),
        Text(duration(model.idle_s), "dim"),
    ]


def _hosts(view: View, width: int) -> list[Section]:
    """Hosts, and the replicas on them; none where everything runs on one machine."""
    cluster = view.reading.cluster
    hosts, places = [host_row(each) for each in cluster.hosts], [place_row(each) for each in cluster.places]
    tables = [(columns, rows) for columns, rows in ((_HOST_COLUMNS, hosts), (_PLACE_COLUMNS, places)) if rows]
    sections = []
    for columns, rows in tables:
        cells = [[Text(printable(text), _STYLES.get(text, "")) for text in row] for row in rows]
        head, *lines = grid(columns, cells, width)
        sections.append(Section(head, lines))
    return sections


def _requests(view: View, width: int) -> list[Section]:
    """Requests that are answered and were, the newest first; none where the server does not list them."""
    if view.reading.requests is None:
        return []
    rows = []
    for each in view.reading.requests:
        ended = each.error or ",".join(each.finish_reasons)
        cells = (
            *(Text(printable(each.id)), Text(printable(each.state), _STYLES.get(each.state, ""))),
            Text(printable(each.model or ABSENT)),
            *(Text(milliseconds(None if ms is None else ms / 1e3)) for ms in (each.waited_ms, each.ttft_ms)),
            *(Text(milliseconds(each.total_ms / 1e3)), Text(number(each.tokens_per_second))),
            *(count(each.prompt_tokens), count(each.cached_tokens), count(each.output_tokens)),
            *(Text(printable(each.session_id or ABSENT)), Text(printable(ended), "red" if each.error else "dim")),
            Text("; ".join(printable(wait.reason) for wait in each.waits), "yellow"),
        )
        rows.append(cells)
    head, *lines = grid(_REQUEST_COLUMNS, rows, width)
    return [Section(head, lines + _replayed(view.reading.requests) or [Text("none yet", "dim")])]


def _replayed(requests: Sequence[RequestRow]) -> list[Text]:
    """The command that replays the newest request that is in a recording, where this caller may know it."""
    for each in requests:
        for place in each.replay:
            if place.command is not None:
                told = f"{printable(place.command)}  (sequence {place.sequence} from step {place.step})"
                return [Text.assemble((f"replay of {printable(each.id)}: ", "dim"), told)]
    return []


def _sessions(view: View, width: int) -> Section:
    """Named sessions, the last used first."""
    rows = [
        [
            Text(printable(each.id)),
            Text(each.state, _STYLES.get(each.state, "")),
            count(each.num_tokens),
            count(each.num_stored_tokens),
            Text(duration(each.idle_s)),
            Text(str(each.num_requests)),
            Text(printable(each.model)),
        ]
        for each in sorted(view.reading.cluster.sessions, key=lambda session: session.idle_s)
    ]
    head, *lines = grid(_SESSION_COLUMNS, rows, width)
    return Section(head, lines or [Text("none is named", "dim")])


def _events(view: View, width: int) -> Section:
    """Events, the latest first; the changes of tier that the snapshot has, where there are no others."""
    events = view.events or transitions(view.reading.cluster)
    lines = [_event(event) for event in reversed(events)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Section(head_line("EVENTS", width), lines or [Text("none yet", "dim")])


def _event(event: Event) -> Text:
    fields = {name: value for name, value in event.fields.items() if name not in ("at_s", "replica")}
    took = fields.pop("duration_ms", None)
    if event.type == "tier_changed":
        told = f"{fields.get('model')} {fields.get('from')} → {fields.get('to')}, {fields.get('reason')}"
    elif event.type == "hop":
        told = f"{fields.get('model')} → {fields.get('target')}"
    else:
        told = GAP.join(f"{name} {value}" for name, value in fields.items() if value is not None)
    tail = f", {took:,.0f} ms" if isinstance(took, int | float) and took >= 1 else ""
    style = "bold red" if event.type in ("kv_rejected", "worker_restarted") else "cyan"
    clock = time.strftime("%H:%M:%S", time.localtime(event.at_s))
    return Text.assemble((clock, "dim"), GAP, (printable(event.type), style), GAP, printable(told + tail))
