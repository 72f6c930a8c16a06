"""The live side of a request: its tokens, its text so far and the rule that ends it. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lockstep.core.prefix import block_hashes
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

Sink = Callable[[TokenOutput], None]


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence of a request: its tokens, its text so far, and the state of every rule on it."""

    live: LiveRequest
    index: int
    seq_id: int
    sampler: SamplerState
    detokenizer: Detokenizer
    max_step_tokens: int
    """Tokens that one step may add, forced ones included."""
    tokens: list[int] = field(init=False)
    """Prompt and output."""
    prompt_len: int = field(init=False)
    min_len: int = field(init=False)
    max_len: int = field(init=False)
    ends: frozenset[int] = field(init=False)
    """Tokens that end it."""
    grammar: AnyGrammar | None = None
    stops: StopStrings | None = None
    bad_words: BadWords | None = None
    splitter: ReasoningSplitter | None = None
    pooler: Pooler | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """For the first sequence only: its siblings have the same prompt."""
    takes_likeliest: bool = False
    """True if each of its tokens is the most likely one, and no one asks how likely."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    delta_ids: tuple[int, ...] = ()
    """New since its last output, as are the other deltas."""
    delta_text: str = ""
    delta_reasoning: str = ""
    delta_logprobs: tuple[TokenLogprobs, ...] | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_cached_tokens: int | None = None
    """Position at which its first chunk began."""
    fault: LockstepError | None = None
    """Reason for which its next token cannot be chosen."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    block_hashes: tuple[bytes, ...] = field(init=False)
    """Of its full blocks that can be hit: those of the prompt and, once it has ended, those of its answer."""

    def __post_init__(self) -> None:
        live, request, params = self.live, self.live.request, self.live.request.params
        self.tokens = list(live.prompt_ids)
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
            self.pooler = Pooler(request.pooling, self.prompt_len)
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

    def began_at(self, start: int, now_s: float) -> None:
        """A chunk of its prompt is about to be computed."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = start
        if self.live.first_scheduled_s is None:
            self.live.first_scheduled_s = now_s

    def avoided(self) -> tuple[int, ...]:
        """The tokens that may not come now; a grammar excludes ends itself."""
        ends = self.live.end_ids if self.grammar is None and len(self.tokens) < self.min_len else ()
        return ends if self.bad_words is None else ends + self.bad_words.after(self.tokens, self.prompt_len)

    def allowed(self) -> TokenBits | None:
        """The tokens that the grammar allows next; None, with ``fault`` set, when it cannot go on."""
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
                self.fault = RequestFailedError("bad_words ban everything that the constraint allows here")
                return None
        return bits

    def embedding(self) -> npt.NDArray[np.float32] | None:
        """The pooled vector of a request that asks for one and came to its end."""
        return self.pooler.vector() if self.pooler is not None and self.finish_reason is FinishReason.STOP else None

    def judged_prompt(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log-probabilities of the prompt's tokens, where they were requested and the prompt was computed."""
        return None if self.prompt_logprobs is None else self.prompt_logprobs.entries()

    def accept(self, token_id: int, logprobs: TokenLogprobs | None) -> int:
        """Take a sampled token and those that it forces; sets ``finish_reason`` where they end the sequence.

        Returns:
            How many tokens that were.
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
        """Append one token; whether the sequence ends with it."""
        self.tokens.append(token_id)
        if self.sampler.remembers:
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
        """Close it and release the text that was still held back; an ended one stays as it is."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        text = self.detokenizer.flush()
        if self.splitter is not None:
            text = self._content(text)
            thoughts, held = self.splitter.flush()
            self._think(thoughts)
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
        """The part of new text that is content; thoughts go their own way."""
        assert self.splitter is not None
        thoughts, content = self.splitter.append(text)
        self._think(thoughts)
        return content

    def _think(self, thoughts: str) -> None:
        if thoughts:
            self.thoughts.append(thoughts)
            self.delta_reasoning += thoughts

    def take_output(self, now_s: float) -> TokenOutput:
        """Take what happened since the last call, as a value."""
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
    def num_output(self) -> int:
        """Tokens that it generated."""
        return len(self.tokens) - self.prompt_len

    @property
    def is_full(self) -> bool:
        """True if it has all the tokens that it may have."""
        return len(self.tokens) >= self.max_len

    def name_answer(self, namespace: bytes, block_size: int) -> tuple[bytes, ...]:
        """Hash the full blocks behind those of its prompt, as it ends; returns what is new in ``block_hashes``.

        The tokens of its last step have no KV, and outside of a step the last one has none.
        """
        known = self.block_hashes
        ids = self.tokens[: len(self.tokens) - max(1, len(self.delta_ids))]
        self.block_hashes = block_hashes(namespace, ids, block_size, known)
        return self.block_hashes[len(known) :]

    def span(self) -> SequenceSpan:
        live = self.live
        return SequenceSpan(
            live.arrival_s,
            live.first_scheduled_s,
            self.first_token_s,
            self.last_token_s,
            self.prompt_len,
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
    """A request between submission and its last token: what input processing made of it, and what became of it."""

    request: GenerationRequest
    prompt_ids: tuple[int, ...]
    core_request: Request
    max_output_tokens: int
    sampling: ResolvedSampling
    seed: int
    """Seed of the first sequence; sibling ``i`` draws with ``seed + i``."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a sequence, in a fixed order."""
    ignored_end_ids: tuple[int, ...] = ()
    """The model's end tokens where the request goes on after them."""
    grammars: tuple[AnyGrammar, ...] = ()
    """One per sequence of a constrained request; else empty."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens whose text is part of the answer's."""
    banned_runs: Runs = ()
    """Tokens that may not come in a row."""
    request_id: int = -1
    """Known, as is what follows, when it is submitted."""
    arrival_s: float = 0.0
    sink: Sink | None = None
    is_kept: bool = False
    """The whole answer is kept until it is requested."""
    generations: list[Generation] = field(default_factory=list)
    num_open: int = field(init=False)
    num_delivered: int = 0
    """Sequences whose last output was taken: of several that end in one step, the last one tells the whole."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    is_in_session: bool = False
    """It counts as a busy request of its session."""
    error: LockstepError | None = None

    def __post_init__(self) -> None:
        self.num_open = self.request.params.n

    @property
    def kept_hashes(self) -> tuple[bytes, ...]:
        """Block hashes of what its session comes back for: the prompt, and the answer of the first sequence."""
        return self.generations[0].block_hashes if self.generations else self.core_request.block_hashes

    def core_request_of(self, first: int | None) -> Request:
        """One sequence in the core's terms: the first, or a sibling of it, which needs no prompt row and may share."""
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
            self.generations[0].judged_prompt() if self.generations else None,
        )
