"""Recordings with content of embeddings, scores and chats are executed, and every vector is compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.core.request import Priority
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.execute import MachineOptions, execute
from lockstep.replay.execution import Execution, describe, facts
from lockstep.replay.request_timeline import RequestTimeline
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.worker.flight.entries import Dispatched, EngineEntry, Entry, Vector
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Abort, DispatchDecided, Load, Loaded, Submit, TrialOptions
from tests.engine.encoder_engines import embedding_request, text, write_served_encoder
from tests.executors.native.loading import EACH_ISA
from tests.replay.recordings import files_of, rewrite_entries
from tests.worker.support import Bench, running

EMBEDDER, CLASSIFIER, CHAT = "bert", "xlm-roberta-classifier", "pocket://"
NUM_TEXTS = 5
NUM_CHAT_TOKENS = 8
YES_NO = (101, 102)
CHAT_OPTIONS = EngineOptions(num_blocks=60, max_num_seqs=8)
ENCODER_OPTIONS = EngineOptions(num_blocks=20, max_num_seqs=8, max_num_queued_tokens=100_000)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sources of the models."""
    folder = tmp_path_factory.mktemp("models")
    return {CHAT: CHAT, **{name: str(write_served_encoder(folder, name)) for name in (EMBEDDER, CLASSIFIER)}}


