"""A recording with content, computed again: the model gets the recorded requests at the recorded steps, in another
process and at another time, and every token is compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import compress
from pathlib import Path
from typing import Any, NoReturn

from msgspec.structs import replace

from lockstep.artifacts.source import open_artifact
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from lockstep.engine.engine import Engine
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel, default_cache_dir, load_model
from lockstep.engine.options import LIMIT_NAMES, EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError, TraceError
from lockstep.executors.base import Blocks
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.stub import SCHEME as STUB_SCHEME
from lockstep.executors.stub import StubOptions
from lockstep.replay.playback import Playback
from lockstep.replay.rerun import AppliedCommand, DecidedStep, apply_to_cache
from lockstep.replay.trace import Trace
from lockstep.replay.verify_report import DivergedError
from lockstep.worker.flight.content import decode_request, tokens_of
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    EngineEntry,
    Filled,
    Named,
    Pinned,
    RequestDigest,
    RequestEntry,
)

Rows = Sequence[tuple[int, ...]]
MAX_KEPT_BYTES = 1 << 30
"""KV of sessions that may come back."""


@dataclass(slots=True)
class Execution:
    """Result of computing one engine's recording again."""

    engine: EngineEntry
    notes: list[str] = field(default_factory=list)
    """In what this machine or process is not the recorded one."""
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    """That are equal."""
    diverged: DivergedError | None = None
    """The first thing that is not computed as it was recorded; None: everything is."""
    request: RequestTokens | None = None
    """The only request that is compared; None: all requests are."""


@dataclass(slots=True)
class RequestTokens:
    """One request of an engine: the sequences that it is, and those of its tokens that are equal."""

    name: str
    sequences: set[int]
    """Ids of its first sequences; with those of their siblings, once they have come."""
    open: set[int]
    """Those of them that have not ended."""
    num_tokens: int = 0


class _Listener:
    """`RecorderHook` of the engine that computes: the requests that it took, and the tokens of its last step."""

    def __init__(self) -> None:
        self.added_requests: deque[tuple[int, Request]] = deque()
        self.answers: dict[int, Sequence[bytes]] = {}
        """Block hashes of answers by sequence, until they are taken."""
        self._rows: Rows | None = None

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None: ...

    def added(self, seq_id: int, request: Request, step: int) -> None:
        self.added_requests.append((seq_id, request))

    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None: ...

    def answer_named(self, seq_id: int, hashes: Sequence[bytes], step: int, in_step: bool) -> None:
        self.answers[seq_id] = hashes

    def pinned(self, hashes: Sequence[bytes], step: int) -> None: ...

    def unpinned(self, hashes: Sequence[bytes], step: int) -> None: ...

    def filled(self, hashes: Sequence[bytes], start: int, step: int) -> None: ...

    def cache_reset(self, step: int) -> None: ...

    def joined(self, generation: Generation, waited_s: float) -> None: ...

    def committed(self, record: bytes | None, result: StepResult, touched: Sequence[Generation]) -> None:
        self._rows = tokens_of(result, touched)

    def ended(self, generation: Generation) -> None: ...

    def failed(self, record: bytes | None) -> None:
        self._rows = None

    def take_rows(self) -> Rows | None:
        """Tokens of each row that sampled in the last step; None: it failed, or there was none."""
        rows, self._rows = self._rows, None
        return rows


