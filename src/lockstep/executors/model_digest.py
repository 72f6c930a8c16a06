"""Model digest: hashes a model's logits after fixed prompts, and the tokens sampled from them.

Two machines with the same digest compute the same bytes, as far as these prompts show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from lockstep.executors.base import Executor, Logits
from lockstep.executors.fixed_plans import num_regions
from lockstep.executors.probe import Scenario, play
from lockstep.executors.sampling import SamplerState, sample
from lockstep.executors.sampling_params import ResolvedSampling

_PROMPTS = (1, 33, 300)
"""Lengths of the prompts: one token, more than a block, and more than a segment of attention."""
_DECODES = 6
_SEED = 20
_SAMPLINGS = (
    ResolvedSampling(temperature=0.0, logprobs=5),
    ResolvedSampling(temperature=0.7, top_k=40, top_p=0.9, logprobs=5),
    ResolvedSampling(temperature=1.0, min_p=0.01, logprobs=0),
    ResolvedSampling(temperature=1.3, top_p=0.95, logprobs=0),
    ResolvedSampling(temperature=1.0, logprobs=0),
)
"""Each kind of sampling."""


def model_digest(executor: Executor, num_blocks: int) -> str:
    """32 hex digits that are equal wherever a model gives the same logits, tokens and log-probabilities.

    Args:
        executor: an allocated executor; its pool is overwritten.
        num_blocks: number of allocated blocks, without the null block.
    """
    state = hashlib.blake2b(digest_size=16)
    geometry = executor.geometry
    num_positions = num_blocks // num_regions(geometry) * geometry.block_size
    room = min(geometry.max_model_len, num_positions) - _DECODES
    for length in _PROMPTS:
        logits = play(executor, num_blocks, Scenario((min(length, room),), decodes=_DECODES))
        state.update(logits.tobytes())
        for line in _sampled_lines(logits):
            state.update(line.encode())
    return state.hexdigest()


def _sampled_lines(logits: Logits) -> Iterator[str]:
    """Yield one line with token and log-probabilities for each position and kind of sampling."""
    positions = range(len(logits))
    for sampling in _SAMPLINGS:
        states = [SamplerState(sampling, _SEED + position, (), logits.shape[1]) for position in positions]
        samples = sample(logits, states, positions)
        for token, entry in zip(samples.token_ids, samples.logprobs, strict=True):
            assert entry is not None, "each sampling requests them"
            top = " ".join(f"{other}:{value.hex()}" for other, value in entry.top)
            yield f"{token} {entry.logprob.hex()} {top}\n"
