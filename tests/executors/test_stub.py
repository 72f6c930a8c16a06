"""The stub says what its prompt demands, and breaks when it is told to."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.step import StepPlan
from lockstep.errors import ExecutorError, UsageError
from lockstep.executors.base import Executor, SequenceObserver, StepBatch
from lockstep.executors.stub import END_ID, USER_ID, StubExecutor, StubOptions, reply_of, stub_tokenizer_parts

ROUTER = StubOptions.parse("stub://router?field=intent&ids=billing,technical,legal,returns")


@pytest.mark.parametrize(
    ("text", "intent"),
    [
        ("I want a refund", "billing"),
        ("I was CHARGED twice", "billing"),
        ("login does not work", "technical"),
        ("an error in my contract", "technical"),
        ("is this clause valid", "legal"),
        ("where are my returns", "returns"),
        ("what is the capital of France", "none"),
    ],
)
def test_an_entry_model_names_the_specialist(text: str, intent: str) -> None:
    assert reply_of(ROUTER, [USER_ID, *text.encode()], 9) == f"intent={intent}".encode()


def test_only_the_last_user_message_routes() -> None:
    prompt = [USER_ID, *b"refund", END_ID, USER_ID, *b"hello"]
    assert reply_of(ROUTER, prompt, 9) == b"intent=none"


def test_a_keyword_whose_specialist_does_not_exist_is_passed_over() -> None:
    options = StubOptions.parse("stub://r?field=intent&ids=legal")
    assert reply_of(options, [USER_ID, *b"refund this contract"], 9) == b"intent=legal"


def test_other_models_count_bytes_not_special_tokens() -> None:
    assert reply_of(StubOptions("x"), [USER_ID, *"é!".encode(), END_ID], 7) == b"[stub:x] ok len=3 max=7"


def test_the_tokenizer_maps_bytes_and_specials_both_ways() -> None:
    tokenizer = stub_tokenizer_parts().tokenizer
    text = "<|user|>aé\n<|end|>"
    assert tokenizer.encode(text).ids == [USER_ID, *"aé\n".encode(), END_ID]
    assert tokenizer.decode(tokenizer.encode("aé 😀").ids) == "aé 😀"


@pytest.mark.parametrize(
    ("source", "message"),
    [("stub://x?colour=red", "unknown stub option 'colour'; known: field"), ("stub://x?step_ms=soon", "step_ms")],
)
def test_a_wrong_option_is_named(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StubOptions.parse(source)


def _batch(step: int) -> StepBatch:
    plan = StepPlan(step, (), (), (), (), (0, 1), (0, 0), (2, 2), ((1,), (2,)), (True, True))
    return StepBatch(plan, np.array([1, 2, 1, 2]), np.array([1, 3]))


def test_faults_come_when_asked_for() -> None:
    executor = StubExecutor(StubOptions.parse("stub://x?fail_every=2&nan_every=2"))
    assert isinstance(executor, SequenceObserver)
    _is_executor: Executor = executor
    executor.begin(0, [1, 2], 5)
    executor.begin(1, [1, 2], 5)
    logits = executor.execute(_batch(0))
    assert np.isfinite(logits).all(axis=1).tolist() == [True, False]
    with pytest.raises(ExecutorError, match="step 1 fails"):
        executor.execute(_batch(1))
    executor.close()
