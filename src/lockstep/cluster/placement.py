"""Placement preview: computes where the models of a manifest would run on this machine after startup, and what would
fail.

It reads local files, and downloads and loads nothing. The numbers come from the same functions as those at startup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from lockstep.artifacts.model import Adapter
from lockstep.artifacts.task import MERGE, Task
from lockstep.cluster.backend import Backend, OneModel, served_by
from lockstep.cluster.budget import (
    COLUMNS,
    BudgetRow,
    BudgetTable,
    BudgetVerdict,
    Need,
    cells_of,
    check,
    cut_texts,
    effective_budgets,
    predict,
)
from lockstep.cluster.manifest import HostedReplicas, Hosts, Manifest, ModelEntry, Tier
from lockstep.cluster.quantities import size_text
from lockstep.cluster.resolve import OpenedSource, has_device_alone, machine_of, must_be_fetched, weigh
from lockstep.engine.options import LoadOptions
from lockstep.errors import ArtifactError, ChatTemplateError, ConfigError
from lockstep.executors.stub import SCHEME as STUB
from lockstep.shown import aligned
from lockstep.spelling import listed

MAX_SOURCE_CHARS = 60
"""Maximum characters of a source in a table."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Result of a dry run of a manifest."""

    declared: Manifest
    served: Manifest
    """Manifest as the backend serves it."""
    table: BudgetTable
    """Budget table, without the models of `unknown`."""
    unknown: Mapping[str, str]
    """Reasons why a model's size is unknown, by id."""
    refusals: tuple[str, ...]
    """Errors that would prevent startup; empty: the cluster would start."""
    warnings: tuple[str, ...]
    """Warnings about settings that the author may not have intended."""
    tasks: Mapping[str, Task]
    """What models are for, by id, without remote models and those whose files are not here."""

    def row(self, id_: str) -> BudgetRow | None:
        """Row of one model; None: its size is unknown."""
        return next((row for row in self.table.rows if row.model == id_), None)

    @property
    def demands(self) -> dict[str, HostedReplicas]:
        """Replicas across hosts, by id of the model; empty if everything runs on this machine."""
        hosts = self.declared.hosts
        return {} if hosts is None else _demands(hosts, self.served, self.table)


