"""Parameters of vLLM and llama-server: defines how unsupported or differently named parameters are handled.

Clients written for these servers send such parameters routinely. A value that requests the behavior of this server is
accepted silently. Any other value causes a warning if it would only affect how something is computed or displayed, and
an error if it would change the answer.
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
    """Values that request the behavior of this server."""
    why: str
    """Reason why other values have no effect or are rejected."""
    is_refused: bool = False
    """Whether other values are rejected instead of causing a warning."""


SAMPLERS = "this sampler is not supported"
FOREIGN: Mapping[str, Foreign] = {
    # vLLM
    "use_beam_search": Foreign((False,), "beam search is not supported", is_refused=True),
    "length_penalty": Foreign((1,), "it applies to beam search only", is_refused=True),
    "early_stopping": Foreign((False,), "it applies to beam search only", is_refused=True),
    "detokenize": Foreign((True,), "answers are always text; use return_token_ids for token ids", is_refused=True),
    "return_tokens_as_token_ids": Foreign((False,), "use return_token_ids for token ids", is_refused=True),
    "chat_template": Foreign(("",), "the chat template is set by the server", is_refused=True),
    "documents": Foreign(([],), "include documents in the messages", is_refused=True),
    "allowed_token_ids": Foreign((), "use guided_choice or guided_regex to constrain answers", is_refused=True),
    "logits_processors": Foreign(([],), "use logit_bias or the guided parameters", is_refused=True),
    "spaces_between_special_tokens": Foreign((True,), "special tokens are returned as the tokenizer decodes them"),
    "mm_processor_kwargs": Foreign(({},), "only text is supported"),
    "guided_decoding_backend": Foreign(("auto", "guidance", ""), "the only backend is llguidance"),
    "guided_whitespace_pattern": Foreign(("",), "constrained JSON is always written on one line"),
    "include_reasoning": Foreign((True,), "reasoning is always returned, separate from the content"),
    "request_id": Foreign(("",), "use the header x-request-id"),
    "vllm_xargs": Foreign(({},), "extensions are not supported"),
    "kv_transfer_params": Foreign(({},), "requests cannot transfer KV between servers"),
    "truncation_side": Foreign(("left",), "a prompt always keeps its last tokens, and a text to embed its first ones"),
    # llama-server
    "cache_prompt": Foreign((True,), "the prefix cache is always used; use cache_salt to isolate a request"),
    "id_slot": Foreign((-1,), "slots cannot be selected"),
    "n_keep": Foreign((0, -1), "the context is never shifted"),
    "n_discard": Foreign((0,), "the context is never shifted"),
    "n_probs": Foreign((0,), "use logprobs or top_logprobs", is_refused=True),
    "min_keep": Foreign((0, 1), "the samplers keep at least one token"),
    "samplers": Foreign(([],), "the order of the samplers is fixed"),
    "timings_per_token": Foreign((False,), "timings are in the answer's `lockstep` member"),
    "return_progress": Foreign((False,), "prompt progress is not streamed"),
    "return_tokens": Foreign((False,), "use return_token_ids for token ids"),
    "post_sampling_probs": Foreign((False,), "log-probabilities are always those before sampling"),
    "t_max_predict_ms": Foreign((0, -1), "use deadline_ms to limit the time of an answer"),
    "parse_tool_calls": Foreign((True,), "tool calls are always parsed"),
    "reasoning_format": Foreign(("auto", "deepseek"), "reasoning is always in reasoning_content"),
    "thinking_budget_tokens": Foreign((-1,), "max_tokens limits reasoning and text together"),
    "lora": Foreign(([],), "an adapter is a model; set `model` to its name", is_refused=True),
    "grammar": Foreign(("",), "GBNF is not supported; use guided_grammar with llguidance's Lark", is_refused=True),
    "typical_p": Foreign((1,), SAMPLERS, is_refused=True),
    "top_n_sigma": Foreign((-1, 0), SAMPLERS, is_refused=True),
    "dynatemp_range": Foreign((0,), SAMPLERS, is_refused=True),
    "dynatemp_exponent": Foreign((1,), "it applies to dynatemp_range only"),
    "mirostat": Foreign((0,), SAMPLERS, is_refused=True),
    "mirostat_tau": Foreign((5,), "it applies to mirostat only"),
    "mirostat_eta": Foreign((0.1,), "it applies to mirostat only"),
    "xtc_probability": Foreign((0,), SAMPLERS, is_refused=True),
    "xtc_threshold": Foreign((0.1,), "it applies to xtc_probability only"),
    "dry_multiplier": Foreign((0,), SAMPLERS, is_refused=True),
    "dry_base": Foreign((1.75,), "it applies to dry_multiplier only"),
    "dry_allowed_length": Foreign((2,), "it applies to dry_multiplier only"),
    "dry_penalty_last_n": Foreign((-1,), "it applies to dry_multiplier only"),
    "repeat_last_n": Foreign((-1,), "penalties apply to the whole sequence"),
}
"""Parameters without the same meaning here. Null is neutral for all of them."""
OTHER_NAMES: Mapping[str, str] = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "json_schema": "guided_json",
}
"""Parameters of llama-server, each with its name here."""


def without_foreign(body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a request's members under this server's names, and warnings about members that have no effect.

    Raises:
        ValidationError: a value cannot be ignored; the error's location is the parameter name.
    """
    kept: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        foreign, own = FOREIGN.get(name), OTHER_NAMES.get(name)
        if own is not None:
            if body.get(own) is not None and value is not None:
                raise _fault(name, value, f"it is llama-server's name of {own}, also given; give only one of them")
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
    """True if two JSON values are equal. The boolean true does not equal 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _fault(name: str, value: object, why: str) -> ValidationError:
    error = PydanticCustomError("value_error", "{why}", {"why": why})
    return ValidationError.from_exception_data(name, [InitErrorDetails(type=error, loc=(name,), input=value)])
