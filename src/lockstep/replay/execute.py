"""Execution of a recording with content: runs the model on the recorded steps again, and compares every token."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import NoReturn

import numpy as np
from msgspec.structs import replace

from lockstep.artifacts.model import Adapter
from lockstep.artifacts.source import open_artifact
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.groups import ContentKey, content_key, contents_of_chain
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from lockstep.engine.drafter import Drafts
from lockstep.engine.engine import Engine
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel, default_cache_dir, load_model, open_adapters, with_room_for
from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError, TraceError
from lockstep.executors.base import Blocks
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.stub import SCHEME as STUB_SCHEME
from lockstep.executors.stub import StubOptions
from lockstep.replay.execution import Execution, RequestTokens
from lockstep.replay.playback import Playback
from lockstep.replay.recorded_adapters import recorded_adapters
from lockstep.replay.recorded_drafts import RecordedDrafts
from lockstep.replay.rerun import AppliedCommand, DecidedStep, apply_to_cache
from lockstep.replay.trace import Trace
from lockstep.replay.verify_report import DivergedError
from lockstep.worker.flight.content import decode_request, tokens_of, vector_of
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    EngineEntry,
    Filled,
    Named,
    Pinned,
    Proposed,
    RequestDigest,
    RequestEntry,
    Vector,
)

Rows = Sequence[tuple[int, ...]]
_SIZES = ("block_size", "num_blocks", "num_host_blocks", "max_model_len")
"""Fields of a scheduler's configuration on which its executor depends."""
MAX_RETAINED_BYTES = 1 << 30
"""Maximum bytes of retained KV of sessions."""


class _Listener:
    """`RecorderHook` of the executing engine: collects its added requests and the tokens of its last step."""

    def __init__(self) -> None:
        self.added_requests: deque[tuple[int, Request]] = deque()
        self.answers: dict[int, Sequence[bytes]] = {}
        """Block hashes of answers by sequence, until they are read."""
        self.vectors: dict[int, bytes] = {}
        """Vectors by sequence, until they are read."""
        self._rows: Rows | None = None

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None: ...

    def added(self, seq_id: int, request: Request, step: int) -> None:
        self.added_requests.append((seq_id, request))

    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None: ...

    def answer_named(self, seq_id: int, hashes: Sequence[bytes], step: int, in_step: bool) -> None:
        self.answers[seq_id] = hashes

    def pinned(self, hashes: Sequence[bytes], borders: Sequence[int], step: int) -> None: ...

    def unpinned(self, hashes: Sequence[bytes], borders: Sequence[int], step: int) -> None: ...

    def filled(self, hashes: Sequence[bytes], start: int, group: int, step: int) -> None: ...

    def cache_reset(self, step: int) -> None: ...

    def proposed(self, drafts: Mapping[int, int], step: int) -> None: ...

    def drafted(self, drafts: Drafts) -> None: ...

    def joined(self, generation: Generation, waited_s: float) -> None: ...

    def committed(self, record: bytes | None, result: StepResult, touched: Sequence[Generation]) -> None:
        self._rows = tokens_of(result, touched)

    def ended(self, generation: Generation) -> None:
        if (vector := vector_of(generation)) is not None:
            self.vectors[generation.seq_id] = vector

    def failed(self, record: bytes | None) -> None:
        self._rows = None

    def take_rows(self) -> Rows | None:
        """Tokens of each row that sampled in the last step; None: it failed, or no step ran."""
        rows, self._rows = self._rows, None
        return rows


