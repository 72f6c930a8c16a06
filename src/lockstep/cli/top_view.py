"""Screen of `lockstep top`: the state of a server as lines that fit a terminal of any size. All functions are pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from lockstep.cli.cluster_tables import (
    HOSTS,
    MODELS,
    REPLICAS,
    REQUESTS,
    SESSIONS,
    STYLES,
    ModelRow,
    model_columns,
    model_rows,
)
from lockstep.cli.top_client import View, transitions
from lockstep.cli.top_layout import (
    GAP,
    Column,
    Row,
    Section,
    allot,
    head_line,
    joined,
    side_by_side,
    table_lines,
    text_of,
)
from lockstep.cluster.budget import NO_LIMIT, memory_of
from lockstep.cluster.events import ClusterEvent
from lockstep.cluster.snapshot import EngineSnapshot
from lockstep.server.request_rows import RequestRow
from lockstep.shown import duration, percent, printable, rate, size

WIDE = 130
"""Minimum width in cells at which sessions and events are side by side."""
_MAX_BAR = 24
"""Maximum width of a bar in cells."""
SORTS = ("", "MODEL", "STATE", "RUN", "WAIT", "TOK/S", "TTFT p50", "p95", "KV", "HITS", "SESSIONS", "REQUESTS", "IDLE")
"""Heads of columns that models can be sorted by, in the order of the key ``s``; empty: the manifest's order."""


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """Display options, which keys change."""

    sort: str = ""
    is_reversed: bool = False
    is_paused: bool = False
    offset: int = 0
    """Number of models above the visible ones."""

    def press(self, key: str, num_models: int) -> ViewOptions:
        """Options after a key; unchanged for keys without a function."""
        if key in ("s", "S"):
            step = 1 if key == "s" else -1
            return replace(self, sort=SORTS[(SORTS.index(self.sort) + step) % len(SORTS)], offset=0)
        if key == "r":
            return replace(self, is_reversed=not self.is_reversed)
        if key in ("p", " "):
            return replace(self, is_paused=not self.is_paused)
        moves = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": 10, "pageup": -10}
        moves |= {"home": -num_models, "end": num_models}
        return replace(self, offset=min(max(0, self.offset + moves.get(key, 0)), max(0, num_models - 1)))


def view_lines(view: View, options: ViewOptions, width: int, height: int | None, keys: str = "") -> list[Text]:
    """Lines of the screen.

    Args:
        width: maximum cells of a line.
        height: exact number of lines; None: as many as the content has.
        keys: last line; empty: none.
    """
    head, foot = _header(view, width), [Text(keys, "dim")] if keys else []
    if options.is_paused and foot:
        foot = [Text.assemble(("paused ", "bold yellow"), (keys, "dim"))]
    memory, models = Section(None, _memory(view, width)), _models(view, options, width)
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
        lines += side_by_side(sessions.fit(heights[-1]), events.fit(heights[-1]), half)
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
    server, cluster, stats = view.server, view.server.cluster, view.server.stats
    generated = [each.tokens_per_s for each in stats.engines if each.tokens_per_s is not None]
    first = [
        Text.assemble(("lockstep top", "bold"), GAP, (printable(cluster.cluster), "bold cyan")),
        Text(printable(server.status), STYLES.get(server.status, "bold red")),
        *(Text(words) for words in _kernels(each.engine for each in cluster.replicas)),
        Text(f"up {text_of(stats.uptime_s, duration)}"),
        Text(printable(server.version)),
        Text(view.url, "dim"),
    ]
    in_engines = sum(engine.num_waiting for engine in stats.engines)
    waiting = sum(model.num_waiting for model in cluster.models) + in_engines
    running = max(0, sum(model.num_running for model in cluster.models) - in_engines)
    second = [
        _number("running", running),
        _number("waiting", waiting, style="bold yellow" if waiting else "bold"),
        _number("tokens/s", sum(generated) if generated else None, rate),
        _number("requests/s", stats.requests_per_s, rate),
        _number("sessions", cluster.sessions_live),
        _number("requests", cluster.counters.requests_total),
        _number("promotions", cluster.counters.promotions),
        _number("demotions", cluster.counters.demotions),
    ]
    warnings = [Text(printable(words), "yellow") for words in (*cluster.warnings, *cluster.reasons)]
    shown = [*warnings[:2], *([Text(f"… {len(warnings) - 2} more", "dim")] if len(warnings) > 2 else [])]
    error = [Text(f"reconnecting: {printable(view.error)}", "bold red")] if view.error else []
    return [joined(first, width), *error, joined(second, width), *shown]


def _number(name: str, value: float | None, form: Callable[[float], str] = str, style: str = "bold") -> Text:
    return Text.assemble(f"{name} ", (text_of(value, form), style))


def _kernels(engines: Iterable[EngineSnapshot | None]) -> Iterable[str]:
    """Distinct pairs of instruction set and threads of the loaded models."""
    return dict.fromkeys(f"{each.isa}, {each.threads} threads" for each in engines if each and each.isa)