def place(
    manifest: Manifest,
    backend: Backend | OneModel,
    base: LoadOptions,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """Compute the placement of a manifest. It takes the time to read file headers, and to hash files that are new.

    Args:
        environment: environment variables from which the API keys of remote models would be read.
    """
    served = served_by(manifest, backend)
    sources, unopened, broken = _open_sources(served, base)
    unknown: dict[str, str] = {}
    refusals: list[str] = []
    opened: list[ModelEntry] = []
    needs: dict[str, Need] = {}
    for entry in served.entries:
        if entry.tier is Tier.REMOTE and entry.remote is None:
            refusals.append(
                f"{entry.id}: a remote model needs `remote: {{base_url: …}}`; write it, or use --backend stub or pocket"
            )
            needs[entry.id] = Need(entry.id, entry.tier)
        elif entry.tier is Tier.REMOTE or entry.source in sources:
            opened.append(entry)
        elif entry.size_bytes is not None:
            key = repr((entry.source, entry.variant))
            needs[entry.id] = Need(entry.id, entry.tier, key, predict(entry.size_bytes, 0, 0))
        else:
            unknown[entry.id] = unopened[entry.source]
        if entry.tier is not Tier.REMOTE and entry.source in broken:
            refusals.append(f"{entry.id}: {unopened[entry.source]}")
    adapters: dict[str, Adapter] = {}
    for entry in opened:
        if entry.adapter is not None and entry.source in sources:
            try:
                adapters[entry.id] = sources[entry.source].open_adapter(entry.id, entry.adapter)
            except ArtifactError as error:
                refusals.append(f"{entry.id}: {error}")
    try:
        of_opened = replace(served, entries=tuple(opened))
        known = weigh(of_opened, sources, base, 0, has_device_alone(served), adapters).needs
        needs |= {need.model: need for need in known}
    except (ConfigError, ChatTemplateError) as error:
        refusals.append(str(error))
    budgets = effective_budgets(manifest.resources, machine_of(served))
    table = check([needs[entry.id] for entry in served.entries if entry.id in needs], budgets)
    refusals += [str(budget) for budget in table.budgets if budget.excess_bytes]
    absent = [f"{e.id}: {unknown[e.id]}" for e in served.entries if e.id in unknown and e.source not in broken]
    settings = (*manifest.notes, *_ineffective_settings(manifest), *_other_demands(served, table))
    warnings = (*settings, *_without_key(served, environment), *absent, *_size_warnings(table, unknown))
    tasks = {entry.id: entry.task or sources[entry.source].task for entry in opened if entry.source in sources}
    return Placement(manifest, served, table, unknown, tuple(refusals), warnings, tasks)


def _open_sources(served: Manifest, base: LoadOptions) -> tuple[dict[str, OpenedSource], dict[str, str], set[str]]:
    """Opened sources; reasons why others could not be opened; and those of them that a download would not fix."""
    sources: dict[str, OpenedSource] = {}
    unopened: dict[str, str] = {}
    broken: set[str] = set()
    for source in sorted({entry.source for entry in served.entries if entry.tier is not Tier.REMOTE}):
        try:
            if must_be_fetched(source, is_online=False):
                model = source.split(MERGE)[0]
                unopened[source] = f"{model} is not on this machine yet; `lockstep pull {model}` fetches it"
            else:
                sources[source] = OpenedSource.open(source, base)
        except ArtifactError as error:
            unopened[source] = str(error)
            broken.add(source)
    return sources, unopened, broken


def _ineffective_settings(manifest: Manifest) -> list[str]:
    """Warnings about settings that are valid but have no effect."""
    warnings = [
        f"{entry.id}: keep_alive has no effect, as a {entry.tier} model is never demoted for idling"
        for entry in manifest.entries
        if entry.keep_alive_s is not None and entry.tier is not Tier.STANDBY
    ]
    warnings += [
        f"{entry.id}: promotion_hint has no effect, as only standby models are promoted"
        for entry in manifest.entries
        if entry.promotes_on_intent and entry.tier is not Tier.STANDBY
    ]
    warnings += [
        f"{entry.id}: co_activation has no effect, as a remote model is never loaded"
        for entry in manifest.entries
        if entry.co_activation and entry.tier is Tier.REMOTE
    ]
    if manifest.resources.disk_kv_budget_bytes is not None:
        warnings.append("disk_kv_budget has no effect without --kv-dir DIR, the directory for KV files")
    if manifest.fallback is not None and manifest.routing is None:
        warnings.append("fallback: has no effect, as without `routing:` no request is routed")
    return warnings


def _demands(hosts: Hosts, served: Manifest, table: BudgetTable) -> dict[str, HostedReplicas]:
    first = {row.model: row.shares_with or row.model for row in table.rows}
    placed = [entry.id for entry in served.entries if entry.tier is not Tier.REMOTE]
    mates: dict[str, list[str]] = {}
    for id_ in placed:
        mates.setdefault(first.get(id_, id_), []).append(id_)
    return {id_: hosts.demand(mates[first.get(id_, id_)]) for id_ in placed}


def _other_demands(served: Manifest, table: BudgetTable) -> list[str]:
    """Warnings about models whose replicas differ from the manifest, because models of one artifact share them."""
    hosts = served.hosts
    if hosts is None:
        return []
    return [
        f"{id_}: has {demand.num} replicas, not {hosts.replicas[id_].num}, because models of one artifact share them"
        for id_, demand in _demands(hosts, served, table).items()
        if hosts.replicas.get(id_, demand) != demand
    ]


def _without_key(served: Manifest, environment: Mapping[str, str]) -> list[str]:
    names = {entry.id: entry.remote.api_key_env for entry in served.entries if entry.remote is not None}
    return [
        f"{id_}: {name}, which api_key_env names, is not set in the environment"
        for id_, name in names.items()
        if name is not None and not environment.get(name)
    ]


def _size_warnings(table: BudgetTable, unknown: Iterable[str]) -> list[str]:
    """Warnings about models of unknown size, and about models that can never be loaded."""
    warnings = []
    if unknown:
        warnings.append(f"the budgets do not include {listed(list(unknown))}; set `size:` to include it")
    warnings += [
        f"{row.model}: {row.verdict} beside the models that are declared resident"
        for row in table.rows
        if row.verdict is BudgetVerdict.NEVER_FITS
    ]
    return warnings + cut_texts(table.budgets)


def text_of(placement: Placement) -> str:
    """Text that `lockstep check` prints: one line for each model, then one for each budget."""
    tasks = placement.tasks if set(placement.tasks.values()) - {"generate"} else {}
    rows: list[Sequence[str]] = [("model", "tier", *(["task"] if tasks else []), "source", *COLUMNS)]
    for entry in placement.served.entries:
        row = placement.row(entry.id)
        cells = ("?", "?", "unknown", "unknown") if row is None else cells_of(row)
        task = [tasks.get(entry.id, "-")] if tasks else []
        source = _short(entry.source) if entry.adapter is None else f"{_short(entry.source)} + {_short(entry.adapter)}"
        rows.append((entry.id, entry.tier, *task, source, *cells))
    return "\n".join([aligned(rows), *map(str, placement.table.budgets), *_lines_of_hosts(placement)])


def _lines_of_hosts(placement: Placement) -> list[str]:
    hosts = placement.declared.hosts
    if hosts is None:
        return []
    links = "TLS" if hosts.tls_ca else "no TLS, prompts may be sent unencrypted" if hosts.allows_plain else "no TLS"
    ids_of: dict[str, list[str]] = {}
    for id_ in placement.demands:
        row = placement.row(id_)
        ids_of.setdefault(id_ if row is None else row.shares_with or id_, []).append(id_)
    groups = [f"{', '.join(ids)}: {_demand_text(placement.demands[ids[0]])}" for ids in ids_of.values()]
    return [
        f"hosts: Ray at {hosts.ray}; routing {hosts.routing.value}, max_imbalance {hosts.max_imbalance}; {links}",
        f"replicas of {'; '.join(groups)}",
    ]


def _demand_text(demand: HostedReplicas) -> str:
    amounts = [
        f"{size_text(int(amount))} of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in demand.resources.items()
    ]
    each = f", each {listed(amounts)}" if amounts else ""
    return f"{demand.num}{each}{', spread' if demand.spread else ''}"


def _short(source: str) -> str:
    plain = source.partition("?")[0] if source.startswith(STUB) else source
    return plain if len(plain) <= MAX_SOURCE_CHARS else f"{plain[: MAX_SOURCE_CHARS - 1]}…"