class _Engine:
    """The executing engine, driven by one engine's recording."""

    def __init__(self, model: LoadedModel, execution: Execution, adapters: Mapping[int, Adapter]) -> None:
        self._hook = _Listener()
        self._plans: deque[StepPlan] = deque()
        self._drafter = RecordedDrafts(execution.engine) if execution.engine.speculation else None
        self._engine = Engine(
            model,
            execution.engine.config,
            recorder=self._hook,
            drafter=self._drafter,
            observer=lambda plan, result, events: self._plans.append(plan),
        )
        self._execution = execution
        self._adapters = adapters
        """Recorded adapters of requests, by the id of their first sequence."""
        self._requests: dict[int, GenerationRequest] = {}
        """Requests by the id of their first sequence, until that is added."""
        self._request_of: dict[int, int] = {}
        """Request id of each sequence."""
        self._named: dict[int, tuple[int, ...]] = {}
        """Contents of the blocks of answers by sequence, until their hashes are known."""
        self._hashes: dict[int, bytes] = {}
        """Block hashes by recorded content id."""
        self._num_retained_bytes = 0
        self._retained: dict[ContentKey, Blocks] = {}
        """Contents of blocks that a session may need again, by hash."""
        self._vectors: dict[int, bytes] = {}
        """Recorded vectors by sequence, until its last step is computed."""
        self._step = 0

    def take(self, event: RequestEntry | Vector | AppliedCommand | DecidedStep) -> None:
        match event:
            case Vector():
                self._vectors[event.seq_id] = event.numbers
            case RequestEntry(_, seq_id, data):
                self._requests[seq_id] = decode_request(data)
            case AppliedCommand(_, Added() as added):
                self._add(added)
            case AppliedCommand(_, Aborted() as aborted):
                if self._execution.request is not None:
                    self._execution.request.open.discard(aborted.seq_id)
                request_id = self._request_of.get(aborted.seq_id)
                if request_id is not None:
                    self._engine.abort(request_id)
            case AppliedCommand(_, Named() as named):  # this engine names the same blocks when it reaches that step
                self._named[named.seq_id] = named.contents
            case AppliedCommand(_, Proposed() as proposed):
                if self._drafter is None:
                    self._differ("the recording has drafts, but no configuration of them")
                self._drafter.take(proposed)
            case AppliedCommand(_, Filled() as filled):
                self._engine.drain()
                self._learn_answers()
                self._fill(filled)
            case AppliedCommand(_, command):
                self._engine.drain()
                self._learn_answers()
                apply_to_cache(self._engine.scheduler, command, self._hashes.__getitem__)
                if isinstance(command, Pinned):
                    self._retain([self._hashes[content] for content in command.contents], command.borders)
            case DecidedStep():
                self._compute(event)

    def _add(self, added: Added) -> None:
        request_id = added.seq_id if added.request.sibling_of is None else added.request.sibling_of
        self._request_of[added.seq_id] = request_id
        selected = self._execution.request
        if selected is not None and added.request.sibling_of in selected.sequences:
            selected.sequences.add(added.seq_id)
            selected.open.add(added.seq_id)
        if added.request.sibling_of is None:
            request = self._requests.pop(added.seq_id, None)
            if request is None:
                self._differ(f"the recording has no content for the request of sequence {added.seq_id}")
            request = replace(request, priority=added.request.priority, tenant=str(added.tenant))
            if (adapter := self._adapters.get(added.seq_id)) is not None:
                self._engine.load_adapter(adapter)
                request = replace(request, adapter=adapter.name)
            try:
                self._engine.submit(request, lambda output: None, request_id=request_id)
            except LockstepError as error:
                self._differ(f"the request of sequence {added.seq_id} is refused: {error}")
            self._execution.num_requests += 1
        self._engine.drain()
        if not self._hook.added_requests:
            self._differ(f"the request of sequence {added.seq_id} is not accepted here")
        seq_id, core_request = self._hook.added_requests.popleft()
        if seq_id != added.seq_id or core_request.num_prompt_tokens != added.request.num_prompt_tokens:
            self._differ(
                f"recorded was sequence {added.seq_id} with {added.request.num_prompt_tokens} prompt tokens; "
                f"here it is {seq_id} with {core_request.num_prompt_tokens}"
            )
        self._hashes.update(zip(added.contents, core_request.block_hashes, strict=False))

    def _learn_answers(self) -> None:
        """Assign the hashes computed here to the recorded blocks of answers that were named since the last call."""
        for seq_id, contents in self._named.items():
            hashes = self._hook.answers.pop(seq_id, ())
            if len(hashes) != len(contents):
                self._differ(f"sequence {seq_id}'s answer has {len(contents)} recorded blocks; here {len(hashes)}")
            self._hashes.update(zip(contents, hashes, strict=True))
        self._named.clear()

    def _retain(self, hashes: Sequence[bytes], borders: Sequence[int]) -> None:
        """Copy the contents that a session may need again, as the server did."""
        executor, scheduler = self._engine.model.executor, self._engine.scheduler
        config = scheduler.config
        for block_hash, group in contents_of_chain(config.groups, hashes, borders, config.block_size):
            [blocks] = scheduler.cached_blocks([block_hash], group)
            key = content_key(block_hash, group)
            if blocks and key not in self._retained and self._num_retained_bytes < MAX_RETAINED_BYTES:
                self._retained[key] = executor.read_blocks(blocks)
                self._num_retained_bytes += self._retained[key].nbytes

    def _fill(self, filled: Filled) -> None:
        hashes = [self._hashes[content] for content in filled.contents if content in self._hashes]
        keys = [content_key(each, filled.group) for each in hashes]
        if len(keys) < len(filled.contents) or any(each not in self._retained for each in keys[filled.start :]):
            raise TraceError(
                f"before step {filled.step:,} the recording loads KV of an earlier run, or more than the "
                f"{MAX_RETAINED_BYTES >> 30} GiB that are retained here; use --verify instead"
            )
        for place, blocks in self._engine.scheduler.fill(hashes, filled.start, filled.group):
            self._engine.model.executor.write_blocks(blocks, self._retained[keys[place]])

    def _compute(self, step: DecidedStep) -> None:
        self._step = step.plan.step
        self._plans.clear()
        self._engine.step()
        self._learn_answers()
        rows = self._hook.take_rows()
        self._execution.num_steps += 1
        if step.events is None:
            if rows is not None:
                self._differ("the recorded step failed; here it does not")
            return
        if rows is None:
            self._differ("the step fails here; the recorded step did not")
        if self._plans[0] != step.plan:
            self._differ("the engine's plan differs from the recorded one", step.plan, self._plans[0])
        sampling = compress(step.plan.seq_ids, step.plan.samples)
        for seq_id, tokens in zip(sampling, rows, strict=True):
            if (recorded := step.tokens.get(seq_id, ())) != tuple(tokens):
                self._differ(f"sequence {seq_id} has the recorded tokens {list(recorded)}; here {list(tokens)}")
        for finish in step.events.finished:
            self._compare_vectors(finish.seq_id)
        self._execution.num_tokens += sum(map(len, step.tokens.values()))
        if (request := self._execution.request) is not None:
            request.num_tokens += sum(len(step.tokens.get(seq_id, ())) for seq_id in request.sequences)
            request.open -= {finish.seq_id for finish in step.events.finished}

    def _compare_vectors(self, seq_id: int) -> None:
        """Compare the recorded vector of a sequence that has ended with the one computed here, bit for bit."""
        recorded, computed = self._vectors.pop(seq_id, None), self._hook.vectors.pop(seq_id, None)
        if recorded != computed:
            self._differ(f"sequence {seq_id} has another vector here: {_vector_difference(recorded, computed)}")
        if recorded is not None:
            self._execution.num_vectors += 1
            if (request := self._execution.request) is not None:
                request.num_vectors += seq_id in request.sequences

    def _differ(self, what: str, recorded: StepPlan | None = None, computed: StepPlan | None = None) -> NoReturn:
        raise DivergedError(self._execution.engine.number, self._step, what, recorded, computed)


