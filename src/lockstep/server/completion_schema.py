"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Discriminator, Field, Tag

from lockstep.executors.sampling_params import MAX_LOGPROBS
from lockstep.server.schema import MAX_SEQUENCE_TOKENS, GenerationBody, TextOrTokens, Tokens, absent, tokens_or_list

MAX_PROMPTS = 1_024
"""Of one request; each is a call of its own, and all must find a place in the queue."""


Prompts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[Tokens, Tag("[tokens]")]
    | Annotated[list[TextOrTokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag("[list]")],
    Discriminator(tokens_or_list),
]


class CompletionBody(GenerationBody):
    """What a model is to go on with, and how."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Once", "max_tokens": 4},
                {"prompt": ["Once", "Twice"], "n": 2, "echo": True, "max_tokens": 4, "temperature": 0.5, "seed": 1},
                {"prompt": [1, 2, 3], "logprobs": 2, "max_tokens": 4, "stream": True},
            ]
        }
    )

    prompt: Prompts
    """Text, token ids, or a list of either; choices are numbered prompt by prompt."""
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = 16
    """Null: what the context leaves."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """How many of the most likely tokens to tell besides the chosen one."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    suffix: Annotated[None, absent("texts are only gone on with here, not filled in")] = None
