"""Sentence of each limit."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.step import Limit
from lockstep.core.wording import TEMPLATES, Reached, phrase
from tests.core.drive import config

WHOLE = {"chunking": False}
SHARED = {"prefill_share": "adaptive"}
RESERVING = {"admission": "reserve"}


@pytest.mark.parametrize(
    ("reached", "limits", "words"),
    [
        (Reached(Limit.SEQS, 4, 4, 0, "", 0), {}, "4 of 4 sequences run"),
        (Reached(Limit.PREEMPTED, 0, 0, 0, "r1", 1), {}, "r1 is preempted and must come back first"),
        (Reached(Limit.PREEMPTED, 0, 0, 0, "r1 and r2", 2), {}, "r1 and r2 are preempted and must come back first"),
        (Reached(Limit.OVERTAKEN, 0, 3, 0, "r1", 1), {}, "r1 waits before it, and lets at most 3 pass (max_skips)"),
        (Reached(Limit.CHUNK, 8, 8, 0, "", 0), {}, ""),
        (Reached(Limit.TOKENS, 48, 48, 0, "", 0), {}, "the budget of 48 tokens is used up"),
        (
            Reached(Limit.TOKENS, 48, 48, 0, "", 0, num_stages=25),
            {},
            "the budget of 48 positions (25 for each token) is used up",
        ),
        (
            Reached(Limit.PREFILL, 40, 48, 0, "", 0, 30),
            WHOLE,
            "40 of 48 tokens of the prefill budget are used, "
            "and what is left is too little for its prompt of 30 in one go",
        ),
        (
            Reached(Limit.PREFILL, 40, 48, 0, "", 0),
            WHOLE,
            "40 of 48 tokens of the prefill budget are used, and what is left is too little for its prompt in one go",
        ),
        (
            Reached(Limit.PREFILL, 9, 20, 0, "", 0),
            SHARED,
            "20 prompt tokens are the share of the budget that prompts have now",
        ),
        (Reached(Limit.BLOCKS, 9, 9, 1, "", 0, is_running=True), {}, "none of 9 blocks is free for it"),
        (Reached(Limit.BLOCKS, 8, 9, 2, "", 0, is_running=True), {}, "it needs 2 blocks, 1 of 9 are free"),
        (Reached(Limit.BLOCKS, 9, 9, 1, "", 0), {}, "it needs 1 block, 0 of 9 are free"),
        (Reached(Limit.BLOCKS, 5, 9, 7, "", 0), RESERVING, "prompt and output need 7 blocks, 4 of 9 are free"),
    ],
)
def test_a_limit_has_one_sentence(reached: Reached, limits: dict[str, Any], words: str) -> None:
    assert phrase(reached, config(**limits)) == words


def test_every_limit_except_chunk_has_a_sentence() -> None:
    """A sequence with a shortened chunk still has a part in the step."""
    mute = {limit for limit in Limit if not phrase(Reached(limit, 1, 2, 3, "r1", 1), config())}
    assert mute == {Limit.CHUNK}
    assert not TEMPLATES.keys() & {Limit.TOKENS, Limit.PREFILL, Limit.BLOCKS}, "these depend on the config"
