"""Input processing: checks, tokenises and hashes a request on the caller's thread before it enters the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from lockstep.artifacts.model import Adapter
from lockstep.artifacts.task import POOLINGS, Pooling
from lockstep.core.policy import SchedulerConfig, output_limit
from lockstep.core.prefix import AdapterStart, block_hashes, namespace_of
from lockstep.core.request import Request
from lockstep.engine.adapters import start_of
from lockstep.engine.generation import LiveRequest
from lockstep.engine.loading import LoadedModel
from lockstep.engine.output_rules import Runs
from lockstep.engine.request import Conversation, GenerationRequest, Prompt
from lockstep.engine.scoring import check_task, pair_request
from lockstep.engine.tokenizer import Texts, Tokenizer, too_many_tokens
from lockstep.errors import InvalidParameterError, RequestError
from lockstep.executors.sampling_params import SamplingParams, check_logprobs

MAX_SHOWN_SPECIALS = 64
"""Maximum number of special tokens that a request may show."""
MAX_SESSION_CHARS = 512
MAX_OWNER_CHARS = 4_096
"""An owner is a model, which may be named by its path."""
MAX_EXTERNAL_ID_CHARS = 128
MAX_SEGMENT_CHARS = 64
REASONING = ("auto", "off")
"""Values of a conversation's ``reasoning``."""


def prepare(
    model: LoadedModel, config: SchedulerConfig, request: GenerationRequest, adapter: Adapter | None = None
) -> LiveRequest:
    """Check what does not depend on the engine's state, and convert the request to the engine's form.

    Args:
        adapter: the adapter that the request names.

    Raises:
        InvalidParameterError: a parameter, or a token of the prompt, is out of range.
        PromptTooLongError: the prompt can never fit the context or the KV pool.
    """
    check_request(request, model.vocab_size)
    check_task(request, model.name, model.task)
    params = request.params
    request = pair_request(request, model.name, model.scoring, model.tokenizer)
    request = tokenised(model.tokenizer, model.text_limit(config), request)
    prompt_ids = request.prompt_ids
    _check_ids(prompt_ids, model.vocab_size)
    start = None if adapter is None else start_of(adapter.fingerprint, adapter.invocation_ids, prompt_ids)
    if request.gives_vector:
        live = _prepare_vector(model, config, request, prompt_ids, start)
        live.adapter = adapter
        return live
    check_logprobs("prompt_logprobs", request.prompt_logprobs, model.vocab_size)
    namespace = namespace_of(model.fingerprint, request.cache_salt)
    hashes: tuple[bytes, ...] = ()
    if config.enable_prefix_caching:
        hashes = block_hashes(namespace, prompt_ids, config.block_size, adapter=start)
    max_tokens = params.max_tokens
    if max_tokens is not None and request.cuts_to_context:
        max_tokens = min(max_tokens, output_limit(config, Request(len(prompt_ids), None)))
    core_request = Request(
        len(prompt_ids),
        max_tokens,
        hashes,
        request.priority,
        request.tenant,
        reads_cache=request.prompt_logprobs is None,
        allows_forced=params.logprobs is None and not params.bad_words,
        snapshots=_snapshots(config, request, len(prompt_ids)),
    )
    end_ids, ignored_end_ids = ends_of(model.tokenizer, params)
    return LiveRequest(
        request=request,
        prompt_ids=prompt_ids,
        core_request=core_request,
        max_output_tokens=output_limit(config, core_request),
        end_ids=end_ids,
        ignored_end_ids=ignored_end_ids,
        grammars=() if params.constraint is None else model.grammars.build(params.constraint, params.n),
        shown_ids=shown_ids_of(model.tokenizer, request),
        banned_runs=banned_runs(model.tokenizer, params.bad_words) if params.bad_words else (),
        sampling=params.resolve(model.sampling_defaults),
        namespace=namespace,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        adapter=adapter,
        adapter_start=start,
    )


