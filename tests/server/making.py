"""Answers that are made without a server: their encoders, and what a cluster would say of them."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.stub import END_ID, stub_tokenizer_parts
from lockstep.server.answer import ResponseMetadata
from lockstep.server.answer_response import Answer, Encoder
from lockstep.server.choices import Choice
from lockstep.server.chunk_encoder import ChatEncoder
from lockstep.server.completions import CompletionBody, CompletionEncoder
from lockstep.server.request_context import RequestContext

TOKENIZER = Tokenizer(stub_tokenizer_parts())


def metadata(*, include_usage: bool = False) -> ResponseMetadata:
    return ResponseMetadata("chatcmpl-1", 7, "m", "fp_1", include_usage=include_usage)


def context() -> RequestContext:
    return RequestContext("r", "/v1/chat/completions", 0.0)


def chat_encoder(*, include_usage: bool = False) -> ChatEncoder:
    return ChatEncoder(metadata(include_usage=include_usage), TOKENIZER, 2)


def completion_encoder(*, include_usage: bool = False) -> CompletionEncoder:
    return CompletionEncoder(metadata(include_usage=include_usage), TOKENIZER, CompletionBody(prompt=""), 2, [""])


def outputs_of(texts: Sequence[Sequence[str]], thoughts: str = "") -> list[TokenOutput]:
    """The outputs of a request whose choices speak in turn, a token each; the last carries the whole answer."""
    completions = tuple(
        Completion(index, "".join(pieces), (65,) * len(pieces), FinishReason.STOP, None, None, thoughts)
        for index, pieces in enumerate(texts)
    )
    whole = RequestOutput(1, (1, 2, 3), completions, 2, 1, Timings(0.001, 0.002, 0.5))
    told = [
        TokenOutput(1, index, (65,), pieces[step])
        for step in range(max(map(len, texts), default=0))
        for index, pieces in enumerate(texts)
        if step < len(pieces)
    ]
    if thoughts:
        told = [TokenOutput(1, index, (66,), "", reasoning=thoughts) for index in range(len(texts))] + told
    last = len(texts) - 1
    ends = [
        TokenOutput(1, index, (END_ID,), "", FinishReason.STOP, END_ID, request=whole if index == last else None)
        for index in range(len(texts))
    ]
    return told + ends


def answer_of(encoder: Encoder, num_choices: int = 2) -> Answer:
    choices = [Choice(index, end_ids=frozenset([END_ID])) for index in range(num_choices)]
    return Answer([Accepted("m", (1, 2, 3))], choices, encoder, context())