def _vector_difference(recorded: bytes | None, computed: bytes | None) -> str:
    """First difference of two vectors, as text."""
    numbers = [None if each is None else np.frombuffer(each, "<f4") for each in (recorded, computed)]
    first, second = numbers
    if first is None or second is None or len(first) != len(second):
        sizes = ["none" if each is None else f"{len(each)} numbers" for each in numbers]
        return f"{sizes[0]} in the recording, and {sizes[1]} here"
    at = int(np.flatnonzero(first.view(np.uint32) != second.view(np.uint32))[0])
    return f"number {at} of {len(first)} is {first[at]!r} in the recording, and {second[at]!r} here"


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """Machine options of an execution, which change no bit of the result. None: the default."""

    threads: int | None = None
    isa: str | None = None
    """Instruction set of the kernels."""


AS_RECORDED = MachineOptions()


def execute(
    trace: Trace,
    source: str,
    cache_dir: Path | None = None,
    request: str | None = None,
    machine: MachineOptions = AS_RECORDED,
    adapters: Sequence[AdapterSource] = (),
) -> Iterator[Execution]:
    """Execute the engines of a recording that use a model's artifact, one after the other.

    Args:
        source: model source, as for `load_model`.
        cache_dir: folder of built files; None: that of serving.
        request: caller's name of one request. Only engines with that request are executed, up to its end, together with
            all concurrent requests. None: all engines and requests.
        machine: options of this machine that change no bit.
        adapters: adapters of the recorded requests, which are found by their fingerprints.

    Raises:
        TraceError: the recording has no content, lacks its beginning, has no engine of this model or no such request,
            has an adapter that is not given, or is damaged.
        LockstepError: the model cannot be loaded as recorded.
    """
    _check_complete(trace)
    fingerprint = _fingerprint_of(source, cache_dir)
    engines = [engine for engine in trace.engines if engine.fingerprint == fingerprint]
    if not engines:
        recorded = ", ".join(f"{engine.name} ({engine.fingerprint})" for engine in trace.engines)
        raise TraceError(f"{source} has the fingerprint {fingerprint}, but the recording has the models {recorded}")
    sequences = {} if request is None else _sequences_of(trace, request)
    if request is not None:
        engines = [engine for engine in engines if engine.number in sequences]
        if not engines:
            raise TraceError(f"{trace.files[0].parent}: the recording has no request {request!r} of this model")
    given = open_adapters(source, adapters, cache_dir)
    adapters_of = {engine.number: recorded_adapters(trace, engine, given) for engine in engines}
    for engine in engines:
        of_requests = adapters_of[engine.number]
        options = with_room_for(_load_options(engine, cache_dir, machine), tuple(of_requests.values()))
        model, config = load_model(source, options)
        try:
            differing = [name for name in _SIZES if getattr(config, name) != getattr(engine.config, name)]
            if differing:
                raise TraceError(f"{source} cannot be loaded here as it was recorded: {', '.join(differing)} differ")
            selected = sequences.get(engine.number)
            tokens = None if request is None or selected is None else RequestTokens(request, set(selected), selected)
            yield _execute(trace, engine, model, of_requests, tokens)
        finally:
            model.close()


