"""The stub says what its prompt demands, and breaks when it is told to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lockstep.core.step import StepPlan
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, ExecutorError, UsageError
from lockstep.executors.base import Executor, SequenceObserver, StepBatch
from lockstep.executors.stub import (
    END_ID,
    HEAD_ID,
    MAX_ID,
    USER_ID,
    VOCAB_SIZE,
    StubExecutor,
    StubOptions,
    read_answers,
    reply_of,
    stub_tokenizer_parts,
)

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


@pytest.mark.parametrize(
    ("text", "intent"),
    [
        ("ask specialist-12 please", "specialist-12"),
        ("ask SPECIALIST-1, please", "specialist-1"),
        ("ask spec of specialist-122", "spec"),
        ("specialist-122", "specialist-12"),
        ("who knows", "none"),
    ],
)
def test_a_whole_word_id_wins_over_a_partial_one_and_a_longer_over_a_shorter(text: str, intent: str) -> None:
    options = StubOptions.parse("stub://r?field=intent&ids=spec,specialist-1,specialist-12")
    assert reply_of(options, [USER_ID, *text.encode()], 99) == f"intent={intent}".encode()


def test_other_models_count_bytes_not_special_tokens() -> None:
    assert reply_of(StubOptions("x"), [USER_ID, *"é!".encode(), END_ID], 70) == b"[stub:x] ok len=3 max=70"


@pytest.mark.parametrize("num_bytes", [1, 43, 999, 8191])
@pytest.mark.parametrize("most", [8, 9, 16, 30, 32, 100])
def test_an_answer_ends_by_itself_from_eight_tokens_on(num_bytes: int, most: int) -> None:
    """However long the name is; and it says what it always says."""
    options = StubOptions("a-specialist-for-all-that-can-happen")
    reply = list(reply_of(options, [USER_ID, *b"x" * num_bytes, END_ID], most))
    assert len(reply) < most, "and so there is room for the end"
    text = f"[stub:{options.name}] ok len={num_bytes} max={most}"
    assert Tokenizer(stub_tokenizer_parts(options.name)).decode(reply) == text
    if len(text) < most:
        assert reply == [*text.encode()], "a token a byte, where there is room for them"


def test_answer_of_few_tokens_is_spelled_within_the_limit() -> None:
    assert reply_of(StubOptions("x"), [USER_ID, *b"hello", END_ID], 4) == b"[stub:x] ok len=5 max=4"


def test_no_text_is_tokenised_into_the_pieces_of_an_answer() -> None:
    """So that prompts, answers among them that are sent back, count their bytes."""
    tokenizer = Tokenizer(stub_tokenizer_parts("x"))
    text = "[stub:x] ok len=3 max=7<|end|>"
    assert tokenizer.encode_plain([text]) == [[*text.encode()]]
    assert tokenizer.encode(text) == [*text.removesuffix("<|end|>").encode(), END_ID]
    assert tokenizer.decode([HEAD_ID, ord("3"), MAX_ID, ord("7"), END_ID]) == text.removesuffix("<|end|>")
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_the_tokenizer_maps_bytes_and_specials_both_ways() -> None:
    tokenizer = stub_tokenizer_parts().tokenizer
    text = "<|user|>aé\n<|end|>"
    assert tokenizer.encode(text).ids == [USER_ID, *"aé\n".encode(), END_ID]
    assert tokenizer.decode(tokenizer.encode("aé 😀").ids) == "aé 😀"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("stub://x?colour=red", "unknown stub option 'colour'; known: field"),
        ("stub://x?step_mss=1", "unknown stub option 'step_mss' (did you mean 'step_ms'?)"),
        ("stub://x?colour", "unknown stub option 'colour'"),
        ("stub://x?step_ms=", "step_ms has no value"),
        ("stub://x?step_ms=soon", "step_ms is 'soon' and must be a number, at least 0"),
        ("stub://x?step_ms=-1", "step_ms is '-1' and must be a number, at least 0"),
        ("stub://x?load_ms=nan", "load_ms is 'nan' and must be a number, at least 0"),
        ("stub://x?fail_every=1.5", "fail_every is '1.5' and must be a whole number, at least 0"),
        ("stub://x?block_size=0", "block_size is '0' and must be a whole number, at least 1"),
    ],
)
def test_a_wrong_option_is_named(source: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        StubOptions.parse(source)
    assert message in str(caught.value)


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        StubOptions.parse("stub://x?typo=1&step_mss=2&load_ms=x")
    assert str(caught.value).startswith(
        "stub://x?typo=1&step_mss=2&load_ms=x: unknown stub option 'typo'; "
        "unknown stub option 'step_mss' (did you mean 'step_ms'?); "
        "load_ms is 'x' and must be a number, at least 0; known: field, ids, "
    )


def _batch(step: int) -> StepBatch:
    plan = StepPlan(step, (), (), (), (), (0, 1), (0, 0), (2, 2), ((1,), (2,)), (True, True))
    return StepBatch(plan, np.array([1, 2, 1, 2]), np.array([1, 3]))


def test_configured_failures_occur() -> None:
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


def scripted(folder: Path, *lines: str) -> StubOptions:
    path = folder / "answers.jsonl"
    path.write_text("\n".join(lines))
    return StubOptions.parse(f"stub://a?answers={path}")


def test_prompt_gets_the_first_scripted_answer_that_fits(tmp_path: Path) -> None:
    options = scripted(
        tmp_path,
        '{"when": ["sky", "why"], "answer": "Rayleigh"}',
        "",
        '{"when": "sky", "answer": "blue \u00fc"}',
    )
    answers = read_answers(options)
    replies = [reply_of(options, [USER_ID, *text.encode()], 99, answers) for text in ("why: sky", "the sky", "else")]
    assert replies == [b"Rayleigh", "blue \u00fc".encode(), reply_of(options, [USER_ID, *b"else"], 99)]


def test_scripted_answer_without_a_condition_is_for_every_prompt(tmp_path: Path) -> None:
    options = scripted(tmp_path, '{"answer": "always"}')
    executor = StubExecutor(options)
    executor.begin(1, [USER_ID, *b"x"], 99)
    assert executor._scripts[1].reply == tuple(b"always")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("no JSON", "answers.jsonl:2"),
        ('{"when": "a"}', "answer"),
        ('{"answer": 1}', "answer"),
        ('{"reply": ""}', "reply"),
    ],
)
def test_line_that_is_no_scripted_answer_is_refused_with_its_number(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(CorruptArtifactError, match=re.escape(says)):
        read_answers(scripted(tmp_path, '{"answer": "a"}', line))


def test_missing_file_of_answers_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match=r"gone\.jsonl"):
        StubExecutor(StubOptions.parse(f"stub://a?answers={tmp_path}/gone.jsonl"))
