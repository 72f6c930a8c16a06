"""Small recordings for tests: a device worker in this process, and files that are changed entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard

from lockstep.core.request import Priority
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.trace import STEPS, read_frames
from lockstep.worker.flight.chunks import ChunkReader, ChunkWriter, EntryDecoder, EntryT
from lockstep.worker.flight.entries import SUFFIX, Entry, EntryStruct, Header
from lockstep.worker.flight.folder import FolderManifest, Listed, State, digest_of, manifest_files
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Abort, Ask, ResetPrefixCache, Submit
from tests.worker.support import Bench, running

POOL = EngineOptions(
    num_blocks=10,
    host_kv_memory_bytes=64,
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_num_decode_seqs=3,
    order="priority",
)


def options(folder: Path | str, max_bytes: int = 1 << 28, **more: Any) -> TraceOptions:
    return TraceOptions(str(folder), max_bytes, **more)


def record(folder: Path, num_requests: int = 24, max_bytes: int = 1 << 28, **more: Any) -> Path:
    """Run two stubs with small pools: preemptions, swaps, evictions, hits, aborts, siblings, resets."""
    with running(trace=options(folder, max_bytes, **more)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        bench.ready("b", "stub://beta?fail_every=40", LoadOptions(POOL), Priority.HIGH)
        submit(bench, num_requests)
    return folder


def submit(bench: Bench, num_requests: int, first: int = 0) -> None:
    for number in range(first, first + num_requests):
        params = SamplingParams(max_tokens=12 + number % 40, ignore_eos=True, n=1 + (number % 6 == 5))
        prompt = tuple(b"a beginning that all of them have"[: 5 + number % 29]) + (number % 250,) * (3 + number % 17)
        request = GenerationRequest(prompt, params, priority=number % 3 - 1, tenant=f"secret {number % 2}")
        bench.tell(Submit(number, "ab"[number % 2], request))
        if number % 8 == 7:
            bench.tell(Ask(number, ResetPrefixCache()))
        if number % 7 == 6:
            bench.answer(max(first, number - 6))
            bench.tell(Abort("ab"[number % 2], (number,)))
    for number in range(first, first + num_requests):
        bench.answer(number)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def mark_as_killed(path: Path) -> None:
    """Rewrite the folder's manifest to the state after an early kill of the recorder, in which the file is open."""
    [manifest] = manifest_files(path.parent)
    FolderManifest(path.parent).put(Listed(path.name, State.OPEN), path=manifest)


def relist(path: Path) -> None:
    """List a file in a manifest of its folder as it is now, like a forger."""
    data = path.read_bytes()
    FolderManifest(path.parent).put(Listed(path.name, State.CLOSED, len(data), digest_of(data)))


def read_whole(path: Path, decoder: EntryDecoder[EntryT]) -> list[EntryT]:
    """Entries of a file of any kind."""
    reader = ChunkReader(decoder)
    return [entry for frame in read_frames(path) for entry in reader.read(frame.data)]


def write_whole(path: Path, entries: Sequence[EntryStruct]) -> None:
    """Write entries as a file, like a forger: the first in a separate chunk, and all with their chain."""
    writer = ChunkWriter()
    header, *rest = entries
    assert isinstance(header, Header)
    held = writer.begin_file(header)
    for entry in rest:
        writer.put(entry)
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(held + writer.take()))


def entries_in(path: Path) -> list[Entry]:
    """Entries of a file of steps."""
    return read_whole(path, STEPS)


def rewrite_entries(path: Path, change: Callable[[list[Entry]], None]) -> None:
    """Change a file's entries, and write them again."""
    entries = entries_in(path)
    change(entries)
    write_whole(path, entries)


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change the contents of a file, and compress it again with valid checksums."""
    held = bytearray().join(frame.data for frame in read_frames(path))
    change(held)
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(held)))
