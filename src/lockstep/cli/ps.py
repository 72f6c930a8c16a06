"""`lockstep ps`: tables of a running cluster, and draining of its hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import msgspec
import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import Flag, with_flags
from lockstep.errors import UsageError
from lockstep.option_fields import Range
from lockstep.shown import size

if TYPE_CHECKING:
    from lockstep.bench.remote import RemoteServer
    from lockstep.cluster.snapshot import BudgetSnapshot, ClusterSnapshot, PlaceSnapshot

EXIT_LEFT = 1
"""Exit code if a drained host still has replicas after the time limit."""
DRAIN_LIMIT_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class PsFlags:
    """Flags of `lockstep ps`."""

    base_url: flags.BaseUrl = flags.DEFAULT_URL
    api_key: flags.ApiKey = None
    drain: Annotated[str | None, Flag(metavar="HOST")] = None
    """Move all replicas of a host to other hosts and wait until it has none; exit code 1 if some are left. A replica
    stops when its successor is ready. If the other hosts lack room: no change, exit code 2. HOST is a name or a unique
    address."""
    undrain: Annotated[str | None, Flag(metavar="HOST")] = None
    """Permit replicas on a drained host again."""
    wait: Annotated[float | None, Flag(metavar="SECONDS", shown="120"), Range(0, 86_400)] = None
    """Maximum seconds that --drain waits; 0: no waiting."""
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def ps(given: PsFlags) -> None:
    """Show a running cluster: models, hosts and replicas, budgets and counters; or drain one of its hosts."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.remote import RemoteServer
    from lockstep.cli.top_client import cluster_of

    drain, undrain, wait, as_json = given.drain, given.undrain, given.wait, given.as_json
    if drain is not None and undrain is not None:
        raise UsageError("--drain and --undrain are both given; give one of them")
    if wait is not None and drain is None:
        raise UsageError("--wait requires --drain HOST")
    with RemoteServer(Target.parse(given.base_url, given.api_key)) as remote:
        if drain is not None:
            _drain(remote, drain, DRAIN_LIMIT_S if wait is None else wait, as_json)
        elif undrain is not None:
            host = remote.delete(_path_of(undrain))
            print(json.dumps(host) if as_json else f"{host['name']} is no longer drained")
        elif as_json:
            print(json.dumps(remote.get("/v1/cluster")))
        else:
            print(text_of(cluster_of(remote)))


# -- draining ---------------------------------------------------------------------------------------------------------


def _path_of(host: str) -> str:
    return f"/v1/cluster/hosts/{quote(host, safe='')}/drain"


def _drain(remote: RemoteServer, name: str, limit_s: float, as_json: bool) -> None:
    """Drain a host and wait until it has no replicas; exit with `EXIT_LEFT` if it still has some at the time limit."""
    from lockstep.cli.top_client import cluster_of

    name = remote.post(_path_of(name), {})["name"]
    until_s = time.monotonic() + limit_s
    while not _is_empty(snapshot := cluster_of(remote), name) and time.monotonic() < until_s:
        time.sleep(min(POLL_S, max(0.0, until_s - time.monotonic())))
    is_empty = _is_empty(snapshot, name)
    places = [each for each in snapshot.places if (each.state != "ready" if is_empty else each.host == name)]
    if as_json:
        print(json.dumps({"host": name, "is_empty": is_empty, "places": msgspec.to_builtins(places)}))
    else:
        print(_drained(name, is_empty, places, limit_s))
    if not is_empty and limit_s:
        raise typer.Exit(EXIT_LEFT)


def _is_empty(snapshot: ClusterSnapshot, name: str) -> bool:
    """True if the snapshot shows the host as drained or lost, and without replicas."""
    hosts = [host for host in snapshot.hosts if host.name == name]
    return all(host.is_drained or not host.is_there for host in hosts) and not any(host.num_replicas for host in hosts)


def _drained(name: str, is_empty: bool, places: Sequence[PlaceSnapshot], limit_s: float) -> str:
    """A line about the host, and one about each of the replicas ``places``."""
    if is_empty:
        state = f"{name} is drained: it has no replicas"
    elif limit_s:
        state = f"{name} is draining; replicas left on it after {limit_s:g} s: {len(places)}"
    else:
        state = f"{name} is draining; replicas left on it: {len(places)}; `lockstep ps` shows the progress"
    return "\n".join([state, *map(_replica_text, places)])


def _replica_text(place: PlaceSnapshot) -> str:
    """A line about a replica on a draining host, or one that is not ready on its new host."""
    is_serving = place.state == "ready" and not place.reason
    return (
        f"{place.name} serves until its successor is ready"
        if is_serving
        else place.sentence or f"{place.name} is {place.state}"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def text_of(snapshot: ClusterSnapshot) -> str:
    """The output of `lockstep ps`: tables, reasons for missing replicas and models, budgets, counters and warnings.

    Models that share a replica show its bytes once, in the row of the first. Counters of zero are left out.
    """
    from lockstep.cli.cluster_tables import HOSTS, MODELS_WITH_BYTES, REPLICAS, model_columns, model_rows
    from lockstep.cli.top_layout import table_lines

    tables = [table_lines(model_columns(MODELS_WITH_BYTES, snapshot), model_rows(snapshot))]
    if snapshot.hosts or snapshot.places:
        tables += [table_lines(HOSTS, snapshot.hosts), table_lines(REPLICAS, snapshot.places)]
    counters = {name: value for name, value in msgspec.to_builtins(snapshot.counters).items() if value}
    counted = ", ".join(f"{name} {value}" for name, value in counters.items())
    return "\n".join(
        [
            "\n\n".join("\n".join(line.plain.rstrip() for line in table) for table in tables),
            "",
            *snapshot.reasons,
            *(_budget(budget) for budget in snapshot.budgets),
            f"sessions: {len(snapshot.sessions)} named, {snapshot.sessions_live} live",
            f"counters: {counted or 'all zero'}",
            *(f"warning: {warning}" for warning in snapshot.warnings),
        ]
    )


def _budget(budget: BudgetSnapshot) -> str:
    from lockstep.cluster.budget import NO_LIMIT, memory_of

    if budget.effective_bytes is None:
        return f"{memory_of(budget.name)}: {size(budget.used_bytes)} in use, {NO_LIMIT}"
    cut = ""
    if budget.declared_bytes is not None and budget.declared_bytes != budget.effective_bytes:
        cut = f", reduced from {size(budget.declared_bytes)} to the machine's memory"
    return f"{budget.name}: {size(budget.used_bytes)} of {size(budget.effective_bytes)} in use{cut}"
