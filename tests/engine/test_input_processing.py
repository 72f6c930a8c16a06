"""Checks of a request on the caller's thread: bounds are exact at both ends."""

from __future__ import annotations

import pytest

from lockstep.engine.input_processing import MAX_SESSION_CHARS, prepare
from lockstep.engine.request import GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.executors.stub import VOCAB_SIZE
from tests.engine.conftest import MakeEngine


@pytest.mark.parametrize(("token", "is_known"), [(-1, False), (0, True), (VOCAB_SIZE - 1, True), (VOCAB_SIZE, False)])
def test_prompt_tokens_must_be_in_the_vocabulary(make_engine: MakeEngine, token: int, is_known: bool) -> None:
    engine = make_engine()
    request = GenerationRequest((65, token, 66))
    if is_known:
        assert prepare(engine.model, engine.config, request).prompt_ids == request.prompt
    else:
        with pytest.raises(InvalidParameterError, match=f"prompt token {token} at position 1 is not in the vocabulary"):
            prepare(engine.model, engine.config, request)


@pytest.mark.parametrize(
    ("num_chars", "is_id"), [(0, False), (1, True), (MAX_SESSION_CHARS, True), (MAX_SESSION_CHARS + 1, False)]
)
def test_the_length_of_a_session_id_is_limited(make_engine: MakeEngine, num_chars: int, is_id: bool) -> None:
    engine = make_engine()
    request = GenerationRequest("hello", session_id="s" * num_chars)
    if is_id:
        prepare(engine.model, engine.config, request)
    else:
        with pytest.raises(InvalidParameterError, match="1 to 512 characters") as caught:
            prepare(engine.model, engine.config, request)
        assert caught.value.param == "session_id"
