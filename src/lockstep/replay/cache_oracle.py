"""Upper bound of a prefix cache: counts the prompt tokens that occurred before, without a scheduler."""

from __future__ import annotations

from lockstep.core.policy import SchedulerConfig

MAX_CONTENTS = 1 << 22
"""Maximum distinct ids that are stored individually, about 100 bytes each. Above it there is no figure."""


class UnboundedCache:
    """A prefix cache without a limit, which holds the full blocks of a prompt as soon as its request is admitted.

    It takes requests in the order of admission and counts hits by the rules of the scheduler's cache: only full blocks
    of prompts hit, at least one token is left to compute, and each request counts once, so a preempted request that
    finds its blocks again is no hit. No pool has more hits. A pool that evicts nothing has as many if each request
    arrives after the end of the previous one.

    Args:
        content_size: number of tokens per id, a multiple of the block size.
        max_contents: maximum number of ids that are stored one by one; a workload with more has no figure.
    """

    def __init__(self, content_size: int, config: SchedulerConfig, max_contents: int = MAX_CONTENTS) -> None:
        self._max_contents = max_contents
        self._config = config
        self._block_size = config.block_size
        self._per_content = content_size // config.block_size
        self._num_hits = 0
        self._is_exceeded = False
        self._first_new = 0
        """All ids below it have occurred, with all their blocks unless ``_blocks`` has fewer. Most traces number their
        ids so."""
        self._blocks: dict[int, int] = {}
        """Number of known blocks per id, for the ids that ``_first_new`` does not cover."""

    @property
    def num_hit_tokens(self) -> int | None:
        """Hit tokens so far; None: the workload has too many distinct ids."""
        return None if self._is_exceeded else self._num_hits * self._block_size

    def admit(self, contents: tuple[int, ...], num_prompt_tokens: int) -> None:
        """Look a prompt up, and store its blocks."""
        if self._is_exceeded:
            return
        num_left = num_prompt_tokens // self._block_size
        num_wanted = self._config.usable_blocks(num_prompt_tokens)
        for content in contents:
            num_full = min(num_left, self._per_content)
            num_left -= num_full
            num_known = self._num_known(content)
            num_found = min(max(0, num_known), num_full, num_wanted)
            self._num_hits += num_found
            num_wanted = num_wanted - num_found if num_found == self._per_content else 0
            if num_full > num_known:
                self._keep(content, num_full)
        self._is_exceeded = len(self._blocks) > self._max_contents

    def _num_known(self, content: int) -> int:
        """Number of known blocks of the id; -1: a new id."""
        return self._blocks.get(content, self._per_content if content < self._first_new else -1)

    def _keep(self, content: int, num_blocks: int) -> None:
        blocks, whole = self._blocks, self._per_content
        blocks[content] = num_blocks
        if content < self._first_new and num_blocks == whole:
            del blocks[content]
        while (known := blocks.get(self._first_new)) is not None:
            if known == whole:
                del blocks[self._first_new]
            self._first_new += 1
