"""Parameters of vLLM and llama-server that mean nothing here, or have another name: what becomes of each.

Clients that were written for these servers send them as a matter of course. A value that asks for what happens anyway
is taken without a word. Where another value would only change how something is computed or shown, a warning names it;
where it would change the answer, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


@dataclass(frozen=True, slots=True)
class Foreign:
    """One parameter of another server."""

    neutral: tuple[Any, ...]
    """Values that ask for what happens here anyway."""
    why: str
    """The reason for which another value changes nothing, or is refused."""
    is_refused: bool = False
    """Whether another value is refused; else it gets a warning."""


SAMPLERS = "samplers of that kind are not implemented here"
FOREIGN: Mapping[str, Foreign] = {
    # vLLM
    "use_beam_search": Foreign((False,), "there is no beam search here", is_refused=True),
    "length_penalty": Foreign((1,), "it belongs to beam search", is_refused=True),
    "early_stopping": Foreign((False,), "it belongs to beam search", is_refused=True),
    "detokenize": Foreign((True,), "answers are always text; return_token_ids adds the tokens", is_refused=True),
    "return_tokens_as_token_ids": Foreign((False,), "return_token_ids adds the tokens", is_refused=True),
    "chat_template": Foreign(("",), "the template is chosen where the model is served", is_refused=True),
    "documents": Foreign(([],), "documents belong into the messages", is_refused=True),
    "allowed_token_ids": Foreign((), "guided_choice and guided_regex constrain answers", is_refused=True),
    "logits_processors": Foreign(([],), "logit_bias and the guided parameters are there instead", is_refused=True),
    "spaces_between_special_tokens": Foreign((True,), "special tokens are shown as the tokenizer writes them"),
    "mm_processor_kwargs": Foreign(({},), "models here take text only"),
    "guided_decoding_backend": Foreign(("auto", "guidance", ""), "there is one: llguidance"),
    "guided_whitespace_pattern": Foreign(("",), "constrained JSON is written on one line"),
    "include_reasoning": Foreign((True,), "thoughts are in the answer, apart from its content"),
    "request_id": Foreign(("",), "the header x-request-id names a request"),
    "vllm_xargs": Foreign(({},), "there are no such extensions here"),
    "kv_transfer_params": Foreign(({},), "KV is not moved between servers by requests"),
    "truncation_side": Foreign(("left",), "a prompt keeps its last tokens"),
    # llama-server
    "cache_prompt": Foreign((True,), "the prefix cache is always used; a cache_salt of its own keeps a request apart"),
    "id_slot": Foreign((-1,), "there are no slots to choose from"),
    "n_keep": Foreign((0, -1), "a context is never shifted"),
    "n_discard": Foreign((0,), "a context is never shifted"),
    "n_probs": Foreign((0,), "logprobs and top_logprobs are there instead", is_refused=True),
    "min_keep": Foreign((0, 1), "the samplers keep one token at least"),
    "samplers": Foreign(([],), "the order of the samplers is fixed"),
    "timings_per_token": Foreign((False,), "times are in the answer's `lockstep`"),
    "return_progress": Foreign((False,), "progress of a prompt is not streamed"),
    "return_tokens": Foreign((False,), "return_token_ids adds the tokens"),
    "post_sampling_probs": Foreign((False,), "log-probabilities are those before sampling"),
    "t_max_predict_ms": Foreign((0, -1), "deadline_ms bounds the time of an answer"),
    "parse_tool_calls": Foreign((True,), "calls are always read"),
    "reasoning_format": Foreign(("auto", "deepseek"), "thoughts are in reasoning_content"),
    "thinking_budget_tokens": Foreign((-1,), "max_tokens bounds thoughts and text together"),
    "lora": Foreign(([],), "adapters are models of their own", is_refused=True),
    "grammar": Foreign(("",), "guided_grammar takes llguidance's Lark, not GBNF", is_refused=True),
    "typical_p": Foreign((1,), SAMPLERS, is_refused=True),
    "top_n_sigma": Foreign((-1, 0), SAMPLERS, is_refused=True),
    "dynatemp_range": Foreign((0,), SAMPLERS, is_refused=True),
    "dynatemp_exponent": Foreign((1,), "it belongs to dynatemp_range"),
    "mirostat": Foreign((0,), SAMPLERS, is_refused=True),
    "mirostat_tau": Foreign((5,), "it belongs to mirostat"),
    "mirostat_eta": Foreign((0.1,), "it belongs to mirostat"),
    "xtc_probability": Foreign((0,), SAMPLERS, is_refused=True),
    "xtc_threshold": Foreign((0.1,), "it belongs to xtc_probability"),
    "dry_multiplier": Foreign((0,), SAMPLERS, is_refused=True),
    "dry_base": Foreign((1.75,), "it belongs to dry_multiplier"),
    "dry_allowed_length": Foreign((2,), "it belongs to dry_multiplier"),
    "dry_penalty_last_n": Foreign((-1,), "it belongs to dry_multiplier"),
    "repeat_last_n": Foreign((-1,), "penalties look at the whole sequence"),
}
"""Null is neutral everywhere."""
OTHER_NAMES: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
}
"""Parameters of llama-server, and the names that they have here."""


def without_foreign(body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A request's members under the names that they have here, and warnings of those that change nothing.

    Raises:
        ValidationError: the value of one cannot be ignored; the error's place is its name.
    """
    kept: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        foreign, own = FOREIGN.get(name), OTHER_NAMES.get(name)
        if own is not None:
            if body.get(own) is not None and value is not None:
                raise _fault(name, value, f"it is llama-server's name of {own}, which is given too; give one of them")
            if kept.get(own) is None:
                kept[own] = value
        elif foreign is None:
            if kept.get(name) is None:
                kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in foreign.neutral):
            if foreign.is_refused:
                raise _fault(name, value, f"{foreign.why}; leave it out")
            warnings.append(f"{name}: {foreign.why}")
    return kept, tuple(warnings)


def _same(value: object, neutral: object) -> bool:
    """True if two JSON values are equal; true is no 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _fault(name: str, value: object, why: str) -> ValidationError:
    error = PydanticCustomError("value_error", "{why}", {"why": why})
    return ValidationError.from_exception_data(name, [InitErrorDetails(type=error, loc=(name,), input=value)])
