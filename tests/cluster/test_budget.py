"""Who needs what, what the machine can keep, and how a boot over budget is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.budget import (
    Budget,
    BudgetRow,
    Budgets,
    BudgetVerdict,
    Footprint,
    Machine,
    Need,
    Origin,
    check,
    effective_budgets,
    predict,
    refusal,
    table_text,
)
from lockstep.cluster.manifest import Resources, Tier
from lockstep.executors.stub import DECLARED_BYTES

MB = 10**6
GB = 10**9
STUB = predict(DECLARED_BYTES, 0, 0)


def bounds(gpu: int | None, ram: int | None) -> Budgets:
    return effective_budgets(Resources(gpu_budget_bytes=gpu, ram_budget_bytes=ram), None)


def stub(model: str, tier: Tier, replica: str = "") -> Need:
    return Need(model, tier, replica or model, STUB)


class TestPrediction:
    def test_declared_size_overrides_the_predicted_size(self) -> None:
        assert predict(5 * GB, 1 * GB, 2 * GB) == Footprint(5 * GB, 5 * GB, 0, Origin.DECLARED)

    def test_undeclared_size_is_files_with_overhead_plus_kv_pool(self) -> None:
        predicted = predict(None, 100 * MB, 30 * MB, host_bytes=15 * MB, factor=1.5)
        assert predicted == Footprint(180 * MB, 150 * MB, 15 * MB, Origin.PREDICTED)


class TestEffectiveBudgets:
    @pytest.mark.parametrize(
        ("gpu", "ram", "machine", "expected"),
        [
            (18, 32, None, (18, 32)),
            (None, 32, None, (None, 32)),
            (18, 32, Machine(64), (18, 32)),
            (18, 32, Machine(25), (9, 16)),
            (18, 32, Machine(25, accelerator_bytes=16), (16, 25)),
            (18, None, Machine(25), (18, 7)),
            (None, 32, Machine(25), (0, 25)),
            (None, None, Machine(25), (12, 12)),
            (None, None, Machine(25, accelerator_bytes=16), (16, 25)),
            (0, 0, Machine(0), (0, 0)),
        ],
    )
    def test_budgets_above_the_machine_are_reduced_in_proportion(
        self, gpu: int | None, ram: int | None, machine: Machine | None, expected: tuple[int | None, int | None]
    ) -> None:
        budgets = effective_budgets(Resources(gpu_budget_bytes=gpu, ram_budget_bytes=ram), machine)
        assert (budgets.gpu.effective_bytes, budgets.ram.effective_bytes) == expected

    @given(
        gpu=st.none() | st.integers(0, 2**50),
        ram=st.none() | st.integers(0, 2**50),
        memory=st.integers(0, 2**50),
    )
    def test_effective_budgets_exceed_neither_the_shared_memory_nor_the_declared_budgets(
        self, gpu: int | None, ram: int | None, memory: int
    ) -> None:
        budgets = effective_budgets(Resources(gpu_budget_bytes=gpu, ram_budget_bytes=ram), Machine(memory))
        effective = [budget.effective_bytes for budget in (budgets.gpu, budgets.ram)]
        assert None not in effective
        assert sum(each or 0 for each in effective) <= memory
        for budget, declared in ((budgets.gpu, gpu), (budgets.ram, ram)):
            assert declared is None or (budget.effective_bytes or 0) <= declared
            assert budget.is_cut == (declared is not None and budget.effective_bytes != declared)


class TestCheck:
    def test_each_model_adds_its_bytes_to_the_budget_of_its_tier(self) -> None:
        needs = [stub("a", Tier.RESIDENT), stub("b", Tier.STANDBY), Need("c", Tier.REMOTE)]
        table = check(needs, bounds(18 * GB, 32 * GB))
        assert table.rows == (
            BudgetRow("a", Tier.RESIDENT, BudgetVerdict.FITS, gpu_bytes=DECLARED_BYTES, origin=Origin.DECLARED),
            BudgetRow("b", Tier.STANDBY, BudgetVerdict.FITS, ram_bytes=DECLARED_BYTES, origin=Origin.DECLARED),
            BudgetRow("c", Tier.REMOTE, BudgetVerdict.REMOTE),
        )
        assert (table.budgets.gpu.needed_bytes, table.budgets.ram.needed_bytes) == (DECLARED_BYTES, DECLARED_BYTES)

    def test_fifty_models_need_the_sum_of_their_sizes_by_tier(self) -> None:
        needs = [stub(f"m{i}", Tier.RESIDENT if i < 26 else Tier.STANDBY) for i in range(51)]
        table = check(needs, bounds(24 * GB, 64 * GB))
        assert table.is_within_budget
        assert (table.budgets.gpu.needed_bytes, table.budgets.ram.needed_bytes) == (20_800 * MB, 20_000 * MB)

    def test_models_of_one_artifact_are_counted_once_and_resident_when_one_of_them_is(self) -> None:
        needs = [stub("a", Tier.STANDBY, "shared"), stub("b", Tier.RESIDENT, "shared")]
        table = check(needs, bounds(DECLARED_BYTES, 0))
        assert table.is_within_budget
        assert table.rows[0].gpu_bytes == DECLARED_BYTES
        assert table.rows[1] == BudgetRow("b", Tier.RESIDENT, BudgetVerdict.FITS, "a", origin=Origin.DECLARED)

    def test_kv_on_the_host_counts_against_ram_for_resident_models_too(self) -> None:
        need = Need("a", Tier.RESIDENT, "a", predict(None, 0, 0, host_bytes=2))
        assert not check([need], bounds(None, 1)).is_within_budget

    @pytest.mark.parametrize(
        ("tier", "gpu", "ram"), [(Tier.RESIDENT, 1_000 * MB, None), (Tier.STANDBY, None, 1_000 * MB)]
    )
    def test_first_model_over_budget_is_named(self, tier: Tier, gpu: int | None, ram: int | None) -> None:
        table = check([stub("a", tier), stub("b", tier)], bounds(gpu, ram))
        assert [row.verdict for row in table.rows] == [BudgetVerdict.FITS, BudgetVerdict.EXCEEDS]
        assert not table.is_within_budget

    def test_a_standby_model_that_could_never_be_promoted_is_named_and_refuses_nothing(self) -> None:
        table = check([stub("a", Tier.RESIDENT), stub("b", Tier.STANDBY)], bounds(1_000 * MB, None))
        assert [row.verdict for row in table.rows] == [BudgetVerdict.FITS, BudgetVerdict.NEVER_FITS]
        assert table.is_within_budget

    @given(st.lists(st.tuples(st.sampled_from(list(Tier)), st.integers(0, 9), st.integers(0, 9)), max_size=8))
    def test_a_table_is_kept_exactly_when_the_sums_are(self, models: list[tuple[Tier, int, int]]) -> None:
        needs = [
            Need(str(i), tier) if tier is Tier.REMOTE else Need(str(i), tier, str(i), predict(size, 0, 0, host))
            for i, (tier, size, host) in enumerate(models)
        ]
        table = check(needs, bounds(12, 12))
        assert table.is_within_budget == (table.budgets.gpu.needed_bytes <= 12 and table.budgets.ram.needed_bytes <= 12)
        assert table.is_within_budget == (refusal(table) == "")


class TestText:
    def test_the_table_lists_the_need_of_each_model_by_budget(self) -> None:
        needs = [
            stub("router", Tier.RESIDENT),
            stub("billing", Tier.RESIDENT, "router"),
            Need("legal", Tier.STANDBY, "legal", predict(None, 2 * MB, 0, factor=1.2)),
            Need("fallback", Tier.REMOTE),
        ]
        budgets = Budgets(Budget("gpu_budget", 18 * GB, 3_600 * MB), Budget("ram_budget", None, None))
        assert table_text(check(needs, budgets)).splitlines() == [
            "model     tier      resident     in memory  size       verdict",
            "router    resident  800 MB       -          declared   fits",
            "billing   resident  with router  -          declared   fits",
            "legal     standby   -            2.4 MB     predicted  fits",
            "fallback  remote    -            -          -          remote",
            "gpu_budget: 800 MB needed of 3.6 GB (declared 18 GB; the machine has no more)",
            "memory for standby models: 2.4 MB needed, no limit set",
        ]

    def test_a_refusal_names_the_budget_and_the_remedy(self) -> None:
        both = check([stub("a", Tier.RESIDENT), stub("b", Tier.STANDBY)], bounds(500 * MB, 500 * MB))
        assert refusal(both) == (
            "the models need more than gpu_budget (800 MB of 500 MB) and ram_budget (800 MB of 500 MB): "
            "raise them, or declare fewer models resident"
        )
        *_, gpu, ram = table_text(both).splitlines()
        assert gpu == "gpu_budget: 800 MB needed of 500 MB, 300 MB too much"
        assert ram == "ram_budget: 800 MB needed of 500 MB, 300 MB too much"
        one = check([stub("b", Tier.STANDBY)], bounds(500 * MB, 500 * MB))
        assert refusal(one) == "the models need more than ram_budget (800 MB of 500 MB): raise it, or drop models"

    def test_refusal_states_that_the_machine_has_less_than_the_budget(self) -> None:
        budgets = effective_budgets(Resources(gpu_budget_bytes=GB), Machine(500 * MB))
        text = refusal(check([stub("a", Tier.RESIDENT)], budgets))
        assert "the machine has no more for it; declare fewer or smaller models" in text
