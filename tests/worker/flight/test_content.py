"""Keyed digests: what is the same in two recordings can be compared, and is nowhere to be read."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError, UsageError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.trace import STEPS, open_trace, read_frames
from lockstep.replay.verify import verify
from lockstep.worker.flight.chunks import ChangedChunkError, ChunkReader, ChunkWriter
from lockstep.worker.flight.content import decode_request
from lockstep.worker.flight.entries import (
    SCHEMA_VERSION,
    Added,
    Arrival,
    Entry,
    Header,
    Idle,
    OutputDigest,
    Pinned,
    RequestDigest,
    RequestEntry,
    Turn,
    Unpinned,
)
from lockstep.worker.flight.options import MIN_SECRET_BYTES, TraceOptions
from lockstep.worker.messages import Abort, Submit, Sweep, SweepReport
from tests.replay.recordings import entries_in, files_of, record, rewrite
from tests.worker.support import ENDLESS, running

WORDS = b"words that nobody shall find"
PLAIN = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
OTHERS = {
    "temperature": SamplingParams(max_tokens=5, seed=1, ignore_eos=True, temperature=0.5),
    "max_tokens": SamplingParams(max_tokens=7, seed=1, ignore_eos=True),
    "stop": SamplingParams(max_tokens=5, seed=1, ignore_eos=True, stop=("x",)),
    "logit_bias": SamplingParams(max_tokens=5, seed=1, ignore_eos=True, logit_bias={5: 1.0, 3: 2.0}),
    "constraint": SamplingParams(max_tokens=5, seed=1, ignore_eos=True, constraint=Constraint.regex("a+")),
}


def key_file(folder: Path, secret: str) -> str:
    path = folder / "key"
    path.write_text(secret)
    return str(path)


def recorded(
    folder: Path,
    requests: list[GenerationRequest],
    *,
    key: str = "",
    has_content: bool = False,
    source: str = "stub://alpha",
) -> Path:
    """A recording of a model that answers some requests, one after the other."""
    with running(trace=TraceOptions(str(folder), has_content=has_content, key_file=key)) as bench:
        bench.ready("a", source, LoadOptions(EngineOptions(num_blocks=64)))
        for number, request in enumerate(requests):
            bench.tell(Submit(number, "a", request))
            bench.answer(number)
    [path] = files_of(folder)
    return path


def header_of(path: Path) -> Header:
    header = entries_in(path)[0]
    assert isinstance(header, Header)
    return header


def requests_in(path: Path) -> list[RequestDigest]:
    return [entry for entry in entries_in(path) if isinstance(entry, RequestDigest)]


def outputs_in(path: Path) -> list[OutputDigest]:
    return [entry for entry in entries_in(path) if isinstance(entry, OutputDigest)]


def ask(params: SamplingParams = PLAIN, prompt: bytes = WORDS) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), params)


def test_equal_requests_under_equal_keys_have_equal_digests(tmp_path: Path) -> None:
    """And equal outputs, also where other requests came before them."""
    key = key_file(tmp_path, "of the operator alone")
    first = recorded(tmp_path / "one", [ask()], key=key)
    second = recorded(
        tmp_path / "two", [ask(prompt=b"something else"), ask()], key=key_file(tmp_path, Path(key).read_text() + "\n")
    )
    assert header_of(first).key_name == header_of(second).key_name
    [then], [_, now] = requests_in(first), requests_in(second)
    assert (then.prompt, then.parameters) == (now.prompt, now.parameters)
    [then_output], [_, now_output] = outputs_in(first), outputs_in(second)
    assert then_output.output == now_output.output
    assert (then_output.reason, then_output.num_tokens) == (FinishReason.LENGTH, 5)


def test_another_key_gives_other_digests_and_has_another_name(tmp_path: Path) -> None:
    """Where the operator has none, each recording has its own."""
    keys = [key_file(tmp_path, "of the operator alone"), "", ""]
    found = [recorded(tmp_path / str(number), [ask()], key=key) for number, key in enumerate(keys)]
    assert len({header_of(path).key_name for path in found}) == 3
    for part in ("prompt", "parameters"):
        assert len({getattr(requests_in(path)[0], part) for path in found}) == 3
    assert len({outputs_in(path)[0].output for path in found}) == 3


def test_another_prompt_has_another_digest_and_the_same_parameters(tmp_path: Path) -> None:
    same, other = requests_in(recorded(tmp_path, [ask(), ask(prompt=WORDS + b"!")]))
    assert same.prompt != other.prompt
    assert same.parameters == other.parameters


@pytest.mark.parametrize("name", OTHERS)
def test_a_parameter_that_decides_the_output_changes_the_digest(tmp_path: Path, name: str) -> None:
    [plain, other] = requests_in(recorded(tmp_path, [ask(), ask(OTHERS[name])]))
    assert plain.parameters != other.parameters
    assert plain.prompt == other.prompt


def test_parameters_without_effect_do_not_change_digests(tmp_path: Path) -> None:
    """The seed decides, and is in the recording by itself: mirrored requests may have to be given the effective one."""
    other = SamplingParams(max_tokens=5, seed=2, ignore_eos=True, n=2, logprobs=3)
    path = recorded(tmp_path, [ask(), ask(other)])
    plain, other_digest = requests_in(path)
    assert plain.parameters == other_digest.parameters
    assert {entry.seed for entry in entries_in(path) if isinstance(entry, Arrival)} == {1, 2}


def test_the_order_of_logit_biases_does_not_change_the_digest(tmp_path: Path) -> None:
    biases = ({3: 1.0, 5: 2.0}, {5: 2.0, 3: 1.0})
    first, second = requests_in(recorded(tmp_path, [ask(SamplingParams(logit_bias=each)) for each in biases]))
    assert first.parameters == second.parameters


def test_digests_match_the_documented_construction(tmp_path: Path) -> None:
    """By a second writing of it: nobody needs this program to compare them."""
    secret = "of the operator alone"
    path = recorded(tmp_path / "flight", [ask()], key=key_file(tmp_path, secret))
    key = blake2b(secret.encode(), digest_size=32).digest()

    def digest(person: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=key, person=person).digest()

    [asked] = requests_in(path)
    assert header_of(path).key_name == digest(b"key", b"").hex()
    assert asked.prompt == digest(b"prompt", b"".join(token.to_bytes(4, "little") for token in WORDS))
    assert asked.parameters == digest(
        b"parameters", msgspec.msgpack.encode([{"ignore_eos": True, "max_tokens": 5}, None])
    )


def test_each_sequence_has_an_end_and_a_request_one_entry(tmp_path: Path) -> None:
    path = recorded(tmp_path, [ask(SamplingParams(max_tokens=5, n=3, temperature=1.0, seed=3, ignore_eos=True))])
    assert [entry.seq_id for entry in requests_in(path)] == [0]
    assert sorted((entry.seq_id, entry.num_tokens) for entry in outputs_in(path)) == [(0, 5), (1, 5), (2, 5)]


def test_aborted_sequence_has_a_digest_of_its_tokens_so_far(tmp_path: Path) -> None:
    with running(trace=TraceOptions(str(tmp_path))) as bench:
        bench.ready("a", "stub://alpha?step_ms=1")
        bench.tell(Submit(7, "a", ask(ENDLESS)), Abort("a", (7,)))
        bench.answer(7)
    [path] = files_of(tmp_path)
    [ended] = outputs_in(path)
    assert ended.reason is FinishReason.ABORT


def test_the_callers_names_are_recorded(tmp_path: Path) -> None:
    named = GenerationRequest(tuple(WORDS), PLAIN, external_id="r-17", segment="eu west")
    first, second = requests_in(recorded(tmp_path, [named, ask()]))
    assert (first.external_id, first.segment) == ("r-17", "eu west")
    assert (second.external_id, second.segment) == ("", "")


def test_an_embedding_has_the_digest_of_its_vector(tmp_path: Path) -> None:
    requests = [GenerationRequest(tuple(text), pooling="mean") for text in (WORDS, WORDS, b"other words")]
    path = recorded(tmp_path, requests, source="pocket://")
    first, same, other = outputs_in(path)
    assert first.output == same.output != other.output


@pytest.mark.parametrize("has_content", [False, True])
def test_a_prompt_is_found_in_a_recording_with_content_only(tmp_path: Path, has_content: bool) -> None:
    path = recorded(tmp_path, [ask()], has_content=has_content)
    held = b"".join(frame.data for frame in read_frames(path))
    assert (WORDS in held) == has_content
    assert verify(open_trace(tmp_path)).is_identical


def test_a_key_that_is_gone_ends_no_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = recorded(tmp_path / "flight", [ask()], key=str(tmp_path / "missing"))
    assert header_of(path).key_name
    assert "the recording uses a random key" in caplog.text


@pytest.mark.parametrize("secret", ["", "x" * (MIN_SECRET_BYTES - 1), "x" * 4097])
def test_invalid_secret_is_rejected(tmp_path: Path, secret: str) -> None:
    with pytest.raises(UsageError, match=f"has {len(secret)} bytes; it must have 16 to 4096"):
        TraceOptions("flight", key_file=key_file(tmp_path, secret)).secret()


def test_a_duration_that_is_changed_is_found(tmp_path: Path) -> None:
    """With one engine no decision depends on it: the file's chain does."""
    path = recorded(tmp_path, [ask()])
    turn = next(entry for entry in entries_in(path) if isinstance(entry, Turn))
    before = msgspec.msgpack.encode(turn)
    after = msgspec.msgpack.encode(msgspec.structs.replace(turn, duration_us=turn.duration_us ^ 1))

    def change(held: bytearray) -> None:
        at = held.index(before)
        held[at : at + len(before)] = after

    rewrite(path, change)
    with pytest.raises(
        TraceError, match=r"the chunk at byte \d+ of the frame at byte 0 differs from what was recorded"
    ):
        verify(open_trace(path))