def _snapshots(config: SchedulerConfig, request: GenerationRequest, num_prompt_tokens: int) -> tuple[int, ...]:
    """Positions after which states are worth keeping: the last block border with which the next turn begins as well."""
    position = request.num_lasting_tokens // config.block_size * config.block_size
    return (position,) if len(config.groups) > 1 and 0 < position < num_prompt_tokens else ()


def with_input_name(error: RequestError, where: str, prompt: Prompt) -> RequestError:
    """Add the name of an input, such as ``input[3]``, to an error about its prompt. Other errors concern the whole
    request and are unchanged."""
    if error.param == "prompt":
        text = "the text is empty" if prompt == "" else str(error)
        error.args, error.param = (f"{where}: {text}",), where
    return error


def check_request(request: GenerationRequest, vocab_size: int) -> None:
    """Admit a request by everything that can be judged without its tokens: parameters, deadlines, session and labels.

    Raises:
        InvalidParameterError: the first reason to refuse it; `param` names the field.
    """
    request.params.validate(vocab_size)
    for name, seconds in (("deadline_s", request.deadline_s), ("queue_deadline_s", request.queue_deadline_s)):
        if seconds is not None and not seconds > 0:
            raise InvalidParameterError.of(name, seconds, "positive")
    check_session(request)
    for name, most in (("external_id", MAX_EXTERNAL_ID_CHARS), ("segment", MAX_SEGMENT_CHARS)):
        if len(getattr(request, name)) > most:
            raise InvalidParameterError(f"{name} must have at most {most} characters", param=name)


def tokenised(tokenizer: Tokenizer, max_model_len: int, request: GenerationRequest) -> GenerationRequest:
    """Return the request with token ids as its prompt, truncated as it requests.

    Raises:
        InvalidParameterError, ChatTemplateError: the prompt or its truncation is invalid; see `Tokenizer.encode_chat`.
        PromptTooLongError: it does not fit the context. A conversation is measured as it was sent, including text that
            the template would leave out.
    """
    prompt, reasoning, num_lasting = request.prompt, request.reasoning, 0
    most = max_model_len - 1 if request.truncate_prompt_tokens is None else None
    kind: Texts | None = "pair" if request.logit_ids else "text" if request.pooling is not None else None
    if isinstance(prompt, Conversation):
        if prompt.reasoning not in REASONING:
            raise InvalidParameterError.of("reasoning", prompt.reasoning, f"one of {', '.join(REASONING)}")
        ids: Sequence[int] = tokenizer.encode_chat(
            prompt.messages,
            template_kwargs=prompt.template_kwargs,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final=prompt.continue_final,
            most=most,
            kind=kind,
        )
        reasoning = tokenizer.reasoning_after(ids) if prompt.reasoning == "auto" else None
        if prompt.add_generation_prompt and not prompt.continue_final:
            num_lasting = tokenizer.generation_prompts.num_before(ids, prompt.template_kwargs)
        if request.logit_ids and most is None:
            ids = _cut_document(tokenizer, prompt, ids, _num_kept(max_model_len, request))
    elif isinstance(prompt, str) and request.pooling is not None:
        return _tokenised_text(tokenizer, max_model_len, request, prompt)
    else:
        ids = tokenizer.encode(prompt, most=most, kind=kind) if isinstance(prompt, str) else prompt
    if most is not None and len(ids) > most:
        raise too_many_tokens(len(ids), most, kind)
    if (num_kept := _num_kept(max_model_len, request)) is not None:
        num_lasting = max(0, num_lasting - max(0, len(ids) - num_kept))
        ids = ids[:num_kept] if request.pooling is not None else ids[-num_kept:]
    elif ids is prompt:  # tokenised before, by the server
        return request
    return replace(
        request, prompt=tuple(ids), reasoning=reasoning, truncate_prompt_tokens=None, num_lasting_tokens=num_lasting
    )


