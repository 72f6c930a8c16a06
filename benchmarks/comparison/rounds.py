"""Rounds of a comparison on one machine: each backend in turn runs the same workload.

Engines are compared with our engine, servers with our server. The first backend changes from round to round. If a
comparison is ended early, its result has the rounds so far.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from benchmarks.comparison.backends import Backend, Engine, OutError, Server, llama_cpp_server, own_server, start_server
from benchmarks.comparison.routed import RoutedRequests
from benchmarks.comparison.workloads import NUM_LONG, SHORT_OUTPUT, Workload, figures
from lockstep.bench.prompts import Units
from lockstep.bench.protocol import Target
from lockstep.errors import UsageError
from lockstep.executors.machine import available_cores

OURS = {"engine": "lockstep", "server": "lockstep serve"}
"""Names of our backends by the kind of their peers."""
ROUTER = "lockstep serve, routed"
"""Our backend for routed requests: a cluster with the same file behind every name."""
OWN_NAMES = (*OURS.values(), ROUTER)
ENGINES, SERVERS = ("llama.cpp", "openvino-genai", "mistral.rs"), ("llama_cpp.server",)
PEERS = (*ENGINES, *SERVERS)
SUITE_OUTPUT = 32
ARRIVAL_LOAD = 5.0
"""Mean gap between long prompts, as a multiple of our server's time for one alone."""
LATE_SHARE = 1 / 3
"""Share of the time limit; workloads whose rounds take more run after the rounds of all others."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Workloads and backends of a comparison."""

    model: str
    contexts: tuple[tuple[int, int], ...] = ((200, 64), (1000, 64), (4000, 64))
    """Tokens of prompts and of their answers."""
    streams: tuple[int, ...] = (1, 8, 32)
    max_prompt_tokens: int = 8192
    rounds: int = 3
    limit_s: float = 1200.0
    """Time limit of the whole comparison in seconds, including loading and warm-up."""
    peers: tuple[str, ...] = PEERS
    peer_python: str = sys.executable
    peer_urls: tuple[str, ...] = ()
    threads: int = 0
    """Number of threads; 0: all available cores."""
    only: Literal["all", "engines", "servers"] = "all"
    suite: bool = True
    grid: bool = True
    arrivals: int = 0
    """Tokens of long prompts among which short ones arrive; 0: no such workload."""
    routed: str | None = None
    """Manifest for requests of two hops; None: no such workload."""

    def __post_init__(self) -> None:
        for name in ("rounds", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if min((*(n for pair in self.contexts for n in pair), *self.streams), default=0) < 1:
            raise UsageError("--contexts, --streams and --output-len take numbers from 1, such as 200,1000:64")
        if self.arrivals < 0 or not self.limit_s > 0:
            raise UsageError("--arrivals must not be negative, and --limit-s must be above 0")
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown:
            raise UsageError(f"--peers has {unknown[0]!r}; the peers are {', '.join(PEERS)}")
        for url in self.peer_urls:
            Target.parse(url, None, "--peer-url")
        if not (self.routed_requests or self.workloads):
            raise UsageError(
                "no workload is left; raise --max-prompt-tokens, omit --no-grid or --no-suite, or add servers"
            )

    @cached_property
    def routed_requests(self) -> RoutedRequests | None:
        """Questions of the manifest; UsageError if it cannot be read."""
        has_part = self.routed is not None and self.only != "engines"
        return RoutedRequests(Path(str(self.routed))) if has_part else None

    @cached_property
    def workloads(self) -> list[Workload]:
        """All workloads, in the given order of contexts and streams."""
        chats = [Workload(64, 1, SUITE_OUTPUT, "prompts")] if self.suite else []
        chats += [Workload(self.arrivals, 1, SHORT_OUTPUT, "arrivals")] if self.arrivals else []
        chats += [Workload(64, 1, SUITE_OUTPUT, "routed")] if self.routed is not None else []
        done = [work for work in self._grid if work not in self.left_out]
        return [*done, *(chats if self.only != "engines" else [])]

    @cached_property
    def left_out(self) -> list[Workload]:
        """Workloads with more prompt tokens than the limit."""
        return [work for work in self._grid if work.num_prompt_tokens > self.max_prompt_tokens]

    @cached_property
    def _grid(self) -> list[Workload]:
        grid = [Workload(context, streams, output) for context, output in self.contexts for streams in self.streams]
        return grid if self.grid else []


@dataclass(slots=True)
class Comparison:
    """Results of a comparison."""

    options: ComparisonOptions
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kind, version and ways of each backend that took part."""
    out: dict[str, str] = field(default_factory=dict)
    """Reasons of backends that did not take part or failed."""
    seen: dict[tuple[str, str], dict[int, dict[str, float]]] = field(default_factory=dict)
    """Figures by workload and backend, then by round; unfinished rounds are omitted."""
    ended_by: str = ""
    """Reason of an early end; empty: complete."""
    was_interrupted: bool = False
    """True if Ctrl-C or SIGTERM ended it."""
    duration_s: float = 0.0


def run_comparison(options: ComparisonOptions, say: Callable[[str], None]) -> Comparison:
    """Compare all backends that work. A failing peer is reported, and the comparison continues without it.

    Args:
        say: called with a message for each event.

    Raises:
        UsageError: our engine or server fails before the first measurement; a later failure ends the comparison.
    """
    comparison, begin_s = Comparison(options), time.monotonic()
    for work in options.left_out:
        say(f"omitted: {work.name}, which has more prompt tokens than --max-prompt-tokens {options.max_prompt_tokens}")
    with ExitStack() as stack:
        course = _Course(comparison, stack, say)
        try:
            with _interrupts(comparison):
                course.start()
                course.warm()
                course.run()
        except _OwnError as error:
            if not comparison.seen:
                raise UsageError(str(error)) from None
            comparison.ended_by = str(error)
        if comparison.ended_by:
            say(f"ended by {comparison.ended_by}")
    comparison.duration_s = time.monotonic() - begin_s
    return comparison


class _OwnError(UsageError):
    """One of our backends failed, so no comparison is possible."""


@contextmanager
def _interrupts(comparison: Comparison) -> Iterator[None]:
    """End the body like Ctrl-C on SIGTERM and at the time limit."""
    main, limit_s = threading.main_thread().ident, comparison.options.limit_s
    assert main is not None

    def on_limit() -> None:
        comparison.ended_by = f"--limit-s {limit_s:g}"
        signal.pthread_kill(main, signal.SIGTERM)

    def on_term(number: int, frame: FrameType | None) -> None:
        if not comparison.ended_by:
            comparison.ended_by, comparison.was_interrupted = "SIGTERM", True
        signal.raise_signal(signal.SIGINT)

    # asyncio turns Ctrl-C into a cancellation only if the handler is Python's own.
    handlers = {signal.SIGTERM: on_term, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    timer = threading.Timer(limit_s, on_limit)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not comparison.ended_by:
            comparison.ended_by, comparison.was_interrupted = "Ctrl-C", True
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Course:
    """A running comparison: its backends, the remaining rounds, and their estimated time."""

    def __init__(self, comparison: Comparison, stack: ExitStack, say: Callable[[str], None]) -> None:
        self._comparison, self._options, self._stack, self._say = comparison, comparison.options, stack, say
        self._end_s = time.monotonic() + comparison.options.limit_s
        self._workloads = list(comparison.options.workloads)
        self._taking: list[Backend] = []
        self._units = Units()
        self._spent_s: dict[str, float] = {}
        """Seconds of the last round of each workload, over all backends."""

    @property
    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _report(self, sentence: str) -> None:
        self._say(f"{sentence} ({max(0.0, self._left_s):.0f} s left)")

    def start(self) -> None:
        """Start all backends, and choose prompt tokens that are ordinary in every vocabulary of this model."""
        vocabulary = 0
        for name, start in self._starts().items():
            self._report(f"loading {name}")
            try:
                backend = start()
            except OutError as error:
                if name in OWN_NAMES:
                    raise _OwnError(f"{name} cannot run {self._options.model}: {error}") from None
                self._comparison.out[name] = str(error)
                self._say(f"without {name}: {error}")
                continue
            self._stack.callback(backend.close)
            self._taking.append(backend)
            self._comparison.backends[name] = {"kind": backend.kind, "version": backend.version, "ways": {}}
            if isinstance(backend, Engine) and backend.vocabulary is not None:
                vocabulary = backend.vocabulary
        self._units = Units(ids=tuple(range(min(300, vocabulary // 2), vocabulary)))

    def _starts(self) -> dict[str, Callable[[], Backend]]:
        options = self._options
        threads = options.threads or available_cores()
        max_seqs = max(work.streams for work in self._workloads)
        max_seqs = max(max_seqs, 32) if options.arrivals else max_seqs
        python, model = options.peer_python, options.model
        grid = [work for work in self._workloads if work.kind == "grid"]
        starts: dict[str, Callable[[], Backend]] = {}
        if grid and options.only != "servers":
            names = [name for name in options.peers if name in ENGINES]
            starts[OURS["engine"]] = partial(Engine, "lockstep", sys.executable, model, threads, grid)
            starts |= {name: partial(Engine, name, python, model, threads, grid) for name in names}
        if options.only == "engines":
            return starts
        routed = options.routed_requests
        if any(work.kind != "routed" for work in self._workloads):
            starts[OURS["server"]] = partial(start_server, OURS["server"], own_server(model, threads, max_seqs))
        if routed is not None:
            command = own_server(model, threads, 1, options.routed)
            starts[ROUTER] = partial(start_server, ROUTER, command, routed, is_router=True)
        for name in options.peers:
            if name in SERVERS:
                command = llama_cpp_server(python, model, threads, self._workloads)
                starts[name] = partial(start_server, name, command, routed)
        for url in options.peer_urls:
            starts[url] = partial(Server, url, Target.parse(url, None, "--peer-url"), routed=routed)
        return starts

    def warm(self) -> None:
        """Warm up all backends for each number of streams, the highest first; other kinds of workloads run once."""
        grid = [work for work in self._workloads if work.kind == "grid"]
        longest = {work.streams: work for work in sorted(grid, key=lambda work: work.context)}
        widths = [longest[streams] for streams in sorted(longest, reverse=True)]
        for work in [*widths, *(work for work in self._workloads if work.kind != "grid")]:
            title = f"x{work.streams}" if work.kind == "grid" else work.name
            for each in self._able(work):
                self._report(f"warming {title}: {each.name}")
                self._guarded(each, partial(self._warm, each, work, title))
        self._workloads = [self._paced(work) if work.kind == "arrivals" else work for work in self._workloads]

    def _warm(self, backend: Backend, work: Workload, title: str) -> None:
        self._comparison.backends[backend.name]["ways"][title] = backend.warm(work, self._units)

    def _paced(self, work: Workload) -> Workload:
        """Arrivals at a rate that our server can handle on this machine."""
        own = next(each for each in self._taking if each.name == OURS["server"])
        alone = figures(Workload(work.context), own.run(Workload(work.context, 1, SHORT_OUTPUT), self._units, 0))
        gap_s = ARRIVAL_LOAD * alone["ttft_ms"] / 1e3
        for each in self._able(work):
            self._comparison.backends[each.name]["ways"][work.name] = f"a long prompt every {gap_s:.2f} s"
        return replace(work, gap_s=gap_s)

    def run(self) -> None:
        """Run all rounds that fit into the time; workloads that leave time for others come first."""
        late: list[Workload] = []
        for number in range(self._options.rounds):
            for work in self._workloads:
                if self._expected_s(work) * self._options.rounds > self._options.limit_s * LATE_SHARE:
                    late.append(work)
                if work not in late:
                    self._round(work, number)
        for number in range(self._options.rounds):
            for work in dict.fromkeys(late):
                self._round(work, number)

    def _expected_s(self, work: Workload) -> float:
        """Expected seconds of a round: those of the last round, or an estimate from its cost and earlier rounds."""
        if work.kind == "arrivals":
            return 1.2 * work.gap_s * NUM_LONG * len(list(self._able(work)))
        if work.name in self._spent_s or not self._spent_s:
            return self._spent_s.get(work.name, 0.0)
        return work.cost * sum(self._spent_s.values()) / sum(w.cost for w in self._workloads if w.name in self._spent_s)

    def _round(self, work: Workload, number: int) -> None:
        """Run a round of one workload, unless it is done or would exceed the time limit."""
        if any(work.name == name and number in rounds for (name, _), rounds in self._comparison.seen.items()):
            return
        if self._expected_s(work) > self._left_s:
            self._comparison.ended_by = f"--limit-s {self._options.limit_s:g}, too short for a round of {work.name}"
            return
        begin_s, turn = time.monotonic(), number % len(self._taking)
        for each in self._able(work, self._taking[turn:] + self._taking[:turn]):
            self._report(f"round {number + 1} of {self._options.rounds}, {work.name}: {each.name}")
            self._guarded(each, partial(self._one, each, work, number))
        self._spent_s[work.name] = time.monotonic() - begin_s

    def _one(self, backend: Backend, work: Workload, number: int) -> None:
        found = figures(work, backend.run(work, self._units, number + 1))
        self._comparison.seen.setdefault((work.name, backend.name), {})[number] = found

    def _able(self, work: Workload, taking: Sequence[Backend] | None = None) -> list[Backend]:
        """Backends that support a workload: all but plain prompts need a server, which has a template."""
        return [
            each
            for each in taking or self._taking
            if each.name not in self._comparison.out
            and not (work.kind != "grid" and each.kind == "engine")
            and (each.name != OURS["server"] if work.kind == "routed" else each.name != ROUTER)
        ]

    def _guarded(self, backend: Backend, act: Callable[[], None]) -> None:
        """Run ``act``; a failing peer is removed from the comparison, a failure of our backend ends it."""
        try:
            act()
        except OutError as error:
            if backend.name in OWN_NAMES:
                raise _OwnError(f"{backend.name} failed: {error}") from None
            self._comparison.out[backend.name] = str(error)
            self._say(f"without {backend.name} from here: {error}")
