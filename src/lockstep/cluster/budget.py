"""Memory budgets: compares what each model needs with the budgets, in bytes. Pure: sizes of files and of the machine
are passed in as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from lockstep.cluster.manifest import Resources, Tier
from lockstep.shown import aligned, size

WEIGHTS_FACTOR = 1.03
"""Upper bound of the size of loaded weights, relative to their files and `packed_growth`; Q4_K reaches the maximum
after packing."""
COLUMNS = ("resident", "in memory", "size", "verdict")
"""Columns of the table, after the model's name and tier."""
GPU_BUDGET = "gpu_budget"
RAM_BUDGET = "ram_budget"
NO_LIMIT = "no limit set"


class Origin(StrEnum):
    """Origin of a size."""

    DECLARED = "declared"
    PREDICTED = "predicted"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one replica needs."""

    resident_bytes: int
    """Counts against `gpu_budget` while the replica is resident: weights and KV pool."""
    standby_bytes: int = 0
    """Counts against `ram_budget` while the replica is not resident: weights that are kept ready."""
    host_bytes: int = 0
    """Counts against `ram_budget` at all times: KV in host memory."""
    origin: Origin = Origin.PREDICTED


def predict(
    declared_bytes: int | None,
    file_bytes: int,
    kv_bytes: int,
    host_bytes: int = 0,
    factor: float = WEIGHTS_FACTOR,
) -> Footprint:
    """Predict the memory of a replica before it is first loaded.

    Args:
        declared_bytes: need declared by the manifest, including the KV pool; a stub declares its weights and has no KV.
        file_bytes: size of the artifact's weight files.
        kv_bytes: size of the KV pool on the device.
        host_bytes: size of the KV pool in host memory.
    """
    if declared_bytes is not None:
        return Footprint(declared_bytes, declared_bytes, host_bytes, Origin.DECLARED)
    weights = round(file_bytes * factor)
    return Footprint(weights + kv_bytes, weights, host_bytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory that the models of a machine share."""

    memory_bytes: int
    """Memory that this process may still use. Loading never needs more than the loaded model does."""
    accelerator_bytes: int | None = None
    """Memory of the accelerator; None: there is no accelerator, and resident models use main memory as well."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget, and what models need of it."""

    name: str
    declared_bytes: int | None
    """Budget in the manifest; None: it sets none."""
    effective_bytes: int | None
    """Budget that is enforced; None: there is no limit."""
    needed_bytes: int = 0
    """Total need of the models that were counted."""

    @property
    def is_cut(self) -> bool:
        """True if the machine has less memory than the manifest declares."""
        return None not in (self.declared_bytes, self.effective_bytes) and self.declared_bytes != self.effective_bytes

    @property
    def excess_bytes(self) -> int:
        return 0 if self.effective_bytes is None else max(0, self.needed_bytes - self.effective_bytes)

    def adding(self, num_bytes: int) -> Budget:
        """Return a copy with an additional need."""
        return replace(self, needed_bytes=self.needed_bytes + num_bytes)

    def __str__(self) -> str:
        """One line: how much is needed, and whether the machine has it."""
        needed = f"{self.name}: {size(self.needed_bytes)} needed"
        if self.effective_bytes is None:
            return f"{memory_of(self.name)}: {size(self.needed_bytes)} needed, {NO_LIMIT}"
        text = f"{needed} of {size(self.effective_bytes)}"
        if self.is_cut and self.declared_bytes is not None:
            text += f" (declared {size(self.declared_bytes)}; the machine has no more)"
        return f"{text}, {size(self.excess_bytes)} too much" if self.excess_bytes else text


def memory_of(name: str) -> str:
    """Description of the memory that a budget limits; used for budgets that are not set, also without a GPU."""
    return {GPU_BUDGET: "memory for models", RAM_BUDGET: "memory for standby models"}.get(name, name)


class Budgets(NamedTuple):
    """Both budgets of a manifest."""

    gpu: Budget
    ram: Budget