def _tokenised_text(
    tokenizer: Tokenizer, max_model_len: int, request: GenerationRequest, text: str
) -> GenerationRequest:
    """Tokenise the text, or the pair of texts, of an embedding request. If it is cut, its beginning is kept, with the
    special tokens around it, as sentence-transformers does."""
    if request.document is None and (before := _prompt_before(tokenizer, request)):
        tokenizer.check_content(text)
        text = before + text
    ids = tokenizer.encode_text(
        text, request.document, most=max_model_len - 1, num_kept=_num_kept(max_model_len, request)
    )
    return replace(
        request, prompt=tuple(ids), document=None, prompt_name=None, text_role=None, truncate_prompt_tokens=None
    )


def _prompt_before(tokenizer: Tokenizer, request: GenerationRequest) -> str:
    """The model's prompt for the text of an embedding request; empty: none.

    In a score, the prompts are those of sentence-transformers' ``encode_query`` and ``encode_document``: the prompt
    that is named like the text's role, and never the default prompt.
    """
    if request.text_role is None:
        return tokenizer.prompt_text(request.prompt_name)
    return tokenizer.parts.prompts.get(request.text_role, "")


def _cut_document(
    tokenizer: Tokenizer, prompt: Conversation, ids: Sequence[int], num_kept: int | None
) -> Sequence[int]:
    """Cut the end of the last message, which is a document to score, and keep what the template writes after it.

    Raises:
        InvalidParameterError: nothing of the message would be left.
    """
    if num_kept is None or len(ids) <= num_kept:
        return ids
    messages = (*prompt.messages[:-1], {**prompt.messages[-1], "content": ""})
    empty = tokenizer.encode_chat(messages, template_kwargs=prompt.template_kwargs)
    if num_kept <= len(empty):
        raise InvalidParameterError(
            f"truncate_prompt_tokens is {num_kept}; it must be more than {len(empty)}, the tokens around the texts",
            param="truncate_prompt_tokens",
        )
    pairs = zip(reversed(ids), reversed(empty), strict=False)
    num_after = next((count for count, (one, other) in enumerate(pairs) if one != other), len(empty))
    return [*ids[: num_kept - num_after], *ids[len(ids) - num_after :]]


def _num_kept(max_model_len: int, request: GenerationRequest) -> int | None:
    """Number of prompt tokens that the request keeps; None: all."""
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return None
    room = max_model_len - (request.params.max_tokens or 1)
    if not (num_kept == -1 or 1 <= num_kept <= room):
        raise InvalidParameterError.of("truncate_prompt_tokens", num_kept, f"-1 or an integer of 1..{room}")
    return room if num_kept == -1 else num_kept


def banned_runs(tokenizer: Tokenizer, words: Sequence[str]) -> Runs:
    """Token sequences of the banned words, each once, in the order of the words.

    The rules are those of vLLM's parameter `bad_words`. A word is tokenised as it is and with a leading space, since
    most vocabularies have other tokens for that. If the space is a separate token, or changes the number of tokens, the
    second sequence would ban more than the word, and is left out.
    """
    runs: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False)) if word.strip() else ()
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        if bare:
            runs.append(bare)
        if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
            runs.append(spaced)
    return tuple(dict.fromkeys(runs))


def _prepare_vector(
    model: LoadedModel,
    config: SchedulerConfig,
    request: GenerationRequest,
    prompt_ids: tuple[int, ...],
    start: AdapterStart | None,
) -> LiveRequest:
    """Prepare a request whose answer is a vector.

    Pooling uses no prefix cache, since the hidden state of every position is needed. Logits need only the last one.
    """
    num_stages = model.executor.geometry.num_stages
    if request.prompt_logprobs is not None:
        raise InvalidParameterError("an embedding request cannot have prompt_logprobs", param="prompt_logprobs")
    hashes: tuple[bytes, ...] = ()
    namespace = namespace_of(model.fingerprint, request.cache_salt)
    if request.pooling is None:
        _check_logit_ids(model, request)
        if config.enable_prefix_caching:
            hashes = block_hashes(namespace, prompt_ids, config.block_size, adapter=start)
    else:
        request = replace(request, pooling=_pooling(model, request))
    core_request = Request(
        len(prompt_ids) * num_stages,
        1,
        hashes,
        request.priority,
        request.tenant,
        reads_cache=bool(hashes),
        is_bulk=request.pooling is not None,
    )
    return LiveRequest(
        request=replace(request, params=SamplingParams(temperature=0.0, max_tokens=1)),
        prompt_ids=prompt_ids,
        core_request=core_request,
        max_output_tokens=output_limit(config, core_request),
        sampling=SamplingParams(temperature=0.0).resolve({}),
        namespace=namespace,
        seed=0,
        num_stages=num_stages,
        adapter_start=start,
    )