def _memory(view: View, width: int) -> list[Text]:
    """A bar for each budget and for each tier of the KV store."""
    cells = max(8, min(_MAX_BAR, width - 60))
    rows = []
    for budget in view.server.cluster.budgets:
        if budget.effective_bytes is None and not budget.used_bytes:
            continue
        if budget.effective_bytes is None:
            name = memory_of(printable(budget.name))
            rows.append(Text.assemble((name, "cyan"), f"  {size(budget.used_bytes)} in use, {NO_LIMIT}"))
            continue
        bar = _bar(budget.used_bytes, budget.effective_bytes, cells)
        rows.append(Text.assemble((f"{printable(budget.name):<12}", "cyan"), bar))
    for tier in view.server.stats.tiers:
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


def _bar(used: int, whole: int, cells: int) -> Text:
    share = min(1.0, used / whole) if whole else 0.0
    full = round(share * cells) or int(used > 0)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    text = f" {size(used):>8} of {size(whole):<8} {percent(share):>4}"
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"), text)


def _table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, empty: str = "") -> Section:
    """Table as a section; without rows it has the text ``empty``."""
    head, *lines = table_lines(columns, rows, width)
    return Section(head, lines or [Text(empty, "dim")])


def _models(view: View, options: ViewOptions, width: int) -> Section:
    mark = " ▲" if options.is_reversed else " ▼"
    shown = model_columns(MODELS, view.server.cluster, view.server.stats.engines)
    columns = [each._replace(head=each.head + mark) if each.head == options.sort else each for each in shown]
    rows = model_rows(view.server.cluster, view.server.stats.engines)
    return _table(columns, _sorted(rows, options), width)._replace(offset=options.offset)


def _sorted(rows: list[ModelRow], options: ViewOptions) -> list[ModelRow]:
    """Sort numbers from the largest and words from A. Absent values are last, and ties have the manifest's order."""
    column = next((each for each in MODELS if each.head == options.sort), None)
    if column is None:
        return rows[::-1] if options.is_reversed else rows
    key = column.key or column.value
    known = [(value, row) for row in rows if (value := key(row)) is not None]
    known.sort(key=lambda each: each[0], reverse=column.is_word == options.is_reversed)
    return [row for _, row in known] + [row for row in rows if key(row) is None]


def _hosts(view: View, width: int) -> list[Section]:
    """Sections of hosts and of their replicas; empty if all models run on one machine."""
    cluster = view.server.cluster
    hosts = [_table(HOSTS, cluster.hosts, width)] if cluster.hosts else []
    return hosts + ([_table(REPLICAS, cluster.places, width)] if cluster.places else [])


def _requests(view: View, width: int) -> list[Section]:
    """Section of running and finished requests, the newest first; empty if the server does not list requests."""
    requests = view.server.requests
    if requests is None:
        return []
    section = _table(REQUESTS, requests, width, "none yet")
    return [section._replace(rows=section.rows + _replayed(requests))]


def _replayed(requests: Sequence[RequestRow]) -> list[Text]:
    """Line with the command that replays the newest recorded request; empty if the caller may not see commands."""
    for each in requests:
        for place in each.replay:
            if place.command is not None:
                command = f"{printable(place.command)}  (sequence {place.sequence} from step {place.step})"
                return [Text.assemble((f"replay of {printable(each.id)}: ", "dim"), command)]
    return []


def _sessions(view: View, width: int) -> Section:
    """Section of named sessions, the last used first."""
    sessions = sorted(view.server.cluster.sessions, key=lambda session: session.idle_s)
    return _table(SESSIONS, sessions, width, "none yet")


def _events(view: View, width: int) -> Section:
    """Section of events, the latest first; without events, of the snapshot's tier changes."""
    events = view.events or transitions(view.server.cluster)
    lines = [_event(event) for event in reversed(events)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Section(head_line("EVENTS", width), lines or [Text("none yet", "dim")])


def _event(event: ClusterEvent) -> Text:
    fields = {name: value for name, value in event.fields.items() if name not in ("at_s", "replica")}
    took = fields.pop("duration_ms", None)
    if event.type == "tier_changed":
        text = f"{fields.get('model')} {fields.get('from')} → {fields.get('to')}, {fields.get('reason')}"
    elif event.type == "hop":
        text = f"{fields.get('model')} → {fields.get('target')}"
    else:
        text = GAP.join(f"{name} {value}" for name, value in fields.items() if value is not None)
    tail = f", {took:,.0f} ms" if isinstance(took, int | float) and took >= 1 else ""
    style = "bold red" if event.type in ("kv_rejected", "worker_restarted") else "cyan"
    clock = time.strftime("%H:%M:%S", time.localtime(event.at_s))
    return Text.assemble((clock, "dim"), GAP, (printable(event.type), style), GAP, printable(text + tail))
