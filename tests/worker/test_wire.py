"""Messages as bytes: what goes in comes out, however the stream was cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import errors
from lockstep.core.request import FinishReason
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.output_rules import THINK_TAGS, Reasoning
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    ArtifactError,
    InvalidParameterError,
    LockstepError,
    OverBudgetError,
    RequestError,
    UnavailableError,
)
from lockstep.executors.constraint import Constraint
from lockstep.executors.logits import TokenLogprobs
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.messages import Command, Load, Loading, Outputs, Refused, Submit, TrialOptions
from lockstep.worker.wire import (
    MAX_FRAME_BYTES,
    FrameReader,
    command_decoder,
    command_encoder,
    event_decoder,
    event_encoder,
    framed,
    refusal_of,
)

TOKENS = st.lists(st.integers(0, 300_000), max_size=4).map(tuple)
SECONDS = st.floats(0, 1e6)
LOGPROBS = st.builds(
    TokenLogprobs,
    st.floats(-100, 0),
    st.lists(st.tuples(st.integers(0, 300_000), st.floats(-100, 0)), max_size=3).map(tuple),
)
STOPS = st.none() | st.integers(0, 300_000) | st.text(max_size=5)
COMPLETIONS = st.builds(
    Completion,
    st.integers(0, 3),
    st.text(max_size=20),
    TOKENS,
    st.sampled_from(FinishReason),
    STOPS,
    st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    st.text(max_size=5),
)
ANSWERS = st.builds(
    RequestOutput,
    st.integers(0, 2**63),
    TOKENS,
    st.lists(COMPLETIONS, max_size=2).map(tuple),
    st.integers(0, 100),
    st.integers(0, 100),
    st.builds(Timings, SECONDS, st.none() | SECONDS, SECONDS),
)
OUTPUTS = st.builds(
    TokenOutput,
    st.integers(0, 2**63),
    st.integers(0, 127),
    TOKENS,
    st.text(max_size=20),
    st.none() | st.sampled_from(FinishReason),
    STOPS,
    st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    st.none(),
    st.none() | ANSWERS,
    st.text(max_size=5),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 10),
    top_k=st.none() | st.integers(-1, 100),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 1000),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    stop_token_ids=TOKENS,
    ignore_eos=st.booleans(),
    n=st.integers(1, 4),
    logprobs=st.none() | st.integers(0, 5),
    constraint=st.none() | st.just(Constraint.choice(["a", "b"])) | st.just(Constraint.regex("[0-9]+")),
)
REQUESTS = st.builds(
    GenerationRequest,
    st.text(max_size=20) | st.lists(st.integers(0, 300_000), max_size=10),
    PARAMS,
    priority=st.integers(-5, 5),
    tenant=st.text(max_size=5),
    cache_salt=st.text(max_size=5),
    deadline_s=st.none() | SECONDS,
    queue_deadline_s=st.none() | SECONDS,
    reasoning=st.none() | st.builds(Reasoning, st.sampled_from(THINK_TAGS), st.booleans()),
    pooling=st.none() | st.sampled_from(["mean", "last"]),
    shown_specials=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.integers(0, 5),
    session_id=st.none() | st.text(max_size=5),
    session_owner=st.text(max_size=5),
    max_active_sessions=st.integers(1, 99),
)
ERROR_CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LockstepError)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**63), max_size=3), st.lists(OUTPUTS, max_size=4))
def test_step_outputs_survive_encoding(accepted: list[int], outputs: list[TokenOutput]) -> None:
    event = Outputs(accepted, outputs)
    assert event_decoder().decode(event_encoder().encode(event)) == event


@settings(max_examples=60)
@given(REQUESTS)
def test_request_survives_encoding(request: GenerationRequest) -> None:
    command = Submit(7, "model", request)
    assert command_decoder().decode(command_encoder().encode(command)) == command


def test_load_command_survives_encoding() -> None:
    options = LoadOptions(
        EngineOptions(num_blocks=7, order="fair", max_num_seqs=3),
        ExecutorOptions(threads=1, cache_dir=Path("/a/b")),
        cache_dir=Path("/c"),
        chat_template="{{ messages }}",
    )
    command = Load("model", "pocket://", options, TrialOptions(limit_s=3.5), -2)
    assert command_decoder().decode(command_encoder().encode(command)) == command


@pytest.mark.parametrize("kind", ERROR_CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_class_and_all_attributes(kind: type[LockstepError]) -> None:
    told: dict[str, object] = {}
    if issubclass(kind, RequestError):
        told["param"] = "top_p"
    if issubclass(kind, UnavailableError):
        told["retry_after_s"] = 2.5
    if issubclass(kind, ArtifactError):
        told["path"] = Path("/models/a.gguf")
    if issubclass(kind, OverBudgetError):
        told["table"] = "model  bytes"
    error = kind("what was wrong", **told)
    event = event_decoder().decode(event_encoder().encode(Refused(3, error)))
    assert isinstance(event, Refused)
    assert type(event.error) is kind
    assert str(event.error) == str(error)
    assert {name: str(value) for name, value in vars(event.error).items()} == {
        name: str(value) for name, value in vars(error).items()
    }


def test_a_vector_keeps_its_bits() -> None:
    vector = np.random.default_rng(0).standard_normal(48).astype(np.float32)
    answer = RequestOutput(1, (1,), (), 0, 0, Timings(0.0, None, 1.0), embedding=vector)
    event = event_decoder().decode(event_encoder().encode(Outputs([], [TokenOutput(1, 0, (), "", request=answer)])))
    assert isinstance(event, Outputs)
    received = event.outputs[0].request
    assert received is not None
    assert received.embedding is not None
    assert received.embedding.dtype == np.float32
    assert received.embedding.tobytes() == vector.tobytes()


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 9), min_size=1))
def test_frames_are_found_in_a_stream_cut_anywhere(bodies: list[bytes], cuts: list[int]) -> None:
    stream, reader, found = b"".join(map(framed, bodies)), FrameReader(), []
    turn = 0
    while stream:
        size = cuts[turn % len(cuts)]
        found += reader.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert found == bodies


def test_an_impossible_length_is_not_waited_for() -> None:
    with pytest.raises(ValueError, match=f"the limit is {MAX_FRAME_BYTES}"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_a_request_of_wrong_types_is_refused_by_its_id() -> None:
    wrong = command_encoder().encode(Submit(9, "model", GenerationRequest((1,), priority="first")))  # type: ignore[arg-type]  # that is the point
    with pytest.raises(msgspec.ValidationError) as caught:
        command_decoder().decode(wrong)
    refusal = refusal_of(wrong, caught.value)
    assert refusal.request_id == 9
    assert isinstance(refusal.error, InvalidParameterError)
    assert "priority" in str(refusal.error)


def test_invalid_body_without_a_request_has_no_refusal() -> None:
    body = event_encoder().encode(Loading("model", "read", 0.5))
    with pytest.raises(msgspec.ValidationError) as caught:
        command_decoder().decode(body)
    with pytest.raises(msgspec.ValidationError):
        refusal_of(body, caught.value)


def test_a_value_without_a_form_is_a_programming_error() -> None:
    command: Command = Load("model", "a", LoadOptions(cache_dir=object()), TrialOptions())  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="cannot contain object"):
        command_encoder().encode(command)
