"""Random workloads, limits and prices that are small enough for many runs."""

from __future__ import annotations

from hypothesis import strategies as st

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.cost import CostModel
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Configs with large to minimal pools, and with every policy."""
    num_seqs = draw(st.integers(1, 6))
    return SchedulerConfig(
        block_size=draw(st.sampled_from([4, 8])),
        num_blocks=draw(st.integers(8, 40)),
        max_model_len=64,
        num_host_blocks=draw(st.sampled_from([0, 3, 30])),
        max_num_seqs=num_seqs,
        max_num_step_seqs=draw(st.sampled_from([None, max(1, num_seqs - 1)])),
        max_num_batched_tokens=64,
        max_num_prefill_tokens=draw(st.sampled_from([None, 32])),
        max_chunk_tokens=draw(st.sampled_from([6, 64])),
        max_num_decode_seqs=draw(st.sampled_from([None, max(1, num_seqs - 1)])),
        chunking=draw(st.booleans()),
        admission=draw(st.sampled_from(["optimistic", "reserve"])),
        order=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        decode_order=draw(st.sampled_from(["weighted", "priority", "oldest"])),
        preemption=draw(st.sampled_from(["swap", "recompute"])),
        priority_aging_steps=draw(st.sampled_from([0, 3])),
        max_skips=draw(st.sampled_from([0, 64])),
        max_num_queued_reqs=draw(st.sampled_from([3, 1000])),
        enable_prefix_caching=draw(st.booleans()),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Bursts and pauses of prompts with common prefixes."""
    unit = draw(st.sampled_from(list(ArrivalUnit)))
    scale = 1 if unit is ArrivalUnit.TICKS else 13
    arrival = 0
    requests = []
    for index in range(draw(st.integers(1, 14))):
        arrival += scale * draw(st.sampled_from([0, 0, 1, 3, 20, 90]))
        prompt, most = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        requests.append(
            WorkloadRequest(
                name=f"r{index}",
                num_prompt_tokens=prompt,
                max_output_tokens=most,
                num_output_tokens=draw(st.integers(1, most)),
                arrival=arrival,
                priority=draw(st.integers(-2, 1)),
                tenant=draw(st.sampled_from(["", "a", "b"])),
                contents=tuple(draw(st.sampled_from([0, 100])) + place for place in range(-(-prompt // 8))),
            )
        )
    return Workload("random", tuple(requests), unit, 8)


@st.composite
def costs(draw: st.DrawFn) -> CostModel:
    prices = st.sampled_from([0, 1, 7, 1_000_000])
    return CostModel(draw(st.sampled_from([0, 1, 10, 2_000_000])), draw(prices), draw(prices), draw(prices))
