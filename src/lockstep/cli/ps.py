"""`lockstep ps`: what a running cluster holds, in a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from lockstep.cli import options as flags
from lockstep.errors import RemoteError

if TYPE_CHECKING:
    from lockstep.cluster.snapshot import BudgetSnapshot, ClusterSnapshot, ModelSnapshot, ReplicaSnapshot

_WORDS = ("MODEL", "TIER", "STATE")
_NUMBERS = ("PREDICTED", "MEASURED", "RUNNING", "WAITING", "SESSIONS", "REQUESTS", "IDLE")


def ps(
    base_url: flags.BaseUrl = flags.DEFAULT_URL,
    api_key: flags.ApiKey = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Show the models of a running cluster, its budgets and its counters."""
    from lockstep.bench.protocol import Target
    from lockstep.bench.remote import Remote
    from lockstep.cluster.snapshot import ClusterSnapshot

    with Remote(Target.parse(base_url, api_key)) as remote:
        answer = remote.get("/v1/cluster")
    if as_json:
        print(json.dumps(answer))
        return
    try:
        snapshot = msgspec.convert(answer, ClusterSnapshot)
    except msgspec.ValidationError as error:
        raise RemoteError(f"{base_url} shows its cluster otherwise than this version reads it ({error})") from None
    print(text_of(snapshot))


def text_of(snapshot: ClusterSnapshot) -> str:
    """The table, then a line per budget, then the counters that are not zero. Bytes stand with the first model of those
    that share them."""
    from lockstep.report.document import Table, numbers, words
    from lockstep.report.text import to_lines

    replicas = {replica.key: replica for replica in snapshot.replicas}
    table = Table("", (*words(*_WORDS), *numbers(*_NUMBERS)))
    table.rows += [_row(model, replicas.get(model.replica or "")) for model in snapshot.models]
    notes = [f"{model.id}: {model.reason}" for model in snapshot.models if model.reason]
    counters = {name: value for name, value in msgspec.to_builtins(snapshot.counters).items() if value}
    counted = ", ".join(f"{name} {value}" for name, value in counters.items())
    return "\n".join(
        [
            to_lines(table),
            "",
            *notes,
            *(_budget(budget) for budget in snapshot.budgets),
            f"sessions: {len(snapshot.sessions)} named, {snapshot.sessions_live} live",
            f"counted: {counted or 'nothing yet'}",
            *(f"warning: {warning}" for warning in snapshot.warnings),
        ]
    )


def size(num_bytes: int) -> str:
    """Bytes as manifests write them: GB is 10^9."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


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


def _budget(budget: BudgetSnapshot) -> str:
    if budget.effective_bytes is None:
        return f"{budget.name}: {size(budget.used_bytes)} in use, unbounded"
    cut = ""
    if budget.declared_bytes is not None and budget.declared_bytes != budget.effective_bytes:
        cut = f", cut from {size(budget.declared_bytes)} to what the machine has"
    return f"{budget.name}: {size(budget.used_bytes)} of {size(budget.effective_bytes)} in use{cut}"
