"""Budgets in bytes, and what each model needs of them. Closed: sizes of files and of the machine enter as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from lockstep.cluster.manifest import Resources, Tier
from lockstep.shown import aligned, size

WEIGHTS_FACTOR = 1.03
"""What loaded weights take at most, in parts of their files: Q4_K as it is packed."""
COLUMNS = ("resident", "in memory", "size", "verdict")
"""Of a table, after who it is about."""
GPU_BUDGET = "gpu_budget"
RAM_BUDGET = "ram_budget"
NO_LIMIT = "no limit set"


class Origin(StrEnum):
    """Source of a size."""

    DECLARED = "declared"
    PREDICTED = "predicted"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one replica takes."""

    resident_bytes: int
    """Under `gpu_budget`, while it is resident: weights and KV pool."""
    standby_bytes: int = 0
    """Under `ram_budget`, while it is not: weights that are kept ready."""
    host_bytes: int = 0
    """Under `ram_budget`, always: KV on the host."""
    origin: Origin = Origin.PREDICTED


def predict(
    declared_bytes: int | None,
    file_bytes: int,
    kv_bytes: int,
    host_bytes: int = 0,
    factor: float = WEIGHTS_FACTOR,
) -> Footprint:
    """Predict what a replica will take, before it was ever loaded.

    Args:
        declared_bytes: what the manifest says that it needs, KV pool included; a stub declares its weights, and has no
            KV.
        file_bytes: of the artifact's weights.
        kv_bytes: of the KV pool on the device.
        host_bytes: of the KV on the host.
    """
    if declared_bytes is not None:
        return Footprint(declared_bytes, declared_bytes, host_bytes, Origin.DECLARED)
    weights = round(file_bytes * factor)
    return Footprint(weights + kv_bytes, weights, host_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory that there is to share."""

    memory_bytes: int
    """That this process may still take. Loading takes no more at its height than the loaded model at its end."""
    accelerator_bytes: int | None = None
    """None: there is no accelerator, and resident models live in memory as well."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One ceiling, and what models need under it."""

    name: str
    declared_bytes: int | None
    """None: the manifest sets none."""
    effective_bytes: int | None
    """What holds; None: nothing bounds it."""
    needed_bytes: int = 0
    """By the models that were counted."""

    @property
    def is_cut(self) -> bool:
        """True if the machine has less than the manifest declares."""
        return None not in (self.declared_bytes, self.effective_bytes) and self.declared_bytes != self.effective_bytes

    @property
    def excess_bytes(self) -> int:
        return 0 if self.effective_bytes is None else max(0, self.needed_bytes - self.effective_bytes)

    def adding(self, num_bytes: int) -> Budget:
        """The same ceiling with a further need."""
        return replace(self, needed_bytes=self.needed_bytes + num_bytes)

    def __str__(self) -> str:
        """One line: what is needed of it, and whether the machine has it."""
        needed = f"{self.name}: {size(self.needed_bytes)} needed"
        if self.effective_bytes is None:
            return f"{memory_of(self.name)}: {size(self.needed_bytes)} needed, {NO_LIMIT}"
        text = f"{needed} of {size(self.effective_bytes)}"
        if self.is_cut and self.declared_bytes is not None:
            text += f" (declared {size(self.declared_bytes)}; the machine has no more)"
        return f"{text}, {size(self.excess_bytes)} too much" if self.excess_bytes else text


def memory_of(name: str) -> str:
    """The memory that a budget would limit, in words; for budgets that are not set, also where there is no GPU."""
    return {GPU_BUDGET: "memory for models", RAM_BUDGET: "memory for standby models"}.get(name, name)


class Budgets(NamedTuple):
    """Both ceilings of a manifest."""

    gpu: Budget
    ram: Budget


def effective_budgets(resources: Resources, machine: Machine | None) -> Budgets:
    """Budgets that the machine can keep.

    What is declared is cut in proportion where both together exceed the memory that they share; what is not declared is
    what the others leave.

    Args:
        machine: None: sizes are fictitious (stubs), and nothing is cut.
    """
    gpu, ram = resources.gpu_budget_bytes, resources.ram_budget_bytes
    effective: Sequence[int | None] = (gpu, ram)
    if machine is not None and machine.accelerator_bytes is not None:
        effective = [*_share([gpu], machine.accelerator_bytes), *_share([ram], machine.memory_bytes)]
    elif machine is not None:
        effective = _share([gpu, ram], machine.memory_bytes)
    return Budgets(Budget(GPU_BUDGET, gpu, effective[0]), Budget(RAM_BUDGET, ram, effective[1]))


def _share(declared: Sequence[int | None], available: int) -> list[int]:
    """Shares of one memory; together never more than there is."""
    total = sum(each or 0 for each in declared)
    left = max(0, available - total) // max(1, sum(each is None for each in declared))
    return [left if each is None else each if total <= available else each * available // total for each in declared]


@dataclass(frozen=True, slots=True)
class Need:
    """One model of a manifest."""

    model: str
    tier: Tier
    replica: str | None = None
    """Key of its replica, which other models may share; None: it is remote."""
    footprint: Footprint | None = None
    """Of the replica; None: it is remote."""


class Verdict(StrEnum):
    """Verdict on the room that a model needs."""

    FITS = "fits"
    EXCEEDS = "over budget"
    """With those before it, it needs more than the budget."""
    NEVER_FITS = "can never be loaded"
    """Beside the models that are declared resident; it would be refused whenever it is requested."""
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Row:
    """Need and verdict of one model."""

    model: str
    tier: Tier
    verdict: Verdict
    shares_with: str | None = None
    """Not None: it is the artifact of this model, and adds nothing."""
    gpu_bytes: int = 0
    ram_bytes: int = 0
    origin: Origin | None = None
    """None: it is remote."""


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """Placement table: the need of each model, and whether all fit."""

    rows: tuple[Row, ...]
    """In order of definition."""
    budgets: Budgets

    @property
    def is_kept(self) -> bool:
        """True where the manifest can be booted."""
        return all(row.verdict is not Verdict.EXCEEDS for row in self.rows)


def check(needs: Sequence[Need], ceilings: Budgets) -> BudgetTable:
    """The placement of a manifest at boot, its needs counted anew.

    A replica is resident when one of its models is, and counts where the first of its models stands.
    """
    resident = {need.replica for need in needs if need.tier is Tier.RESIDENT}
    footprints = {need.replica: need.footprint for need in needs if need.footprint is not None}
    pinned_bytes = sum(each.resident_bytes for replica, each in footprints.items() if replica in resident)
    owners: dict[str, str] = {}
    rows: list[Row] = []
    gpu, ram = (replace(ceiling, needed_bytes=0) for ceiling in ceilings)
    for need in needs:
        if need.replica is None or need.footprint is None:
            rows.append(Row(need.model, need.tier, Verdict.REMOTE))
            continue
        row = _row(need, need.footprint, need.replica in resident, owners.get(need.replica))
        owners.setdefault(need.replica, need.model)
        gpu, ram = gpu.adding(row.gpu_bytes), ram.adding(row.ram_bytes)
        promoted = replace(gpu, needed_bytes=pinned_bytes + need.footprint.resident_bytes)
        if (row.gpu_bytes and gpu.excess_bytes) or (row.ram_bytes and ram.excess_bytes):
            row = replace(row, verdict=Verdict.EXCEEDS)
        elif need.replica not in resident and promoted.excess_bytes:
            row = replace(row, verdict=Verdict.NEVER_FITS)
        rows.append(row)
    return BudgetTable(tuple(rows), Budgets(gpu, ram))


def _row(need: Need, footprint: Footprint, is_resident: bool, owner: str | None) -> Row:
    if owner is not None:
        return Row(need.model, need.tier, Verdict.FITS, owner, origin=footprint.origin)
    gpu_bytes = footprint.resident_bytes if is_resident else 0
    ram_bytes = footprint.host_bytes + (0 if is_resident else footprint.standby_bytes)
    return Row(need.model, need.tier, Verdict.FITS, None, gpu_bytes, ram_bytes, footprint.origin)


def table_text(table: BudgetTable) -> str:
    """The table as a refused boot tells it: a line a model, then a line a budget."""
    models = [("model", "tier", *COLUMNS), *((row.model, row.tier, *cells_of(row)) for row in table.rows)]
    return "\n".join([aligned(models), *map(str, table.budgets)])


def cells_of(row: Row) -> tuple[str, str, str, str]:
    """A model's cells under `COLUMNS`."""
    if row.origin is None:
        return "-", "-", "-", row.verdict
    if row.shares_with is not None:
        return f"with {row.shares_with}", "-", row.origin, row.verdict
    gpu, ram = (size(each) if each else "-" for each in (row.gpu_bytes, row.ram_bytes))
    return gpu, ram, row.origin, row.verdict


def cut_texts(budgets: Budgets) -> list[str]:
    """A sentence for each budget of which the machine has less than the manifest declares."""
    return [
        f"{budget.name} is cut from {size(budget.declared_bytes or 0)} to "
        f"{size(budget.effective_bytes or 0)}, which this machine can give"
        for budget in budgets
        if budget.is_cut
    ]


def refusal(table: BudgetTable) -> str:
    """Refusal of a boot over budget: which budgets, by how much, and what would help; empty: nothing is exceeded."""
    if table.is_kept:
        return ""
    over = [budget for budget in table.budgets if budget.excess_bytes]
    parts = [f"{each.name} ({size(each.needed_bytes)} of {size(each.effective_bytes or 0)})" for each in over]
    first, it = over[0], "it" if len(over) == 1 else "them"
    helps = f"raise {it}, or declare fewer models resident" if first.name == GPU_BUDGET else "raise it, or drop models"
    if first.is_cut:
        helps = "the machine has no more for it; declare fewer or smaller models"
    return f"the models need more than {' and '.join(parts)}: {helps}"


class Ledger:
    """Bytes of one budget while a plan is made: free, becoming free, and for whom. Depends on no replica.

    Args:
        room: free bytes; negative when more is taken than the budget allows.
        coming: bytes that become free, each with the key of whom they were freed for; None: whoever needs them.
        claims: who may claim, and how much; what was freed for others, or is more, is for whoever needs it.
    """

    def __init__(self, room: int, coming: Iterable[tuple[str | None, int]], claims: Mapping[str, int]) -> None:
        self.room = max(0, room)
        """Free and not claimed yet."""
        self.missing = max(0, -room)
        """Bytes by which the budget is exceeded."""
        self._spare = 0
        self._own = dict.fromkeys(claims, 0)
        for key, num_bytes in coming:
            self.add_coming(key, num_bytes)
        for key, claimed in claims.items():
            self._spare += max(0, self._own[key] - claimed)
            self._own[key] = min(self._own[key], claimed)

    def add_coming(self, key: str | None, num_bytes: int) -> None:
        """Add bytes that become free."""
        if key in self._own:
            self._own[key] += num_bytes
        else:
            self._spare += num_bytes

    def lacking(self, key: str, num_bytes: int) -> int:
        """Bytes that a claim lacks when all has become free that it may take; at most 0: it needs only wait."""
        return num_bytes - self._own[key] - self._spare - self.room

    def spend(self, key: str, num_bytes: int) -> None:
        """Take free bytes now; what was to become free for this claim is available to others."""
        assert num_bytes <= self.room, f"{num_bytes} bytes for {key!r} are more than the {self.room} that are free"
        self.room -= num_bytes
        self._spare += self._own.pop(key, 0)

    def reserve(self, key: str, num_bytes: int, expected: int = 0) -> None:
        """Claim what was freed for this key, then what it expects from others, then what becomes free, then room."""
        own = self._own.pop(key)
        self._spare += max(0, own - num_bytes)
        rest = max(0, num_bytes - own - expected)
        from_spare = min(rest, self._spare)
        self._spare -= from_spare
        self.room -= rest - from_spare