def _pooling(model: LoadedModel, request: GenerationRequest) -> Pooling:
    if not hasattr(type(model.executor), "hidden_states"):
        raise InvalidParameterError(f"model {model.name!r} does not provide hidden states", param="pooling")
    if request.pooling == "model" or (request.pooling == "score" and model.scoring == "classifier"):
        return model.embedding.pooling
    if request.pooling not in POOLINGS:
        allowed = ", ".join(("model", *POOLINGS))
        raise InvalidParameterError(f"pooling is {request.pooling!r}; it must be one of {allowed}", param="pooling")
    return request.pooling


def _check_logit_ids(model: LoadedModel, request: GenerationRequest) -> None:
    if model.executor.geometry.num_stages > 1:
        raise InvalidParameterError(f"model {model.name!r} has no logits of tokens", param="logit_ids")
    if not all(0 <= token < model.vocab_size for token in request.logit_ids):
        raise InvalidParameterError.of("logit_ids", request.logit_ids, f"token ids below {model.vocab_size}")


def check_session(request: GenerationRequest) -> None:
    """Check the session fields of a request.

    Raises:
        InvalidParameterError: a field is invalid, or the session would have nothing to keep; `param` names the field.
    """
    if request.session_id is None:
        return
    if not 1 <= len(request.session_id) <= MAX_SESSION_CHARS:
        raise InvalidParameterError(f"session_id must have 1 to {MAX_SESSION_CHARS} characters", param="session_id")
    for name, text in (("session_id", request.session_id), ("session_owner", request.session_owner)):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # it is sent in messages and written to files
            raise InvalidParameterError(
                f"{name} contains half of a character (U+{ord(text[error.start]):04X}) at index {error.start};"
                " send whole characters",
                param=name,
            ) from None
    if len(request.session_owner) > MAX_OWNER_CHARS:
        raise InvalidParameterError(
            f"session_owner must have at most {MAX_OWNER_CHARS} characters", param="session_owner"
        )
    if request.max_active_sessions < 1:
        raise InvalidParameterError.of("max_active_sessions", request.max_active_sessions, "at least 1")
    if request.gives_vector:
        raise InvalidParameterError("an embedding request leaves no KV for a session to keep", param="session_id")


def ends_of(tokenizer: Tokenizer, params: SamplingParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """End tokens of an answer, in a fixed order, and end tokens of the model that the request ignores."""
    model_ends = tokenizer.end_token_ids
    ends, ignored = ((), model_ends) if params.ignore_eos else (model_ends, ())
    return tuple(dict.fromkeys((*ends, *params.stop_token_ids))), ignored


def shown_ids_of(tokenizer: Tokenizer, request: GenerationRequest) -> frozenset[int]:
    """Special tokens that are shown: all, or those with one of the requested texts. Other tokens are shown anyway."""
    texts = request.shown_specials
    if not request.params.skip_special_tokens:
        return tokenizer.special_token_ids
    if not texts:
        return frozenset()
    if len(texts) > MAX_SHOWN_SPECIALS or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameterError(
            f"shown_specials must be at most {MAX_SHOWN_SPECIALS} texts that are not empty", param="shown_specials"
        )
    return tokenizer.special_ids(texts)


def _check_ids(prompt_ids: tuple[int, ...], vocab_size: int) -> None:
    if not prompt_ids:
        raise InvalidParameterError("the prompt is empty; at least one token is needed", param="prompt")
    for token in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token < vocab_size:
            raise InvalidParameterError(
                f"prompt token {token} at position {prompt_ids.index(token)} is not in the vocabulary "
                f"(0..{vocab_size - 1})",
                param="prompt",
            )
