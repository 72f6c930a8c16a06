"""Pairs of configs with a hand-derived first difference: a case for each kind of decision and each limit."""

from __future__ import annotations

from typing import Any, NamedTuple

from lockstep.core.request import Priority
from lockstep.replay.divergence import Change
from lockstep.replay.workload import Workload
from tests.replay.workloads import request, workload


class Case(NamedTuple):
    """Two configs that differ in ``fields``, with the expected difference."""

    workload: Workload
    common: dict[str, Any]
    a: dict[str, Any]
    b: dict[str, Any]
    step: int
    change: Change
    about: list[str]
    reasons: list[str]
    """Parts of the expected sentences."""


THREE = workload(request("r1", 10), request("r2", 10), request("r3", 10))
SHARED = (1, 2, 3, 4)
CASES = {
    "max_num_seqs": Case(
        THREE,
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 2},
        0,
        Change.ADMISSION,
        ["r3"],
        ["A admits r3, and B leaves r3 wait", "in B, r3 waits: 2 of 2 sequences run"],
    ),
    "max_num_step_seqs": Case(
        THREE,
        {"max_num_seqs": 3},
        {},
        {"max_num_step_seqs": 2},
        0,
        Change.ADMISSION,
        ["r3"],
        ["2 of 2 places of the step are taken"],
    ),
    "max_num_batched_tokens": Case(
        workload(request("r1", 30), request("r2", 30)),
        {},
        {},
        {"max_num_batched_tokens": 30},
        0,
        Change.ADMISSION,
        ["r2"],
        ["the budget of 30 tokens is used up"],
    ),
    "max_num_prefill_tokens": Case(
        workload(request("r1", 30), request("r2", 30)),
        {},
        {},
        {"max_num_prefill_tokens": 30},
        0,
        Change.ADMISSION,
        ["r2"],
        ["the prefill budget of 30 tokens is used up"],
    ),
    "max_chunk_tokens": Case(
        workload(request("r1", 30)),
        {},
        {"max_chunk_tokens": 20},
        {"max_chunk_tokens": 8},
        0,
        Change.CHUNK,
        ["r1"],
        ["r1 computes 20 tokens from position 0 on in A and 8 in B", "in B, a chunk has at most 8 tokens"],
    ),
    "chunking": Case(
        workload(request("r1", 20), request("r2", 20)),
        {"max_num_batched_tokens": 30},
        {},
        {"chunking": False},
        0,
        Change.ADMISSION,
        ["r2"],
        ["20 of 30 tokens of the budget are used, and what is left is too little for its prompt of 20 in one go"],
    ),
    "num_blocks": Case(
        workload(request("r1", 20), request("r2", 20)),
        {"max_model_len": 32},
        {"num_blocks": 12},
        {"num_blocks": 8},
        0,
        Change.ADMISSION,
        ["r2"],
        ["in B, r2 waits: it needs 5 blocks, 3 of 8 are free"],
    ),
    "admission": Case(
        workload(request("r1", 20, 12), request("r2", 8, 12)),
        {"num_blocks": 12, "max_model_len": 32},
        {},
        {"admission": "reserve"},
        0,
        Change.ADMISSION,
        ["r2"],
        ["in B, r2 waits: prompt and output need 5 blocks, 4 of 12 are free"],
    ),
    "order": Case(
        workload(request("r1", 8), request("r2", 8, priority=Priority.HIGH)),
        {"max_num_seqs": 1},
        {},
        {"order": "priority"},
        0,
        Change.ADMISSION,
        ["r1", "r2"],
        ["A admits r1, and B leaves r1 wait", "B admits r2, and A leaves r2 wait"],
    ),
    "order, fair": Case(
        workload(request("r1", 8, tenant="x"), request("r2", 8, tenant="x"), request("r3", 8, tenant="y")),
        {"max_num_seqs": 2},
        {},
        {"order": "fair"},
        0,
        Change.ADMISSION,
        ["r2", "r3"],
        ["B admits r3, and A leaves r3 wait"],
    ),
    "max_num_decode_seqs": Case(
        workload(request("r1", 8), request("r2", 8)),
        {},
        {"max_num_decode_seqs": 2},
        {"max_num_decode_seqs": 1},
        0,
        Change.CHUNK,
        ["r2"],
        ["in B, 1 of 1 places to sample are taken, so the prompt is not finished"],
    ),
    "max_num_decode_seqs, a turn": Case(
        workload(request("r1", 1), request("r2", 1)),
        {},
        {"max_num_decode_seqs": 2},
        {"max_num_decode_seqs": 1},
        0,
        Change.TURN,
        ["r2"],
        ["A includes r2 in the step, and B leaves r2 wait", "1 of 1 places to sample are taken"],
    ),
    "decode_order, equal requests": Case(
        THREE,
        {"max_num_decode_seqs": 2},
        {},
        {"decode_order": "oldest"},
        1,
        Change.TURN,
        ["r2", "r3"],
        [
            "A includes r3 in the step, and B leaves r3 wait",
            "in B, r3 waits",
            "r1, r2 decode first (decode_order=oldest)",
        ],
    ),
    "decode_order, a lower priority": Case(
        workload(request("r1", 4, 30), request("r2", 4, 30, priority=Priority.CRITICAL)),
        {"max_num_decode_seqs": 1, "order": "priority"},
        {},
        {"decode_order": "priority"},
        4,
        Change.TURN,
        ["r1", "r2"],
        ["r2 decodes before priority 0 (decode_order=priority)"],
    ),
    "preemption": Case(
        workload(request("r1", 16, 16), request("r2", 16, 16)),
        {"num_blocks": 10, "max_model_len": 32, "num_host_blocks": 8},
        {"preemption": "swap"},
        {"preemption": "recompute"},
        5,
        Change.MOVE,
        ["r2"],
        ["1 block is saved to the host (preemption swap; 8 host blocks are free)", "its last blocks are dropped"],
    ),
    "num_blocks, a victim": Case(
        workload(request("r1", 16, 16), request("r2", 16, 16)),
        {"max_model_len": 32},
        {"num_blocks": 1000},
        {"num_blocks": 10},
        5,
        Change.VICTIM,
        ["r2"],
        ["B preempts r2, and A leaves r2 running", "in B, 10 of 10 blocks are in use"],
    ),
    "enable_prefix_caching": Case(
        workload(request("r1", 16, contents=SHARED), request("r2", 16, arrival=1, contents=SHARED)),
        {},
        {},
        {"enable_prefix_caching": False},
        1,
        Change.CACHE,
        ["r2"],
        ["of the 16 prompt tokens of r2, 12 come from the cache in A and 0 in B"],
    ),
    "num_blocks, other blocks": Case(
        workload(request("r1", 16, 1, contents=SHARED), request("r2", 16, 1, arrival=1)),
        {"max_model_len": 20},
        {"num_blocks": 8},
        {"num_blocks": 6},
        1,
        Change.BLOCK,
        ["r2"],
        ["a different block at index 2 of its table: 7 in A and 4 (evicting its cached content) in B"],
    ),
    "max_num_queued_reqs": Case(
        THREE,
        {},
        {},
        {"max_num_queued_reqs": 2},
        0,
        Change.REFUSAL,
        ["r3"],
        ["B refuses r3, and A accepts it: 2 requests wait already, the maximum"],
    ),
    "max_model_len": Case(
        workload(request("r1", 8), request("r2", 28, 8, arrival=2)),
        {"num_blocks": 12},
        {"max_model_len": 40},
        {"max_model_len": 32},
        2,
        Change.REFUSAL,
        ["r2"],
        ["B refuses r2, and A accepts it"],
    ),
    "prefill_share": Case(
        workload(request("r1", 4, arrival=1), request("r2", 30, 20, arrival=2)),
        {"max_num_batched_tokens": 40},
        {},
        {"prefill_share": "adaptive"},
        1,
        Change.CHUNK,
        ["r2"],
        ["in B, 20 prompt tokens are the share of the budget that prompts have now"],
    ),
    "max_skips": Case(
        workload(request("r1", 20, 20), request("r2", 30), request("r3", 20, 8)),
        {"num_blocks": 12, "max_model_len": 52},
        {},
        {"max_skips": 0},
        0,
        Change.ADMISSION,
        ["r3"],
        ["in B, r3 waits: r2 waits before it, and lets at most 0 pass (max_skips)"],
    ),
    "num_blocks, the worst waits": Case(
        workload(request("r1", 16, 24), request("r2", 16, 24), request("r3", 4, 14)),
        {"max_model_len": 40},
        {"num_blocks": 12},
        {"num_blocks": 11},
        1,
        Change.TURN,
        ["r3"],
        ["A includes r3 in the step", "in B, r3 waits: none of 11 blocks is free for it"],
    ),
}