def _sequences_of(trace: Trace, request: str) -> dict[int, set[int]]:
    """First sequences of a request by engine, by the caller's name of the request."""
    found: dict[int, set[int]] = {}
    for entry in trace.entries():
        if isinstance(entry, RequestDigest) and entry.external_id == request:
            found.setdefault(entry.engine, set()).add(entry.seq_id)
    return found


def _execute(
    trace: Trace,
    engine: EngineEntry,
    model: LoadedModel,
    adapters: Mapping[int, Adapter],
    request: RequestTokens | None = None,
) -> Execution:
    here = model.executor.environment
    names = sorted(engine.environment.keys() | here.keys())
    execution = Execution(
        engine,
        [
            f"{name} is {here.get(name)!r} here and {engine.environment.get(name)!r} in the recording"
            for name in names
            if here.get(name) != engine.environment.get(name)
        ],
        request=request,
    )
    computing = _Engine(model, execution, adapters)
    try:
        for event in Playback(trace.entries()).play():
            if (
                isinstance(event, RequestEntry | Vector | AppliedCommand | DecidedStep)
                and event.engine == engine.number
            ):
                computing.take(event)
            if request is not None and not request.open:
                break
    except DivergedError as diverged:
        execution.diverged = diverged
    return execution


def _check_complete(trace: Trace) -> None:
    if not trace.header.has_content:
        raise TraceError(
            f"{trace.files[0]}: no content to execute; record with --trace-content (--verify needs no content)"
        )
    if not trace.has_beginning:
        raise TraceError(f"{trace.files[0]}: the first files of the run were deleted; --execute needs them")
    if trace.num_runs > 1:
        raise TraceError(f"{trace.files[0].parent}: the folder has {trace.num_runs} runs; name the files of one run")
    trace.check_unbroken("--execute")


def _fingerprint_of(source: str, cache_dir: Path | None) -> str:
    if source.startswith(STUB_SCHEME):
        return f"stub-{StubOptions.parse(source).name}"
    return open_artifact(source, cache_dir=cache_dir or default_cache_dir()).fingerprint


def _load_options(engine: EngineEntry, cache_dir: Path | None, machine: MachineOptions) -> LoadOptions:
    """Recorded sizes of the model, with this machine's compute options. The engine gets its recorded limits, and the
    model a task that accepts every request, since only those that the server accepted are recorded."""
    config, environment = engine.config, engine.environment
    options = EngineOptions(
        max_model_len=(config.max_model_len - 1) // engine.num_stages + 1,
        num_blocks=config.num_blocks,
        host_kv_memory_bytes=config.num_host_blocks * engine.bytes_per_block,
    )
    quantize = environment.get("quantize", "none")
    executor = ExecutorOptions(
        isa=machine.isa,
        threads=machine.threads,
        kv_cache_precision=environment.get("kv_cache_precision", "f16"),
        quantize=None if quantize == "none" else quantize,
    )
    is_encoder = engine.num_stages > 1
    return LoadOptions(options, executor, cache_dir, task="embed" if is_encoder else "generate")
