"""View of `lockstep top`: the state of a server as lines that fit a terminal of any size. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from lockstep.cli.cluster_tables import HOSTS, MODELS, REPLICAS, REQUESTS, SESSIONS, STYLES, ModelRow, model_rows
from lockstep.cli.top_client import View, transitions
from lockstep.cli.top_layout import (
    GAP,
    Column,
    Row,
    Section,
    allot,
    beside,
    grid,
    head_line,
    joined,
    text_of,
)
from lockstep.cluster.budget import NO_LIMIT, memory_of
from lockstep.cluster.events import ClusterEvent
from lockstep.cluster.snapshot import EngineSnapshot
from lockstep.server.request_rows import RequestRow
from lockstep.shown import duration, percent, printable, rate, size

WIDE = 130
"""Columns from which on sessions and events stand beside each other."""
_TOP_BAR = 24
"""Cells of a bar, at most."""
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
        moves = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": 10, "pageup": -10}
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
        Text(printable(reading.status), STYLES.get(reading.status, "bold red")),
        *(Text(words) for words in _kernels(each.engine for each in cluster.replicas)),
        Text(f"up {text_of(stats.uptime_s, duration)}"),
        Text(printable(reading.version)),
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
    told = [Text(printable(words), "yellow") for words in (*cluster.warnings, *cluster.reasons)]
    notes = [*told[:2], *([Text(f"… {len(told) - 2} more", "dim")] if len(told) > 2 else [])]
    trouble = [Text(f"trying again: {printable(view.trouble)}", "bold red")] if view.trouble else []
    return [joined(first, width), *trouble, joined(second, width), *notes]


def _number(name: str, value: float | None, form: Callable[[float], str] = str, style: str = "bold") -> Text:
    return Text.assemble(f"{name} ", (text_of(value, form), style))


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


def _bar(used: int, whole: int, cells: int) -> Text:
    share = min(1.0, used / whole) if whole else 0.0
    full = round(share * cells) or int(used > 0)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    text = f" {size(used):>8} of {size(whole):<8} {percent(share):>4}"
    return Text.assemble(("█" * full, style), ("░" * (cells - full), "dim"), text)


def _table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, empty: str = "") -> Section:
    """A table as a section; in the place of no rows a few words."""
    head, *lines = grid(columns, rows, width)
    return Section(head, lines or [Text(empty, "dim")])


def _models(view: View, look: ViewOptions, width: int) -> Section:
    mark = " ▲" if look.is_reversed else " ▼"
    columns = [each._replace(head=each.head + mark) if each.head == look.sort else each for each in MODELS]
    rows = model_rows(view.reading.cluster, view.reading.stats.engines)
    return _table(columns, _sorted(rows, look), width)._replace(offset=look.offset)


def _sorted(rows: list[ModelRow], look: ViewOptions) -> list[ModelRow]:
    """Numbers from the largest, words from A; what has no value is last, and ties stay as the manifest has them."""
    column = next((each for each in MODELS if each.head == look.sort), None)
    if column is None:
        return rows[::-1] if look.is_reversed else rows
    key = column.key or column.value
    known = [(value, row) for row in rows if (value := key(row)) is not None]
    known.sort(key=lambda each: each[0], reverse=column.is_word == look.is_reversed)
    return [row for _, row in known] + [row for row in rows if key(row) is None]


def _hosts(view: View, width: int) -> list[Section]:
    """Hosts, and the replicas on them; none where everything runs on one machine."""
    cluster = view.reading.cluster
    hosts = [_table(HOSTS, cluster.hosts, width)] if cluster.hosts else []
    return hosts + ([_table(REPLICAS, cluster.places, width)] if cluster.places else [])


def _requests(view: View, width: int) -> list[Section]:
    """Requests that are answered and were, the newest first; none where the server does not list them."""
    requests = view.reading.requests
    if requests is None:
        return []
    section = _table(REQUESTS, requests, width, "none yet")
    return [section._replace(rows=section.rows + _replayed(requests))]


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
    sessions = sorted(view.reading.cluster.sessions, key=lambda session: session.idle_s)
    return _table(SESSIONS, sessions, width, "none is named")


def _events(view: View, width: int) -> Section:
    """Events, the latest first; the changes of tier that the snapshot has, where there are no others."""
    events = view.events or transitions(view.reading.cluster)
    lines = [_event(event) for event in reversed(events)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Section(head_line("EVENTS", width), lines or [Text("none yet", "dim")])


def _event(event: ClusterEvent) -> Text:
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