def effective_budgets(resources: Resources, machine: Machine | None) -> Budgets:
    """Budgets that the machine can provide.

    If the declared budgets together exceed the memory that they share, they are reduced in proportion. A budget that is
    not declared gets what the others leave.

    Args:
        machine: memory of the machine; None: sizes are fictitious (stubs), and budgets are not reduced.
    """
    gpu, ram = resources.gpu_budget_bytes, resources.ram_budget_bytes
    effective: Sequence[int | None] = (gpu, ram)
    if machine is not None and machine.accelerator_bytes is not None:
        effective = [*_share([gpu], machine.accelerator_bytes), *_share([ram], machine.memory_bytes)]
    elif machine is not None:
        effective = _share([gpu, ram], machine.memory_bytes)
    return Budgets(Budget(GPU_BUDGET, gpu, effective[0]), Budget(RAM_BUDGET, ram, effective[1]))


def _share(declared: Sequence[int | None], available: int) -> list[int]:
    """Divide one memory among budgets; the shares together never exceed it."""
    total = sum(each or 0 for each in declared)
    left = max(0, available - total) // max(1, sum(each is None for each in declared))
    return [left if each is None else each if total <= available else each * available // total for each in declared]


@dataclass(frozen=True, slots=True)
class Need:
    """Memory need of one model of a manifest."""

    model: str
    tier: Tier
    replica: str | None = None
    """Key of its replica, which other models may share; None: the model is remote."""
    footprint: Footprint | None = None
    """Footprint of the replica; None: the model is remote."""


class BudgetVerdict(StrEnum):
    """Verdict on the memory that a model needs."""

    FITS = "fits"
    EXCEEDS = "over budget"
    """Together with the models before it, the model exceeds the budget."""
    NEVER_FITS = "can never be loaded"
    """The model does not fit beside the models that are declared resident, so every request to it would be rejected."""
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Memory need and verdict of one model."""

    model: str
    tier: Tier
    verdict: BudgetVerdict
    shares_with: str | None = None
    """Model with the same replica, which already counts its memory; None: there is none."""
    gpu_bytes: int = 0
    ram_bytes: int = 0
    origin: Origin | None = None
    """Origin of the size; None: the model is remote."""


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """Memory needs of all models, and whether they fit the budgets."""

    rows: tuple[BudgetRow, ...]
    """Rows in order of definition."""
    budgets: Budgets

    @property
    def is_within_budget(self) -> bool:
        """True if the cluster can start with the manifest."""
        return all(row.verdict is not BudgetVerdict.EXCEEDS for row in self.rows)


def check(needs: Sequence[Need], ceilings: Budgets) -> BudgetTable:
    """Check the needs of a manifest's models against its budgets.

    A replica is resident if one of its models is. Its memory is counted in the row of its first model.
    """
    resident = {need.replica for need in needs if need.tier is Tier.RESIDENT}
    footprints = {need.replica: need.footprint for need in needs if need.footprint is not None}
    pinned_bytes = sum(each.resident_bytes for replica, each in footprints.items() if replica in resident)
    owners: dict[str, str] = {}
    rows: list[BudgetRow] = []
    gpu, ram = (replace(ceiling, needed_bytes=0) for ceiling in ceilings)
    for need in needs:
        if need.replica is None or need.footprint is None:
            rows.append(BudgetRow(need.model, need.tier, BudgetVerdict.REMOTE))
            continue
        row = _row(need, need.footprint, need.replica in resident, owners.get(need.replica))
        owners.setdefault(need.replica, need.model)
        gpu, ram = gpu.adding(row.gpu_bytes), ram.adding(row.ram_bytes)
        promoted = replace(gpu, needed_bytes=pinned_bytes + need.footprint.resident_bytes)
        if (row.gpu_bytes and gpu.excess_bytes) or (row.ram_bytes and ram.excess_bytes):
            row = replace(row, verdict=BudgetVerdict.EXCEEDS)
        elif need.replica not in resident and promoted.excess_bytes:
            row = replace(row, verdict=BudgetVerdict.NEVER_FITS)
        rows.append(row)
    return BudgetTable(tuple(rows), Budgets(gpu, ram))


def _row(need: Need, footprint: Footprint, is_resident: bool, owner: str | None) -> BudgetRow:
    if owner is not None:
        return BudgetRow(need.model, need.tier, BudgetVerdict.FITS, owner, origin=footprint.origin)
    gpu_bytes = footprint.resident_bytes if is_resident else 0
    ram_bytes = footprint.host_bytes + (0 if is_resident else footprint.standby_bytes)
    return BudgetRow(need.model, need.tier, BudgetVerdict.FITS, None, gpu_bytes, ram_bytes, footprint.origin)


def table_text(table: BudgetTable) -> str:
    """Text of the table for the error at startup: a line for each model, then a line for each budget."""
    models = [("model", "tier", *COLUMNS), *((row.model, row.tier, *cells_of(row)) for row in table.rows)]
    return "\n".join([aligned(models), *map(str, table.budgets)])


def cells_of(row: BudgetRow) -> tuple[str, str, str, str]:
    """Cells of a model under `COLUMNS`."""
    if row.origin is None:
        return "-", "-", "-", row.verdict
    if row.shares_with is not None:
        return f"with {row.shares_with}", "-", row.origin, row.verdict
    gpu, ram = (size(each) if each else "-" for each in (row.gpu_bytes, row.ram_bytes))
    return gpu, ram, row.origin, row.verdict


def cut_texts(budgets: Budgets) -> list[str]:
    """One sentence for each budget that the machine cannot provide in full."""
    return [
        f"{budget.name} is cut from {size(budget.declared_bytes or 0)} to "
        f"{size(budget.effective_bytes or 0)}, as this machine has no more memory"
        for budget in budgets
        if budget.is_cut
    ]


def refusal(table: BudgetTable) -> str:
    """Error message for models that exceed the budgets: which budgets, by how much, and what to do; empty: nothing is
    exceeded."""
    if table.is_within_budget:
        return ""
    over = [budget for budget in table.budgets if budget.excess_bytes]
    parts = [f"{each.name} ({size(each.needed_bytes)} of {size(each.effective_bytes or 0)})" for each in over]
    first, it = over[0], "it" if len(over) == 1 else "them"
    helps = f"raise {it}, or declare fewer models resident" if first.name == GPU_BUDGET else "raise it, or drop models"
    if first.is_cut:
        helps = "the machine has no more for it; declare fewer or smaller models"
    return f"the models need more than {' and '.join(parts)}: {helps}"


class Ledger:
    """Bytes of one budget during planning: free bytes, and bytes that become free for a certain replica or for any.

    Args:
        room: free bytes; negative if the budget is exceeded.
        coming: bytes that become free, each with the key of the replica for which they were freed; None: for any.
        claims: bytes that each replica may claim, by key. Bytes freed for other replicas, or beyond a claim, are for
            any replica.
    """

    def __init__(self, room: int, coming: Iterable[tuple[str | None, int]], claims: Mapping[str, int]) -> None:
        self.room = max(0, room)
        """Bytes that are free and unclaimed."""
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
        """Bytes that a claim lacks even after all bytes that it may take have become free; 0 or less: it only has to
        wait."""
        return num_bytes - self._own[key] - self._spare - self.room

    def spend(self, key: str, num_bytes: int) -> None:
        """Take free bytes now; the bytes that were to become free for this claim are then for any replica."""
        assert num_bytes <= self.room, f"{num_bytes} bytes for {key!r} are more than the {self.room} that are free"
        self.room -= num_bytes
        self._spare += self._own.pop(key, 0)

    def reserve(self, key: str, num_bytes: int, expected: int = 0) -> None:
        """Reserve bytes for a claim: first those freed for its key, then the expected ones, then others that become
        free, then free ones."""
        own = self._own.pop(key)
        self._spare += max(0, own - num_bytes)
        rest = max(0, num_bytes - own - expected)
        from_spare = min(rest, self._spare)
        self._spare -= from_spare
        self.room -= rest - from_spare