@pytest.fixture(scope="module")
def folder(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of texts, pairs, answers by two logits and chats together; one text is cancelled."""
    folder = tmp_path_factory.mktemp("vectors")
    with running(trace=TraceOptions(str(folder), has_content=True)) as bench:
        load(bench, models)
        submit_everything(bench)
        bench.tell(DispatchDecided(EMBEDDER, 1, "billing", (("billing", 0.75), ("legal", 0.5))))
        bench.checked()
    return folder


def load(bench: Bench, models: dict[str, str]) -> None:
    for key, source in models.items():
        limits = CHAT_OPTIONS if key == CHAT else ENCODER_OPTIONS
        options = LoadOptions(limits, ExecutorOptions())
        bench.tell(Load(key, source, options, TrialOptions(enabled=False), Priority.NORMAL))
        bench.heard(Loaded, lambda event, key=key: event.replica == key)  # type: ignore[misc]  # a default


def submit_everything(bench: Bench) -> None:
    generator = random.Random(3)
    texts = [text(generator, generator.choice((1, 31, 33, 90))) for _ in range(NUM_TEXTS)]
    for number, ids in enumerate(texts):
        prompt, params = tuple(range(60, 70 + number)), SamplingParams(max_tokens=NUM_CHAT_TOKENS, ignore_eos=True)
        bench.tell(
            Submit(5 * number, EMBEDDER, embedding_request(ids, external_id=f"text-{number}")),
            Submit(5 * number + 1, CLASSIFIER, embedding_request(ids, is_score=True, external_id=f"pair-{number}")),
            Submit(5 * number + 2, CHAT, GenerationRequest(prompt, logit_ids=YES_NO, external_id=f"answer-{number}")),
            Submit(5 * number + 3, CHAT, GenerationRequest(prompt, pooling="mean", external_id=f"mean-{number}")),
            Submit(5 * number + 4, CHAT, GenerationRequest(prompt, params, external_id=f"chat-{number}")),
        )
    bench.tell(Submit(1_000, EMBEDDER, embedding_request(text(generator, 512))), Abort(EMBEDDER, (1_000,)))
    for request_id in (*range(5 * NUM_TEXTS), 1_000):
        bench.answer(request_id)


def executed(folder: Path, models: dict[str, str], machine: MachineOptions | None = None) -> list[Execution]:
    options = machine or MachineOptions()
    return [found for source in models.values() for found in execute(open_trace(folder), source, machine=options)]


def test_every_vector_is_compared(folder: Path, models: dict[str, str]) -> None:
    assert verify(open_trace(folder)).is_identical
    found = executed(folder, models)
    assert [execution.diverged for execution in found] == [None] * 3, [list(describe(each)) for each in found]
    assert {execution.engine.key: execution.num_vectors for execution in found} == {
        CHAT: 2 * NUM_TEXTS,
        EMBEDDER: NUM_TEXTS,
        CLASSIFIER: NUM_TEXTS,
    }
    assert [execution.num_tokens for execution in found] == [NUM_TEXTS * NUM_CHAT_TOKENS, 0, 0]
    [both] = describe(found[0])
    assert both.startswith(f"execute: {NUM_TEXTS * NUM_CHAT_TOKENS} tokens and {2 * NUM_TEXTS} vectors of ")
    assert both.endswith(", every token and vector equal")
    [line] = [line for each in found for line in describe(each) if each.engine.key == EMBEDDER]
    assert line.startswith(f"execute: {NUM_TEXTS} vectors of {NUM_TEXTS + 1} requests in ")
    assert line.endswith(", every vector equal")
    assert facts(found[1])["vectors"] == NUM_TEXTS


@pytest.mark.parametrize("isa", EACH_ISA)
def test_another_instruction_set_computes_the_same_vectors(folder: Path, models: dict[str, str], isa: str) -> None:
    found = executed(folder, models, MachineOptions(threads=1, isa=isa))
    assert [execution.diverged for execution in found] == [None] * 3


def flip(numbers: bytes) -> bytes:
    """Change the lowest bit of the last number."""
    return numbers[:-4] + bytes([numbers[-4] ^ 1]) + numbers[-3:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: [Vector(entry.engine, entry.seq_id, flip(entry.numbers))], r"number \d+ of \d+ is "),
        (lambda entry: [Vector(entry.engine, entry.seq_id, entry.numbers[:-4])], r"\d+ numbers in the recording, and "),
        (lambda entry: [], "none in the recording, and "),
    ],
)
@pytest.mark.parametrize("key", [EMBEDDER, CLASSIFIER, CHAT])
def test_a_changed_vector_fails(
    folder: Path,
    models: dict[str, str],
    tmp_path: Path,
    key: str,
    change: Callable[[Vector], list[Entry]],
    message: str,
) -> None:
    [path] = files_of(folder)
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())

    def forge(entries: list[Entry]) -> None:
        [engine] = {entry.number for entry in entries if isinstance(entry, EngineEntry) and entry.key == key}
        place, entry = [
            (place, entry)
            for place, entry in enumerate(entries)
            if isinstance(entry, Vector) and entry.engine == engine
        ][3]
        entries[place : place + 1] = change(entry)

    rewrite_entries(copied, forge)
    [execution] = execute(open_trace(copied), models[key])
    assert execution.diverged is not None
    assert execution.num_vectors < 2 * NUM_TEXTS
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(execution.diverged.what)


def test_one_request_is_executed_and_explained_in_tokens(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = models[EMBEDDER]
    assert invoke(["replay", "--execute", str(folder), "--model", source, "--request", "text-1"]) == 0
    assert "execute: 1 vector of request text-1 in " in capsys.readouterr().out
    assert invoke(["replay", "--verify", str(folder), "--request", "text-1"]) == 0
    _, head, first, dispatched, *rest = capsys.readouterr().out.splitlines()
    timeline = RequestTimeline("text-1")
    assert verify(open_trace(folder), timeline=timeline).is_identical
    [sequence] = timeline.sequences
    num_tokens = sequence.prompt_tokens
    assert num_tokens in (1, 31, 33, 90)
    assert head == "request text-1: 1 sequence"
    assert first.endswith(f" {num_tokens} prompt tokens in 4 stages; a vector of 64 numbers; ended: stop")
    assert dispatched == "  its vector chose billing by nearest examples: billing 0.7500, legal 0.5000"
    assert f"{num_tokens - 1} in stage 3" in rest[-1]
    assert (sequence.num_stages, sequence.output_tokens, sequence.vector_size) == (4, 0, 64)
    assert (sequence.dispatched, sequence.scores) == ("billing", {"billing": 0.75, "legal": 0.5})
    assert sum(each.num_tokens for each in sequence.steps) == 4 * num_tokens


def test_a_request_for_logits_is_explained_without_stages(folder: Path) -> None:
    timeline = RequestTimeline("answer-2")
    assert verify(open_trace(folder), timeline=timeline).is_identical
    [first, *_] = [line for line in timeline.describe() if line.startswith("sequence")]
    assert first.endswith(" 12 prompt tokens; a vector of 2 numbers; ended: stop")


def test_a_recording_without_content_has_no_vectors(models: dict[str, str], tmp_path: Path) -> None:
    with running(trace=TraceOptions(str(tmp_path))) as bench:
        load(bench, {EMBEDDER: models[EMBEDDER]})
        bench.tell(Submit(0, EMBEDDER, embedding_request((7, 8, 9), external_id="only")))
        bench.answer(0)
    assert not [entry for entry in open_trace(tmp_path).entries() if isinstance(entry, Vector | Dispatched)]
    timeline = RequestTimeline("only")
    assert verify(open_trace(tmp_path), timeline=timeline).is_identical
    assert [line for line in timeline.describe() if "3 prompt tokens in 4 stages; a vector; ended: stop" in line]
