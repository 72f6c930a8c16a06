"""Generation state of a request: holds its tokens, its text so far and the rules that end it. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lockstep.core.prefix import AdapterStart
from lockstep.core.request import FinishReason, Request
from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.metrics import SequenceSpan
from lockstep.engine.output_rules import BadWords, Pooler, PromptLogprobs, ReasoningSplitter, Runs, StopStrings
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError, RequestFailedError
from lockstep.executors.grammar import AnyGrammar, TokenBits
from lockstep.executors.logits import TokenLogprobs
from lockstep.executors.sampling import SamplerState
from lockstep.executors.sampling_params import ResolvedSampling

if TYPE_CHECKING:
    from lockstep.artifacts.model import Adapter

Sink = Callable[[TokenOutput], None]


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence of a request: its tokens, its text so far, and the state of each output rule."""

    live: LiveRequest
    index: int
    seq_id: int
    sampler: SamplerState
    detokenizer: Detokenizer
    max_step_tokens: int
    """Maximum tokens that one step may add, including jump-forward tokens."""
    tokens: list[int] = field(init=False)
    """Token ids by position: of the prompt, once per stage, and of the output."""
    prompt_len: int = field(init=False)
    min_len: int = field(init=False)
    max_len: int = field(init=False)
    ends: frozenset[int] = field(init=False)
    """Token ids that end the sequence."""
    grammar: AnyGrammar | None = None
    stops: StopStrings | None = None
    bad_words: BadWords | None = None
    splitter: ReasoningSplitter | None = None
    pooler: Pooler | None = None
    vector: npt.NDArray[np.float32] | None = None
    """Answer of an embedding request that has ended, or the requested logits."""
    prompt_logprobs: PromptLogprobs | None = None
    """Set only for the first sequence, since its siblings have the same prompt."""
    takes_likeliest: bool = False
    """True if each of its tokens is the most likely one and no log-probabilities were requested."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    early_outputs: list[TokenOutput] = field(default_factory=list)
    """Outputs of the current step before the last one, if it gave several tokens one after the other."""
    delta_ids: tuple[int, ...] = ()
    """New tokens since its last output. The other deltas have the same meaning."""
    delta_text: str = ""
    delta_reasoning: str = ""
    delta_logprobs: tuple[TokenLogprobs, ...] | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_cached_tokens: int | None = None
    """Position at which its first chunk began."""
    fault: LockstepError | None = None
    """The reason why its next token cannot be chosen."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    block_hashes: tuple[bytes, ...] = field(init=False)
    """Hashes of its full blocks that can be hit: those of the prompt and, once it has ended, those of its answer."""

    def __post_init__(self) -> None:
        live, request, params = self.live, self.live.request, self.live.request.params
        self.tokens = list(live.prompt_ids) * live.num_stages
        self.prompt_len = len(self.tokens)
        self.block_hashes = live.core_request.block_hashes
        self.min_len = self.prompt_len + params.min_tokens
        self.max_len = self.prompt_len + live.max_output_tokens
        self.ends = frozenset(live.end_ids)
        if live.grammars:
            self.grammar = live.grammars[self.index]
        if params.stop:
            self.stops = StopStrings(params.stop, shows_stop=params.include_stop_str_in_output)
        if live.banned_runs:
            self.bad_words = BadWords(live.banned_runs)
        if request.reasoning is not None:
            self.splitter = ReasoningSplitter(request.reasoning)
        if request.pooling is not None:
            assert request.pooling != "model", "input processing resolves it"
            assert request.pooling != "score", "and this one"
            num_tokens = len(live.prompt_ids)
            self.pooler = Pooler(request.pooling, num_tokens, self.prompt_len - num_tokens)
        if request.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = PromptLogprobs(live.prompt_ids, request.prompt_logprobs)
        if params.logprobs is not None:
            self.logprobs = []
        self.takes_likeliest = (
            self.sampler.is_plain_greedy
            and self.grammar is None
            and self.bad_words is None
            and not params.min_tokens
            and params.logprobs is None
        )

    def start_chunk(self, start: int, now_s: float) -> None:
        """Record that a chunk of its prompt is about to be computed."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = start
        if self.live.first_scheduled_s is None:
            self.live.first_scheduled_s = now_s

    def suppressed_ids(self) -> tuple[int, ...]:
        """The tokens that may not come next. A grammar itself excludes the end tokens."""
        ends = self.live.end_ids if self.grammar is None and len(self.tokens) < self.min_len else ()
        return ends if self.bad_words is None else ends + self.bad_words.after(self.tokens, self.prompt_len)

    def allowed(self) -> TokenBits | None:
        """The tokens that the grammar allows next; None, with ``fault`` set, if it cannot continue."""
        assert self.grammar is not None, "only for a constrained sequence"
        avoided = self.live.ignored_end_ids
        if len(self.tokens) < self.min_len:
            avoided += self.live.end_ids
        try:
            bits = self.grammar.allowed(avoided)
        except RequestFailedError as error:
            self.fault = error
            return None
        if self.bad_words is not None:
            for token in self.bad_words.after(self.tokens, self.prompt_len):
                bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if not bits.any():
                self.fault = RequestFailedError("bad_words excludes every token that the constraint allows here")
                return None
        return bits

    def embedding(self) -> npt.NDArray[np.float32] | None:
        """Return the vector of an embedding request that has ended normally; None: there is none."""
        return self.vector if self.finish_reason is FinishReason.STOP else None

    def prompt_entries(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log-probabilities of the prompt's tokens, if they were requested and the prompt was computed."""
        return None if self.prompt_logprobs is None else self.prompt_logprobs.entries()

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> int:
        """Append a sampled token and the tokens that it forces. Sets ``finish_reason`` if they end the sequence.

        Returns:
            The number of tokens appended.
        """
        known = len(self.tokens)
        self.delta_ids, self.delta_text = (token_id,), ""
        if self._take(token_id, logprobs) or self.grammar is None:
            return 1
        room = min(self.max_step_tokens, self.max_len - known) - 1 if self.live.core_request.allows_forced else 0
        try:
            forced = self.grammar.accept(token_id, room)
        except RequestFailedError as error:
            self.live.error = self.fault = error
            self.end(FinishReason.ERROR)
            return 1
        for token in forced:
            self.delta_ids += (token,)
            if self._take(token, None):
                break
        else:
            if self.grammar.is_complete:
                self.end(FinishReason.STOP)
        return len(self.tokens) - known

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Append one token; True: the sequence ends with it."""
        self.tokens.append(token_id)
        if self.sampler.needs_history:
            self.sampler.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
            self.delta_logprobs = (logprobs,)
        is_end = token_id in self.ends and len(self.tokens) > self.min_len
        if is_end:
            self.stop_reason = token_id
            if not self.live.request.params.include_stop_str_in_output:
                self.end(FinishReason.STOP)
                return True
        text = self.detokenizer.append(token_id)
        if self.splitter is not None:
            text = self._content(text or self.splitter.tag(self.detokenizer.special_text(token_id)))
        if self.stops is not None and len(self.tokens) >= self.min_len:
            text, hit = self.stops.append(text)
            if hit is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, hit
        if text:
            self.texts.append(text)
        self.delta_text += text
        if is_end:
            self.end(FinishReason.STOP)
        return self.finish_reason is not None

    def end(self, reason: FinishReason) -> None:
        """End the sequence and release the text that was still held back. A sequence that has ended is left
        unchanged."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        text = self.detokenizer.flush()
        if self.splitter is not None:
            text = self._content(text)
            thoughts, held = self.splitter.flush()
            self._add_reasoning(thoughts)
            text += held
        if self.stops is not None:
            text, hit = self.stops.append(text)
            if hit is None:
                text += self.stops.flush()
            else:
                self.finish_reason, self.stop_reason = FinishReason.STOP, hit
        if text:
            self.texts.append(text)
            self.delta_text += text

    def _content(self, text: str) -> str:
        """Return the part of new text that is content; reasoning is collected separately."""
        assert self.splitter is not None
        thoughts, content = self.splitter.append(text)
        self._add_reasoning(thoughts)
        return content

    def _add_reasoning(self, thoughts: str) -> None:
        if thoughts:
            self.thoughts.append(thoughts)
            self.delta_reasoning += thoughts

    def take_output(self, now_s: float) -> TokenOutput:
        """Return the changes since the last call."""
        live = self.live
        ended = self.finish_reason is not None
        live.num_delivered += ended
        is_last = ended and live.num_open == 0 and live.num_delivered == len(live.generations)
        output = TokenOutput(
            live.request_id,
            self.index,
            self.delta_ids,
            self.delta_text,
            self.finish_reason,
            self.stop_reason,
            self.delta_logprobs,
            live.error if ended else None,
            live.output(now_s) if is_last else None,
            self.delta_reasoning,
        )
        self.delta_ids, self.delta_text, self.delta_logprobs, self.delta_reasoning = (), "", None, ""
        return output

    @property
    def early_ids(self) -> tuple[int, ...]:
        """The tokens of its early outputs."""
        return tuple([token for output in self.early_outputs for token in output.token_ids])

    @property
    def step_ids(self) -> tuple[int, ...]:
        """The tokens that it got in the current step."""
        return self.early_ids + self.delta_ids if self.early_outputs else self.delta_ids

    @property
    def num_output(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def is_full(self) -> bool:
        """True if the sequence has its maximum number of tokens."""
        return len(self.tokens) >= self.max_len

    @property
    def computed_ids(self) -> list[int]:
        """Tokens that have KV when the sequence ends. Those of its last step have none; outside of a step, the last
        token has none."""
        return self.tokens[: len(self.tokens) - max(1, len(self.delta_ids))]

    def span(self) -> SequenceSpan:
        live = self.live
        return SequenceSpan(
            live.arrival_s,
            live.first_scheduled_s,
            self.first_token_s,
            self.last_token_s,
            len(live.prompt_ids),
            self.num_output,
            self.num_cached_tokens or 0,
            self.max_len - self.prompt_len,
        )

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "a completion is read after its end"
        return Completion(
            self.index,
            "".join(self.texts),
            tuple(self.tokens[self.prompt_len :]),
            self.finish_reason,
            self.stop_reason,
            None if self.logprobs is None else tuple(self.logprobs),
            "".join(self.thoughts),
        )


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between submission and its last token: the results of input processing, and its state."""

    request: GenerationRequest
    prompt_ids: tuple[int, ...]
    core_request: Request
    max_output_tokens: int
    sampling: ResolvedSampling
    seed: int
    """Seed of the first sequence. Sibling ``i`` samples with ``seed + i``."""
    namespace: bytes = b""
    """Root of the hashes of its blocks; empty: its blocks are not shared with other requests."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end a sequence, in a fixed order."""
    ignored_end_ids: tuple[int, ...] = ()
    """End tokens of the model that do not end this request."""
    grammars: tuple[AnyGrammar, ...] = ()
    """One grammar per sequence of a constrained request; otherwise empty."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens whose text is part of the answer."""
    banned_runs: Runs = ()
    """Token sequences that may not be generated."""
    num_stages: int = 1
    """Positions of each prompt token, see `Geometry`."""
    adapter: Adapter | None = None
    """Adapter that the request names, with the content that the name had at submission; None: it names none."""
    adapter_start: AdapterStart | None = None
    """Where the adapter begins; None: the base model computes every token."""
    request_id: int = -1
    """Id of the request. It and the following fields are set at submission."""
    arrival_s: float = 0.0
    sink: Sink | None = None
    is_kept: bool = False
    """True if the whole answer is kept until `Engine.result` reads it."""
    generations: list[Generation] = field(default_factory=list)
    num_open: int = field(init=False)
    num_delivered: int = 0
    """Sequences whose last output was taken. If several end in one step, the last one carries the request's output."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_in_session: bool = False
    """True if it counts as a busy request of its session."""
    adapter_slot: int = 0
    """Slot of the adapter while the request is computed; 0: it has none, or waits."""
    error: LockstepError | None = None

    def __post_init__(self) -> None:
        self.num_open = self.request.params.n

    @property
    def kept_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the blocks that its session keeps: the prompt, and the answer of the first sequence."""
        return self.generations[0].block_hashes if self.generations else self.core_request.block_hashes

    def borders(self, block_size: int) -> tuple[int, ...]:
        """Numbers of blocks after which the session's next request may continue: before the answer's beginning, since
        templates may write it differently then, after the prompt, and at the answer's end."""
        positions = (*self.core_request.snapshots[-1:], len(self.prompt_ids))
        ends = (*[position // block_size for position in positions], len(self.kept_hashes))
        return tuple([end for end in dict.fromkeys(ends) if end])

    def core_request_of(self, first: int | None) -> Request:
        """The core's request for one sequence. Siblings of the first one need no prompt row and may share its
        blocks."""
        if first is None:
            return self.core_request
        return replace(self.core_request, sibling_of=first, reads_cache=True)

    def output(self, now_s: float) -> RequestOutput:
        """The whole answer, once every sequence has ended."""
        arrival = self.arrival_s
        scheduled = now_s if self.first_scheduled_s is None else self.first_scheduled_s
        ttft = None if self.first_token_s is None else self.first_token_s - arrival
        return RequestOutput(
            self.request_id,
            self.prompt_ids,
            tuple(generation.completion() for generation in self.generations),
            self.num_cached_tokens,
            self.num_preemptions,
            Timings(scheduled - arrival, ttft, now_s - arrival),
            self.error,
            self.generations[0].embedding() if self.generations else None,
            self.generations[0].prompt_entries() if self.generations else None,
        )
