"""Token replay: replays recorded tokens as an engine's outputs, by the rules of the repeated request.

The same `Generation` as in an engine converts tokens to text and applies stop strings, reasoning, special tokens and
limits. A request equal to the recorded one has the same output.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.core.request import FinishReason, Request
from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.generation import Generation, LiveRequest
from lockstep.engine.input_processing import ends_of, shown_ids_of
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling import SamplerState
from lockstep.executors.sampling_params import SamplingParams


class TokenReplay:
    """The answer of one request, built from recorded tokens.

    Args:
        request: a request whose prompt is token ids.
        max_model_len: maximum tokens of prompt and answer together.
        arrival_s, queue_s: times for its timings.
        num_cached_tokens, num_preemptions: counts for its answer.

    Raises:
        InvalidParameterError: a parameter is out of range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        max_model_len: int,
        arrival_s: float,
        *,
        queue_s: float = 0.0,
        num_cached_tokens: int = 0,
        num_preemptions: int = 0,
    ) -> None:
        prompt_ids = request.prompt_ids
        if not prompt_ids:
            raise InvalidParameterError("the prompt is empty; at least one token is needed", param="prompt")
        params = request.params
        params.validate(tokenizer.vocab_size)
        end_ids, ignored_end_ids = ends_of(tokenizer, params)
        room = max(1, max_model_len - len(prompt_ids))
        self._live = live = LiveRequest(
            request=request,
            prompt_ids=prompt_ids,
            core_request=Request(len(prompt_ids), params.max_tokens),
            max_output_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            sampling=SamplingParams(temperature=0.0).resolve({}),  # nothing is sampled
            seed=0,
            end_ids=end_ids,
            ignored_end_ids=ignored_end_ids,
            shown_ids=shown_ids_of(tokenizer, request),
            request_id=0,
            arrival_s=arrival_s,
            first_scheduled_s=arrival_s + queue_s,
            num_cached_tokens=num_cached_tokens,
            num_preemptions=num_preemptions,
        )
        for index in range(params.n):
            sampler = SamplerState(live.sampling, live.seed, prompt_ids, 0)
            is_verbatim = params.constraint is not None
            detokenizer = Detokenizer(tokenizer, after=prompt_ids[-1], verbatim=is_verbatim, shown=live.shown_ids)
            live.generations.append(Generation(live, index, index, sampler, detokenizer, 1))

    @property
    def is_complete(self) -> bool:
        """True if every sequence has ended."""
        return self._live.num_open == 0

    def append(self, index: int, token_ids: Sequence[int], end: FinishReason | None, now_s: float) -> list[TokenOutput]:
        """Append a sequence's next tokens and return the outputs. A sequence that has ended, perhaps early by its own
        rules, has no outputs.

        Args:
            index: number of the sequence.
            end: reason with which these tokens end it, unless its rules have ended it before; None: it continues.
        """
        live, generation = self._live, self._live.generations[index]
        outputs: list[TokenOutput] = []
        last = len(token_ids) - 1
        for position, token in enumerate(token_ids):
            if generation.finish_reason is not None:
                break
            generation.accept(token, None)
            if live.first_token_s is None:
                live.first_token_s = now_s
            if generation.is_full:
                generation.end(FinishReason.LENGTH)
            if position == last and end is not None:
                generation.end(end)
            outputs.append(self._output(generation, now_s))
        if not token_ids and end is not None and generation.finish_reason is None:
            generation.end(end)
            outputs.append(self._output(generation, now_s))
        return outputs

    def _output(self, generation: Generation, now_s: float) -> TokenOutput:
        self._live.num_open -= generation.finish_reason is not None
        return generation.take_output(now_s)
