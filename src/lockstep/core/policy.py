"""Limits and policy of a scheduler: defines its configuration, and the pure rules that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.core.groups import ONE_GROUP, KVGroup
from lockstep.core.request import Request
from lockstep.errors import ConfigError, InvalidParameterError, PromptTooLongError
from lockstep.option_fields import MOST, Range, check_options

Count = Annotated[int, Range(1, MOST)]
OptionalCount = Annotated[int | None, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]

Admission = Literal["optimistic", "reserve"]
Order = Literal["fcfs", "priority", "fair"]
DecodeOrder = Literal["weighted", "priority", "oldest"]
PrefillShare = Literal["fixed", "adaptive"]
Preemption = Literal["swap", "recompute"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits and rules of a scheduler that a user may set: flags of `lockstep serve`, and ``engine:`` of a manifest."""

    max_num_seqs: Annotated[int, Range(1, 1 << 16)] = 64
    """Maximum number of running sequences."""
    max_num_step_seqs: OptionalCount = None
    """Maximum sequences per step, including prompts and decodes; None: ``max_num_seqs``."""
    max_num_prefill_tokens: OptionalCount = None
    """Maximum prompt tokens per step; None: ``max_num_batched_tokens``."""
    max_chunk_tokens: Count = 256
    """Maximum prompt tokens of one sequence per step; not used without ``chunking``."""
    max_num_decode_seqs: OptionalCount = None
    """Maximum sequences that sample or replay in one step; None: ``max_num_seqs``."""
    max_forced_tokens: Count = 16
    """Maximum tokens of one segment: the sampled token and those that a grammar forces after it."""
    chunking: bool = True
    """Compute prompts in chunks. Without it, a prompt is computed in one step or waits."""
    admission: Admission = "optimistic"
    """``reserve`` allocates the blocks of prompt and maximum output at admission and never preempts. ``optimistic``
    allocates the blocks of the prompt at admission and those of the output as it grows, and may preempt."""
    decode_order: DecodeOrder = "weighted"
    """Order of decoding if a step has fewer slots than running sequences: round robin, weighted by priority; highest
    priority first; or oldest first.

    With ``weighted``, critical, high, normal and low priorities share in the ratio 8 : 4 : 2 : 1, and every wait for a
    token is bounded (`lockstep.core.decode_shares`). With the others, a sequence may wait as long as those before it
    run; ``priority`` shares evenly within a priority, and ``priority_aging_steps`` bounds its waits."""
    prefill_share: PrefillShare = "fixed"
    """``adaptive`` gives prompts a share of the token budget in proportion to their number among all sequences."""
    preemption: Preemption = "swap"
    """Treatment of a preempted sequence's KV: ``swap`` moves it to host blocks while there are any, ``recompute`` drops
    it. Both are exact."""
    max_skips: CountOrZero = 64
    """Maximum times that a request that does not fit is overtaken before it blocks its priority and those below; also
    the maximum number of such requests that are passed over in one step."""
    priority_aging_steps: CountOrZero = 0
    """Steps of waiting that raise a priority by one: in the queue if `order` is ``priority``, between tokens if
    `decode_order` is; 0: never."""
    max_num_queued_reqs: Count = 1024
    """Maximum number of waiting requests; further requests are rejected."""
    max_num_queued_tokens: Count = 1 << 24
    """Maximum prompt tokens of waiting requests; a request that would exceed it is rejected."""
    max_finished: Count = 1024
    """Maximum finished sequences that are kept until they are read; the oldest are dropped first."""
    max_num_tenants: Count = 4096
    """Maximum tenants without unfinished requests whose served tokens are kept."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal prompt prefixes. Without it, block hashes are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerLimits):
    """Configuration of a scheduler: its limits, and the order in which it serves requests."""

    block_size: Count
    """Tokens per KV block, given by the executor."""
    num_blocks: Count
    """Number of device blocks, without the null block."""
    max_model_len: Annotated[int, Range(2, MOST)]
    """Maximum prompt and output tokens of a sequence. Its last token needs no KV."""
    num_host_blocks: CountOrZero = 0
    """Number of host blocks to which preempted sequences may be swapped."""
    max_num_batched_tokens: Annotated[int, Range(1, MOST)] = 512
    """Maximum tokens that a step computes."""
    groups: tuple[KVGroup, ...] = ONE_GROUP
    """The KV groups of the model, given by the executor. The first one keeps all positions, in columns of one block."""
    order: Order = "fcfs"
    """Admission by arrival; by priority, then arrival; or by least served tenant, then arrival."""

    def __post_init__(self) -> None:
        check_options(self)
        assert self.groups[0] == ONE_GROUP[0], "the first KV group keeps all positions, in columns of one block"
        needed = least_batched_tokens(self.decode_limit, self.max_forced_tokens)
        if self.max_num_batched_tokens < needed:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; {self.decode_limit} decoding sequences "
                f"and a chunk beside them need at least {needed}"
            )
        if self.prefill_share == "adaptive" and not self.chunking:
            raise ConfigError("prefill_share 'adaptive' cuts prompts to a share; turn chunking on or use 'fixed'")

    @property
    def step_limit(self) -> int:
        """Maximum number of sequences in one step."""
        return self.max_num_seqs if self.max_num_step_seqs is None else self.max_num_step_seqs

    @property
    def decode_limit(self) -> int:
        """Maximum number of sequences that may sample or replay in one step."""
        return self.max_num_seqs if self.max_num_decode_seqs is None else self.max_num_decode_seqs

    @property
    def prefill_limit(self) -> int:
        """Maximum number of prompt tokens in one step."""
        return self.max_num_batched_tokens if self.max_num_prefill_tokens is None else self.max_num_prefill_tokens

    @property
    def allows_drafts(self) -> bool:
        """True if a step may compute drafts. The state of a recurrent layer that has seen a rejected token would be
        lost."""
        return not any(group.is_state for group in self.groups)

    def aged_priority(self, priority: int, num_steps: int) -> int:
        """A priority after this many steps of waiting."""
        return priority - num_steps // self.priority_aging_steps if self.priority_aging_steps else priority

    def usable_blocks(self, num_prompt_tokens: int) -> int:
        """Maximum number of a prompt's blocks that may come from the cache. At least one token is left to compute, so
        that there is something to sample."""
        return (num_prompt_tokens - 1) // self.block_size

    def blocks_for(self, num_positions: int) -> int:
        """Number of blocks that hold this many positions."""
        return -(-num_positions // self.block_size)

    def other_blocks(self, num_positions: int) -> int:
        """Maximum number of blocks that a sequence holds at a time in the groups after the first one, if it computes
        this many positions."""
        step = self.max_chunk_tokens if self.chunking else self.max_num_batched_tokens
        num_blocks = 0
        for group in self.groups[1:]:
            if group.is_state:
                num_blocks += 2 * group.num_parts  # a row may leave the state before it as it is
            else:
                columns = self.blocks_for(group.window + max(step, self.max_forced_tokens)) + 2
                num_blocks += min(columns, self.blocks_for(num_positions)) * group.num_parts
        return num_blocks

    def most_positions(self) -> int:
        """Maximum number of positions of a sequence that has the whole pool."""
        return self.positions_in(self.num_blocks)

    def positions_in(self, num_blocks: int) -> int:
        """Maximum number of positions of a sequence that has this many blocks."""
        least, most = 0, num_blocks * self.block_size
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.blocks_for(middle) + self.other_blocks(middle) <= num_blocks
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def kv_positions(self, num_tokens: int) -> int:
        """Number of positions that a sequence of ``num_tokens`` needs at its end. Its last token needs none, except
        with "reserve"."""
        return num_tokens if self.admission == "reserve" else num_tokens - 1


def least_batched_tokens(num_decode_seqs: int, max_forced_tokens: int) -> int:
    """Tokens that a step needs so that this many sequences can decode in it and a chunk has room, too."""
    return num_decode_seqs - 1 + max_forced_tokens


def prompt_chunk(remaining: int, room: int, may_end: bool) -> int:
    """Length of the next chunk of a prompt; 0: it waits.

    Args:
        remaining: prompt tokens to compute.
        room: tokens that the budgets leave.
        may_end: whether there is a slot for the sampling at the end of the prompt.
    """
    return max(0, min(room, remaining if may_end else remaining - 1))


def prefill_budget(config: SchedulerConfig, num_waiting: int, num_decoding: int) -> int:
    """Maximum prompt tokens that a step may compute.

    Args:
        num_waiting: sequences with prompt tokens to compute, in the queue or admitted.
        num_decoding: running sequences past their prompt.
    """
    if config.prefill_share == "fixed" or num_waiting == 0:
        return config.prefill_limit
    share = config.max_num_batched_tokens * num_waiting // (num_waiting + num_decoding)
    return min(max(share, 1), config.prefill_limit)


def positions_that_fit(config: SchedulerConfig) -> int:
    """Maximum prompt and output positions of a sequence that has the whole KV pool. With the admission ``optimistic``
    its last position needs no KV."""
    capacity = config.most_positions() if len(config.groups) > 1 else config.num_blocks * config.block_size
    return capacity + 1 if config.admission == "optimistic" else capacity


def output_limit(config: SchedulerConfig, request: Request) -> int:
    """Maximum output tokens of the request.

    Raises:
        InvalidParameterError: a count is not positive, or the requested output can never fit.
        PromptTooLongError: the prompt itself can never fit.
    """
    prompt, max_tokens = request.num_prompt_tokens, request.max_output_tokens
    if prompt < 1:
        raise InvalidParameterError(f"the prompt has {prompt} tokens; at least one is needed", param="prompt")
    if max_tokens is not None and max_tokens < 1:
        raise InvalidParameterError(f"max_tokens is {max_tokens}; at least 1 is needed", param="max_tokens")
    tokens_that_fit = positions_that_fit(config)
    for limit, what in (
        (config.max_model_len, f"the context holds {config.max_model_len}"),
        (tokens_that_fit, f"the KV pool of {config.num_blocks} blocks of {config.block_size} holds {tokens_that_fit}"),
    ):
        if prompt >= limit:
            raise PromptTooLongError(
                f"the prompt has {prompt} tokens, but {what} (prompt and output); at most {limit - 1} are possible",
                param="prompt",
            )
        if max_tokens is not None and prompt + max_tokens > limit:
            raise InvalidParameterError(
                f"max_tokens is {max_tokens} and the prompt has {prompt} tokens, but {what}; at most {limit - prompt} "
                "are possible here",
                param="max_tokens",
            )
    largest = min(config.max_num_batched_tokens, config.prefill_limit)
    if not config.chunking and prompt > largest:
        message = f"the prompt has {prompt} tokens, but without chunking a step computes at most {largest}"
        raise PromptTooLongError(message, param="prompt")
    return min(config.max_model_len, tokens_that_fit) - prompt if max_tokens is None else max_tokens
