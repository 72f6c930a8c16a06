"""`lockstep ps`: a running cluster in tables, and the draining of its hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import msgspec
import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import Flag, with_flags
from lockstep.errors import RemoteError, UsageError
from lockstep.option_fields import Range
from lockstep.shown import size

if TYPE_CHECKING:
    from lockstep.bench.remote import Remote
    from lockstep.cluster.snapshot import (
        BudgetSnapshot,
        ClusterSnapshot,
        HostSnapshot,
        ModelSnapshot,
        PlaceSnapshot,
        ReplicaSnapshot,
    )

EXIT_LEFT = 1
"""A host that was drained still has replicas."""
DRAIN_LIMIT_S = 120.0
POLL_S = 0.5
_WORDS = ("MODEL", "TIER", "STATE")
_NUMBERS = ("PREDICTED", "MEASURED", "RUNNING", "WAITING", "SESSIONS", "REQUESTS", "IDLE")


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
    from lockstep.bench.remote import Remote

    drain, undrain, wait, as_json = given.drain, given.undrain, given.wait, given.as_json
    if drain is not None and undrain is not None:
        raise UsageError("--drain and --undrain are both given; give one of them")
    if wait is not None and drain is None:
        raise UsageError("--wait is given without --drain HOST, which alone waits for something")
    with Remote(Target.parse(given.base_url, given.api_key)) as remote:
        if drain is not None:
            _drain(remote, drain, DRAIN_LIMIT_S if wait is None else wait, as_json)
        elif undrain is not None:
            host = remote.delete(_path_of(undrain))
            print(json.dumps(host) if as_json else f"{host['name']} may have replicas again")
        elif as_json:
            print(json.dumps(remote.get("/v1/cluster")))
        else:
            print(text_of(_snapshot(remote)))


def _snapshot(remote: Remote) -> ClusterSnapshot:
    from lockstep.cluster.snapshot import ClusterSnapshot

    try:
        return msgspec.convert(remote.get("/v1/cluster"), ClusterSnapshot)
    except msgspec.ValidationError as error:
        url = remote.target.url
        raise RemoteError(f"{url} shows its cluster otherwise than this version reads it ({error})") from None


# -- draining ---------------------------------------------------------------------------------------------------------


def _path_of(host: str) -> str:
    return f"/v1/cluster/hosts/{quote(host, safe='')}/drain"


def _drain(remote: Remote, name: str, limit_s: float, as_json: bool) -> None:
    """Drain a host and wait for its replicas to leave; ends the command with `EXIT_LEFT` where some did not in time."""
    name = remote.post(_path_of(name), {})["name"]
    until_s = time.monotonic() + limit_s
    while not _is_empty(snapshot := _snapshot(remote), name) and time.monotonic() < until_s:
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
    from lockstep.report.document import Table, numbers, words
    from lockstep.report.text import to_lines

    replicas = {replica.key: replica for replica in snapshot.replicas}
    table = Table("", (*words(*_WORDS), *numbers(*_NUMBERS)))
    table.rows += [_row(model, replicas.get(model.replica or "")) for model in snapshot.models]
    tables = [table]
    if snapshot.hosts or snapshot.places:
        hosts = Table("", (*words("HOST", "ADDRESS", "STATE"), *numbers("REPLICAS"), *words("FREE")))
        hosts.rows += map(host_row, snapshot.hosts)
        columns = ("RUNNING", "ROUTED", "RETRIED", "CACHED", "STARTS", "AWAY", "PID")
        places = Table("", (*words("REPLICA", "STATE", "HOST", "ADDRESS"), *numbers(*columns)))
        places.rows += map(place_row, snapshot.places)
        tables += [hosts, places]
    notes = [f"{model.id}: {model.reason}" for model in snapshot.models if model.reason]
    notes += [place.sentence for place in snapshot.places if place.sentence and place.sentence not in snapshot.warnings]
    counters = {name: value for name, value in msgspec.to_builtins(snapshot.counters).items() if value}
    counted = ", ".join(f"{name} {value}" for name, value in counters.items())
    return "\n".join(
        [
            "\n\n".join(map(to_lines, tables)),
            "",
            *notes,
            *(_budget(budget) for budget in snapshot.budgets),
            f"sessions: {len(snapshot.sessions)} named, {snapshot.sessions_live} live",
            f"counted: {counted or 'nothing yet'}",
            *(f"warning: {warning}" for warning in snapshot.warnings),
        ]
    )


def _row(model: ModelSnapshot, replica: ReplicaSnapshot | None) -> tuple[str, ...]:
    name = model.id if model.set is None else f"{model.set}.{model.id}"
    predicted = measured = "-"
    if replica is not None and replica.models[:1] not in ((), (model.id,)):
        predicted = f"with {replica.models[0]}"
    elif replica is not None:
        predicted = size(replica.predicted_bytes)
        measured = "-" if replica.measured_bytes is None else size(replica.measured_bytes)
    return (
        name,
        model.tier,
        model.state,
        predicted,
        measured,
        str(model.num_running),
        str(model.num_waiting),
        f"{model.num_sessions}/{'-' if model.max_active_sessions is None else model.max_active_sessions}",
        str(model.num_requests),
        "-" if model.idle_s is None else f"{model.idle_s:.0f} s",
    )


def host_row(host: HostSnapshot) -> tuple[str, ...]:
    """Cells of a host: name, address, state, replicas and free resources."""
    is_so = (("lost", not host.is_there), ("drained", host.is_drained))
    states = ", ".join(state for state, is_it in is_so if is_it) or "there"
    free = ", ".join(_free(name, amount, host.free) for name, amount in host.resources.items()) if host.is_there else ""
    return host.name, host.address, states, str(host.num_replicas), free or "-"


def _free(name: str, amount: float, free: Mapping[str, float]) -> str:
    left = free.get(name, 0.0)
    if name == "memory":
        return f"{size(int(left))} of {size(int(amount))} memory"
    return f"{left:g} of {amount:g} {name}"


def place_row(place: PlaceSnapshot) -> tuple[str, ...]:
    """Cells of a replica: name, state, host, address, counts of requests, blocks, starts and losses, and its pid."""
    numbers = (place.num_running, place.num_routed, place.num_retried, place.num_cached_blocks)
    return (
        place.name,
        place.state,
        place.host or "-",
        place.address or "-",
        *map(str, (*numbers, place.num_starts)),
        f"{place.num_away}x, {place.away_s:.1f} s" if place.num_away else "-",
        str(place.pid) if place.pid else "-",
    )


def _budget(budget: BudgetSnapshot) -> str:
    from lockstep.cluster.budget import NO_LIMIT, memory_of

    if budget.effective_bytes is None:
        return f"{memory_of(budget.name)}: {size(budget.used_bytes)} in use, {NO_LIMIT}"
    cut = ""
    if budget.declared_bytes is not None and budget.declared_bytes != budget.effective_bytes:
        cut = f", cut from {size(budget.declared_bytes)} to what the machine has"
    return f"{budget.name}: {size(budget.used_bytes)} of {size(budget.effective_bytes)} in use{cut}"
