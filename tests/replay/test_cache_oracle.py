"""Upper bound of cache hits: never less than the scheduler's hits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.cache_oracle import UnboundedCache
from lockstep.replay.report import report_of
from lockstep.replay.simulator import Replay, Simulation
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest
from tests.replay.strategies import configs, workloads

CONTENT = 8
AMPLE = SchedulerConfig(
    block_size=4, num_blocks=4_000, max_model_len=400, max_num_seqs=4, max_num_batched_tokens=512, max_chunk_tokens=512
)


def workload_of(*prompts: tuple[int, tuple[int, ...]], apart: int = 1_000) -> Workload:
    """Prompts with these lengths and contents, each long after the end of the previous one."""
    requests = [
        WorkloadRequest(f"r{number}", num_tokens, 3, 3, number * apart, contents=contents)
        for number, (num_tokens, contents) in enumerate(prompts)
    ]
    return Workload("made up", tuple(requests), ArrivalUnit.TICKS, CONTENT)


def replay_of(workload: Workload, config: SchedulerConfig = AMPLE) -> Replay:
    return Simulation(workload, config).run()


def hits(replay: Replay) -> tuple[int, int | None]:
    """Hit tokens of the pool, and of a cache without bounds."""
    return replay.stats.prefix_hits_tokens, replay.num_unbounded_hit_tokens


@given(workloads(), configs())
@settings(max_examples=120)
def test_no_pool_exceeds_the_bound(workload: Workload, config: SchedulerConfig) -> None:
    """The bound holds with preemption, overtaking, eviction and concurrent computation."""
    pool, unbounded = hits(replay_of(workload, config))
    if config.enable_prefix_caching:
        assert unbounded is not None
        assert pool <= unbounded
    else:
        assert (pool, unbounded) == (0, None)


PROMPTS = st.tuples(
    st.integers(1, 60), st.lists(st.integers(0, 6) | st.sampled_from([100, 1 << 63]), max_size=8, unique=True)
)


@given(st.lists(PROMPTS, max_size=20), st.sampled_from([2, 4, 8]))
@settings(max_examples=100)
def test_a_pool_without_evictions_reaches_the_bound(prompts: list[tuple[int, list[int]]], block_size: int) -> None:
    """One request after the other, with contents that are cut, dense, sparse or too short."""
    cut = [(num_tokens, tuple(ids[: -(-num_tokens // CONTENT)])) for num_tokens, ids in prompts]
    replay = replay_of(workload_of(*cut), replace(AMPLE, block_size=block_size))
    assert replay.stats.num_evicted_blocks == 0
    pool, unbounded = hits(replay)
    assert pool == unbounded


def test_a_prompt_is_hit_up_to_its_last_token() -> None:
    one_block = {4: 0, 5: 4, 6: 4}
    for num_tokens, hit in one_block.items():
        assert hits(replay_of(workload_of((8, (0,)), (num_tokens, (0,))))) == (hit, hit)
    config = replace(AMPLE, block_size=1, max_chunk_tokens=3)
    assert hits(replay_of(workload_of((1, (0,)), (8, (0,))), config)) == (1, 1)


def test_blocks_of_a_preempted_request_are_no_hits() -> None:
    """Two sequences grow until one is preempted; it finds its published blocks when it resumes."""
    requests = [WorkloadRequest(f"r{n}", 12, 24, 24, 0, contents=(2 * n, 2 * n + 1)) for n in range(2)]
    workload = Workload("made up", tuple(requests), ArrivalUnit.TICKS, CONTENT)
    replay = replay_of(workload, replace(AMPLE, num_blocks=12, max_model_len=40, preemption="recompute"))
    assert replay.stats.num_preemptions > 0
    assert hits(replay) == (0, 0)


def test_both_hit_rates_use_the_same_tokens() -> None:
    """The second prompt arrives during the first one's computation, the third when some blocks are evicted."""
    prompts = ((32, (0, 1, 2, 3)), (32, (0, 1, 2, 3)), (40, (4, 5, 6, 7, 8)), (32, (0, 1, 2, 3)))
    report = report_of(replay_of(workload_of(*prompts, apart=0), replace(AMPLE, num_blocks=20, max_model_len=80)))
    assert report.prefix_queried_tokens == 136
    assert report.prefix_unbounded_hit_tokens == 2 * 28
    assert report.prefix_unbounded_hit_rate == round(56 / 136, 6)
    assert report.prefix_hit_rate < report.prefix_unbounded_hit_rate


def test_without_sharing_there_is_no_figure() -> None:
    """Contents that are not multiples of blocks, or a disabled cache."""
    workload = workload_of((32, (0, 1, 2, 3)), (32, (0, 1, 2, 3)))
    for config in (replace(AMPLE, block_size=3), replace(AMPLE, enable_prefix_caching=False)):
        report = report_of(replay_of(workload, config))
        assert (report.prefix_unbounded_hit_tokens, report.prefix_unbounded_hit_rate) == (None, None)


def test_too_many_distinct_ids_give_no_figure() -> None:
    """Ids that are numbered in order need no memory, with whole or cut contents."""
    for stride, expected in ((1, 60), (2, None)):
        cache = UnboundedCache(CONTENT, AMPLE, max_contents=3)
        for _ in range(2):
            cache.admit(tuple(range(0, 8 * stride, stride)), 62)
        assert cache.num_hit_tokens == expected
