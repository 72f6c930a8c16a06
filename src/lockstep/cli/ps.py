"""`lockstep ps`: a running cluster in tables, and the draining of its hosts."""

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
"""A host that was drained still has replicas."""
DRAIN_LIMIT_S = 120.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class PsFlags:
    """Flags of `lockstep ps`."""

    base_url: flags.BaseUrl = flags.DEFAULT_URL
    api_key: flags.ApiKey = None
    drain: Annotated[str | None, Flag(metavar="HOST")] = None
    """Move all replicas of a host to others and wait until it has none; exit code 1 if some are left. Each stays until
    its successor is ready; exit code 2, and no change, if other hosts lack room. HOST is a name, or an address that no
    other host has."""
    undrain: Annotated[str | None, Flag(metavar="HOST")] = None
    """Let a host that was drained have replicas again."""
    wait: Annotated[float | None, Flag(metavar="SECONDS"), Range(0, 86_400)] = None
    """For --drain, instead of 120; 0: not at all."""
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
        raise UsageError("--wait is given without --drain HOST, which alone waits for something")
    with RemoteServer(Target.parse(given.base_url, given.api_key)) as remote:
        if drain is not None:
            _drain(remote, drain, DRAIN_LIMIT_S if wait is None else wait, as_json)
        elif undrain is not None:
            host = remote.delete(_path_of(undrain))
            print(json.dumps(host) if as_json else f"{host['name']} may have replicas again")
        elif as_json:
            print(json.dumps(remote.get("/v1/cluster")))
        else:
            print(text_of(cluster_of(remote)))


# -- draining ---------------------------------------------------------------------------------------------------------


def _path_of(host: str) -> str:
    return f"/v1/cluster/hosts/{quote(host, safe='')}/drain"


def _drain(remote: RemoteServer, name: str, limit_s: float, as_json: bool) -> None:
    """Drain a host and wait for its replicas to leave; ends the command with `EXIT_LEFT` where some did not in time."""
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
    """True if a drained host has no replicas any more; never before the server has heard that it is drained."""
    hosts = [host for host in snapshot.hosts if host.name == name]
    return all(host.is_drained or not host.is_there for host in hosts) and not any(host.num_replicas for host in hosts)


def _drained(name: str, is_empty: bool, places: Sequence[PlaceSnapshot], limit_s: float) -> str:
    """A sentence on the host, and one on each replica that is left there or, if none is, is not ready elsewhere."""
    if is_empty:
        said = f"{name} is drained: it has no replicas"
    elif limit_s:
        said = f"{name} is drained; replicas that are on it still after {limit_s:g} s: {len(places)}"
    else:
        said = f"{name} is drained; replicas that are to leave it: {len(places)}; `lockstep ps` shows when they have"
    return "\n".join([said, *map(_left, places)])


def _left(place: PlaceSnapshot) -> str:
    """Sentence on a replica that a drain waits for, or that is not ready elsewhere."""
    is_kept = place.state == "ready" and not place.reason
    return (
        f"{place.name} answers until its successor is ready"
        if is_kept
        else place.sentence or f"{place.name} is {place.state}"
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def text_of(snapshot: ClusterSnapshot) -> str:
    """The tables, then why something is not, then a line per budget, then the counters that are not zero. Bytes stand
    with the first model of those that share them."""
    from lockstep.cli.cluster_tables import HOSTS, MODELS_WITH_BYTES, REPLICAS, model_rows
    from lockstep.cli.top_layout import grid

    tables = [grid(MODELS_WITH_BYTES, model_rows(snapshot))]
    if snapshot.hosts or snapshot.places:
        tables += [grid(HOSTS, snapshot.hosts), grid(REPLICAS, snapshot.places)]
    counters = {name: value for name, value in msgspec.to_builtins(snapshot.counters).items() if value}
    counted = ", ".join(f"{name} {value}" for name, value in counters.items())
    return "\n".join(
        [
            "\n\n".join("\n".join(line.plain.rstrip() for line in table) for table in tables),
            "",
            *snapshot.reasons,
            *(_budget(budget) for budget in snapshot.budgets),
            f"sessions: {len(snapshot.sessions)} named, {snapshot.sessions_live} live",
            f"counted: {counted or 'nothing yet'}",
            *(f"warning: {warning}" for warning in snapshot.warnings),
        ]
    )


def _budget(budget: BudgetSnapshot) -> str:
    from lockstep.cluster.budget import NO_LIMIT, memory_of

    if budget.effective_bytes is None:
        return f"{memory_of(budget.name)}: {size(budget.used_bytes)} in use, {NO_LIMIT}"
    cut = ""
    if budget.declared_bytes is not None and budget.declared_bytes != budget.effective_bytes:
        cut = f", cut from {size(budget.declared_bytes)} to what the machine has"
    return f"{budget.name}: {size(budget.used_bytes)} of {size(budget.effective_bytes)} in use{cut}"