class _Engine:
    """The engine that computes, driven by one engine's recording."""

    def __init__(self, model: LoadedModel, execution: Execution) -> None:
        self._hook = _Listener()
        self._plans: deque[StepPlan] = deque()
        self._engine = Engine(
            model,
            execution.engine.config,
            recorder=self._hook,
            observer=lambda plan, result, events: self._plans.append(plan),
        )
        self._execution = execution
        self._requests: dict[int, GenerationRequest] = {}
        """By the id of their first sequence, until that is added."""
        self._request_of: dict[int, int] = {}
        """Sequence to request."""
        self._named: dict[int, tuple[int, ...]] = {}
        """Contents of the blocks of answers by sequence, until their hashes are known."""
        self._hashes: dict[int, bytes] = {}
        """By the ids of block contents."""
        self._kept: dict[bytes, Blocks] = {}
        """What sessions may come back for."""
        self._step = 0

    def take(self, event: RequestEntry | AppliedCommand | DecidedStep) -> None:
        match event:
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
            case AppliedCommand(_, Named() as named):  # the engine here names the same blocks, when it gets there
                self._named[named.seq_id] = named.contents
            case AppliedCommand(_, Filled() as filled):
                self._engine.drain()
                self._learn_answers()
                self._fill(filled)
            case AppliedCommand(_, command):
                self._engine.drain()
                self._learn_answers()
                apply_to_cache(self._engine.scheduler, command, self._hashes.__getitem__)
                if isinstance(command, Pinned):
                    self._keep([self._hashes[content] for content in command.contents])
            case DecidedStep():
                self._compute(event)

    def _add(self, added: Added) -> None:
        request_id = added.seq_id if added.request.sibling_of is None else added.request.sibling_of
        self._request_of[added.seq_id] = request_id
        asked = self._execution.request
        if asked is not None and added.request.sibling_of in asked.sequences:
            asked.sequences.add(added.seq_id)
            asked.open.add(added.seq_id)
        if added.request.sibling_of is None:
            request = self._requests.pop(added.seq_id, None)
            if request is None:
                self._differ(f"the recording holds no content of the request of sequence {added.seq_id}")
            request = replace(request, priority=added.request.priority, tenant=str(added.tenant))
            try:
                self._engine.submit(request, lambda output: None, request_id=request_id)
            except LockstepError as error:
                self._differ(f"the request of sequence {added.seq_id} is refused: {error}")
            self._execution.num_requests += 1
        self._engine.drain()
        if not self._hook.added_requests:
            self._differ(f"the request of sequence {added.seq_id} was taken then, and is not now")
        seq_id, core_request = self._hook.added_requests.popleft()
        if seq_id != added.seq_id or core_request.num_prompt_tokens != added.request.num_prompt_tokens:
            self._differ(
                f"sequence {added.seq_id} of {added.request.num_prompt_tokens} prompt tokens came; "
                f"here it is {seq_id} of {core_request.num_prompt_tokens}"
            )
        self._hashes.update(zip(added.contents, core_request.block_hashes, strict=False))

    def _learn_answers(self) -> None:
        """Take over which hashes the blocks of answers have here that were named since the last call."""
        for seq_id, contents in self._named.items():
            hashes = self._hook.answers.pop(seq_id, ())
            if len(hashes) != len(contents):
                self._differ(f"{len(contents)} blocks of sequence {seq_id}'s answer were named; here {len(hashes)}")
            self._hashes.update(zip(contents, hashes, strict=True))
        self._named.clear()

    def _keep(self, hashes: Sequence[bytes]) -> None:
        """Copy what a session may come back for, as the server did."""
        executor = self._engine.model.executor
        for block_hash, block in zip(hashes, self._engine.scheduler.cached_blocks(hashes), strict=True):
            if block is not None and len(self._kept) * executor.geometry.bytes_per_block < MAX_KEPT_BYTES:
                self._kept.setdefault(block_hash, executor.read_blocks([block]))

    def _fill(self, filled: Filled) -> None:
        hashes = [self._hashes[content] for content in filled.contents if content in self._hashes]
        if len(hashes) < len(filled.contents) or any(each not in self._kept for each in hashes[filled.start :]):
            raise TraceError(
                f"before step {filled.step:,} KV came back that an earlier run had computed, or more than is kept here "
                f"({MAX_KEPT_BYTES >> 30} GiB): such a run can be verified (--verify), but not computed again"
            )
        for place, block in self._engine.scheduler.fill(hashes, filled.start):
            self._engine.model.executor.write_blocks([block], self._kept[hashes[place]])

    def _compute(self, step: DecidedStep) -> None:
        self._step = step.plan.step
        self._plans.clear()
        self._engine.step()
        self._learn_answers()
        rows = self._hook.take_rows()
        self._execution.num_steps += 1
        if step.events is None:
            if rows is not None:
                self._differ("the step failed then, and does not now")
            return
        if rows is None:
            self._differ("the step fails here, and did not then")
        if self._plans[0] != step.plan:
            self._differ("the engine computes another plan than was recorded", step.plan, self._plans[0])
        sampling = compress(step.plan.seq_ids, step.plan.samples)
        for seq_id, tokens in zip(sampling, rows, strict=True):
            if (recorded := step.tokens.get(seq_id, ())) != tuple(tokens):
                self._differ(f"sequence {seq_id} got the tokens {list(recorded)}, and gets {list(tokens)} here")
        self._execution.num_tokens += sum(map(len, step.tokens.values()))
        if (request := self._execution.request) is not None:
            request.num_tokens += sum(len(step.tokens.get(seq_id, ())) for seq_id in request.sequences)
            request.open -= {finish.seq_id for finish in step.events.finished}

    def _differ(self, what: str, recorded: StepPlan | None = None, computed: StepPlan | None = None) -> NoReturn:
        raise DivergedError(self._execution.engine.number, self._step, what, recorded, computed)


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """Use that an execution makes of the machine; it changes no bit. None: by default."""

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
) -> Iterator[Execution]:
    """Compute the engines of a recording that have a model's artifact, one after the other.

    Args:
        source: of the model, as for `load_model`.
        cache_dir: where built graphs are kept; None: as for serving.
        request: the caller's name for one request: only the engines that had it are computed, each of them to the
            request's end with all requests beside it; None: everything is.
        machine: how it is computed here, where that is not to change a bit.

    Raises:
        TraceError: the recording has no content, not its beginning, no engine of this model, or no such request; or
            cannot be read on.
        LockstepError: the model cannot be loaded as it was.
    """
    _check_complete(trace)
    fingerprint = _fingerprint_of(source, cache_dir)
    engines = [engine for engine in trace.engines if engine.fingerprint == fingerprint]
    if not engines:
        recorded = ", ".join(f"{engine.name} ({engine.fingerprint})" for engine in trace.engines)
        raise TraceError(f"{source} has the fingerprint {fingerprint}, but the recording is of {recorded}")
    sequences = {} if request is None else _sequences_of(trace, request)
    if request is not None:
        engines = [engine for engine in engines if engine.number in sequences]
        if not engines:
            raise TraceError(f"{trace.files[0].parent}: no request {request!r} of this model is recorded there")
    for engine in engines:
        model, config = load_model(source, _load_options(engine, cache_dir, machine))
        try:
            differing = [f.name for f in fields(config) if getattr(config, f.name) != getattr(engine.config, f.name)]
            if differing:
                raise TraceError(f"{source} cannot be loaded here as it was recorded: {', '.join(differing)} differ")
            asked = sequences.get(engine.number)
            asking = None if request is None or asked is None else RequestTokens(request, set(asked), asked)
            yield _execute(trace, engine, model, asking)
        finally:
            model.close()


