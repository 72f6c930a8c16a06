"""Promise 1 for conversations: what a turn says does not depend on what was found of the turns before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lockstep import EngineOptions, ExecutorOptions, GenerationRequest, LoadOptions
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from tests.determinism.harness import SEEDED, Answer, Subject, answer_of

POOL = EngineOptions(num_blocks=400, host_kv_memory_bytes=64 << 20, max_num_seqs=40)
NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class Talk:
    """The turns of a conversation."""

    answers: list[Answer]
    lengths: list[int]
    """Tokens of prompt and answer, by turn."""
    cached: list[int]
    num_preemptions: int


@pytest.fixture(scope="module", params=["f16", "int8"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    executor = ExecutorOptions(kv_cache_precision=request.param)
    options = LoadOptions(POOL, executor, cache_dir=_folder(tmp_path_factory))
    loaded = Subject(*load_model("pocket://", options))
    yield loaded
    loaded.model.close()


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("cache")


def talk(subject: Subject, num_others: int = 0, session: str | None = None, **config: object) -> Talk:
    """Each turn repeats all before it and adds a message; others come beside it."""
    engine = Engine(subject.model, replace(subject.config, **config))  # type: ignore[arg-type]  # fields by name
    told = Talk([], [], [], 0)
    history = tuple(subject.prompt[:90])
    for turn in range(NUM_TURNS):
        prompt = (*history, *subject.prompt[90 + 17 * turn : 107 + 17 * turn])
        others = subject.others(num_others)
        for each in others[::2]:
            engine.submit(each)
        request_id = engine.submit(GenerationRequest(prompt, SEEDED, session_id=session, priority=1))
        for each in others[1::2]:
            engine.submit(each)
        engine.run_until_idle()
        engine.scheduler.check()
        output = engine.result(request_id)
        assert output is not None
        assert output.error is None, output.error
        history = (*output.prompt_token_ids, *output.completions[0].token_ids)
        told.answers.append(answer_of(output))
        told.lengths.append(len(history))
        told.cached.append(output.num_cached_tokens)
        told = replace(told, num_preemptions=told.num_preemptions + output.num_preemptions)
    return told


@pytest.fixture(scope="module")
def expected(subject: Subject) -> list[Answer]:
    """What is said where nothing is found again."""
    return talk(subject, enable_prefix_caching=False).answers


def test_turns_find_all_that_they_may_and_say_the_same(subject: Subject, expected: list[Answer]) -> None:
    warm = talk(subject)
    assert warm.answers == expected
    size = subject.config.block_size
    found = [(length - 1) // size * size for length in warm.lengths[:-1]]
    assert warm.cached == [0, *found]


@pytest.mark.parametrize(("num_others", "session"), [(1, None), (5, "s")])
def test_beside_others_too(subject: Subject, expected: list[Answer], num_others: int, session: str | None) -> None:
    assert talk(subject, num_others, session).answers == expected


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_and_where_blocks_are_scarce(subject: Subject, expected: list[Answer], preemption: str) -> None:
    tight = {"num_blocks": 14, "max_num_batched_tokens": 96, "max_num_seqs": 8, "num_host_blocks": 2}
    scarce = talk(subject, 7, None, **tight, preemption=preemption)
    assert scarce.num_preemptions > 0
    assert scarce.answers == expected