def test_chunks_that_change_places_are_found() -> None:
    writer = ChunkWriter()
    header = writer.begin_file(Header(SCHEMA_VERSION, "0", "run", 1))
    chunks: list[bytes] = []
    for entry in (Idle(), Turn(0, 1, 2, True)):
        writer.put(entry)
        chunks.append(writer.take())

    def entries(data: bytes) -> list[Entry]:
        return list(ChunkReader(STEPS).read(data))

    assert len(entries(header + chunks[0] + chunks[1])) == 3
    for wrong in (header + chunks[1] + chunks[0], header + chunks[1], chunks[0] + chunks[1]):
        with pytest.raises(ChangedChunkError):
            entries(wrong)


def test_a_small_recording_has_one_digest_for_each_sequence(tmp_path: Path) -> None:
    """Preemptions, failures, siblings and aborts: each sequence that ends has its digest once."""
    record(tmp_path, 24)
    path = files_of(tmp_path)[0]
    ended = [(entry.engine, entry.seq_id) for entry in outputs_in(path)]
    added = [(entry.engine, entry.seq_id) for entry in entries_in(path) if isinstance(entry, Arrival)]
    assert sorted(ended) == sorted(added)
    assert len(requests_in(path)) == 24


def test_blocks_of_sessions_are_recorded_by_number(tmp_path: Path) -> None:
    """Pinned while the session lives, given up when it is swept; the same numbers as those of the sequence."""
    prompt = GenerationRequest(tuple(WORDS * 2), PLAIN, session_id="a name that nobody shall find")
    with running(trace=TraceOptions(str(tmp_path))) as bench:
        bench.ready("a", "stub://alpha")
        bench.tell(Submit(1, "a", prompt))
        bench.answer(1)
        assert bench.ask(Sweep("a"), SweepReport).num_sessions == 1
    [path] = files_of(tmp_path)
    entries = entries_in(path)
    [added] = [entry for entry in entries if isinstance(entry, Added)]
    pinned = [content for entry in entries if isinstance(entry, Pinned) for content in entry.contents]
    swept = [content for entry in entries if isinstance(entry, Unpinned) for content in entry.contents]
    assert pinned == list(added.contents[: len(pinned)]) != []
    assert set(swept) <= set(pinned)
    assert b"nobody shall find" not in b"".join(frame.data for frame in read_frames(path))
    assert verify(open_trace(tmp_path)).is_identical


def test_a_request_that_was_recorded_whole_is_read_again_without_its_owner(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=5, constraint=Constraint.regex("a+"), logit_bias={7: 1.5})
    named = GenerationRequest(
        tuple(WORDS), params, tenant="who", cache_salt="salt", external_id="r-1", segment="eu", deadline_s=60.0
    )
    path = recorded(tmp_path, [named], has_content=True)
    [entry] = [entry for entry in entries_in(path) if isinstance(entry, RequestEntry)]
    [came] = [entry for entry in entries_in(path) if isinstance(entry, Arrival)]
    read = decode_request(entry.request)
    assert (read.prompt, read.params.seed) == (tuple(WORDS), came.seed)
    assert (read.params.constraint, read.params.logit_bias) == (params.constraint, params.logit_bias)
    assert read.cache_salt not in ("", "salt")
    assert (read.tenant, read.external_id, read.segment, read.deadline_s) == ("", "", "", None)
    assert came.deadline_ms == 60_000