def describe(execution: Execution) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    engine, diverged, request = execution.engine, execution.diverged, execution.request
    what = f"{execution.num_tokens:,} tokens of {execution.num_requests:,} requests"
    if request is not None:
        what = f"{request.num_tokens:,} tokens of request {request.name}"
    counted = f"execute: {what} in {execution.num_steps:,} steps of engine {engine.number} ({engine.name})"
    rest = ", every token equal" if diverged is None else f" are equal, but step {diverged.step} is not"
    yield counted + rest
    yield from execution.notes
    if diverged is not None:
        yield from diverged.lines()


def facts(execution: Execution) -> dict[str, Any]:
    """The verdict as an object."""
    return {
        "engine": execution.engine.number,
        "name": execution.engine.name,
        "identical": execution.diverged is None,
        "tokens": execution.num_tokens,
        "requests": execution.num_requests,
        "steps": execution.num_steps,
        "notes": execution.notes,
        "parted": None if execution.diverged is None else execution.diverged.facts(),
        **({} if execution.request is None else {"request": _request_facts(execution.request)}),
    }


def _request_facts(request: RequestTokens) -> dict[str, Any]:
    return {
        "id": request.name,
        "sequences": sorted(request.sequences),
        "tokens": request.num_tokens,
        "ended": not request.open,
    }


def _sequences_of(trace: Trace, request: str) -> dict[int, set[int]]:
    """First sequences of a request by engine, by the caller's name for it."""
    found: dict[int, set[int]] = {}
    for entry in trace.entries():
        if isinstance(entry, RequestDigest) and entry.external_id == request:
            found.setdefault(entry.engine, set()).add(entry.seq_id)
    return found


def _execute(trace: Trace, engine: EngineEntry, model: LoadedModel, request: RequestTokens | None = None) -> Execution:
    here = model.executor.environment
    names = sorted(engine.environment.keys() | here.keys())
    execution = Execution(
        engine,
        [
            f"{name} is {here.get(name)!r} here and was {engine.environment.get(name)!r}"
            for name in names
            if here.get(name) != engine.environment.get(name)
        ],
        request=request,
    )
    computing = _Engine(model, execution)
    try:
        for event in Playback(trace.entries()).play():
            if isinstance(event, RequestEntry | AppliedCommand | DecidedStep) and event.engine == engine.number:
                computing.take(event)
            if request is not None and not request.open:
                break
    except DivergedError as diverged:
        execution.diverged = diverged
    return execution


def _check_complete(trace: Trace) -> None:
    if not trace.header.has_content:
        raise TraceError(
            f"{trace.files[0]}: it has no content to compute again; record with --trace-content (--verify needs none)"
        )
    if not trace.has_beginning:
        raise TraceError(f"{trace.files[0]}: it begins in the middle of a run; its first files were deleted")
    if trace.num_runs > 1:
        raise TraceError(f"{trace.files[0].parent}: {trace.num_runs} runs were recorded there; name the files of one")
    trace.check_unbroken("--execute")


def _fingerprint_of(source: str, cache_dir: Path | None) -> str:
    if source.startswith(STUB_SCHEME):
        return f"stub-{StubOptions.parse(source).name}"
    return open_artifact(source, cache_dir=cache_dir or default_cache_dir()).fingerprint


def _load_options(engine: EngineEntry, cache_dir: Path | None, machine: MachineOptions) -> LoadOptions:
    """The recorded options of the model, as far as the recording has them, with the compute options of this machine."""
    config, environment = engine.config, engine.environment
    options = EngineOptions(
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        order=config.order,
        num_blocks=config.num_blocks,
        host_kv_memory_bytes=config.num_host_blocks * engine.bytes_per_block,
        **{name: getattr(config, name) for name in LIMIT_NAMES},
    )
    quantize = environment.get("quantize", "none")
    executor = ExecutorOptions(
        isa=machine.isa,
        threads=machine.threads,
        kv_cache_precision=environment.get("kv_cache_precision", "f16"),
        quantize=None if quantize == "none" else quantize,
    )
    return LoadOptions(options, executor, cache_dir)
