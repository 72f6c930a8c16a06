"""A race against peers on one machine: the same model and work for each in turn, in rounds; ratios of a round count.

Engines are compared with our engine, servers with our server. Who begins changes from round to round. What was measured
by then is the result, whatever ends the race.
"""

from __future__ import annotations

import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from lockstep.bench.contenders import Contender, Engine, OutError, Server, llama_cpp_server, own_server, start_server
from lockstep.bench.prompts import Units
from lockstep.bench.protocol import Target
from lockstep.bench.routed import RoutedRequests, ollama_lines
from lockstep.bench.works import FIGURES, NUM_LONG, SHORT_OUTPUT, Work, figures
from lockstep.errors import UsageError
from lockstep.executors.machine import available_cores, machine_name
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines

OURS = {"engine": "lockstep", "server": "lockstep serve"}
"""Names of our contenders, by the kind of those that they are compared with."""
ROUTER = "lockstep serve, routed"
"""Ours for routed requests: a cluster with the same file behind every name."""
ENGINES, SERVERS = ("llama.cpp", "openvino-genai", "mistral.rs"), ("llama_cpp.server",)
PEERS = (*ENGINES, *SERVERS)
COMPARED = ("output_throughput", "decode_throughput", "ttft_ms", "ttft_p99_ms", "request_ms")
"""Figures whose ratios are shown."""
SERVED = {"engine": (("served ", OURS["server"]),)}
"""Beside engines our server counts too: what users see of ours, against what they could have at best of others."""
SUITE_OUTPUT = 32
ARRIVAL_LOAD = 5.0
"""Times that the long prompts' mean gap is longer than our server takes for one alone."""
LATE_SHARE = 1 / 3
"""Work whose rounds would take more of the limit comes after the rounds of all other work."""


@dataclass(frozen=True)
class RaceOptions:
    """The work, and who takes part."""

    model: str
    contexts: tuple[tuple[int, int], ...] = ((200, 64), (1000, 64), (4000, 64))
    """Tokens of prompts, and of the answers to them."""
    streams: tuple[int, ...] = (1, 8, 32)
    max_prompt_tokens: int = 8192
    rounds: int = 3
    limit_s: float = 1200.0
    """Of everything, loading and warming included."""
    peers: tuple[str, ...] = PEERS
    peer_python: str = sys.executable
    peer_urls: tuple[str, ...] = ()
    threads: int = 0
    """0: as many as there are cores for us."""
    only: Literal["all", "engines", "servers"] = "all"
    suite: bool = True
    grid: bool = True
    arrivals: int = 0
    """Tokens of long prompts among which short ones arrive; 0: no such work."""
    routed: str | None = None
    """A manifest for requests of two hops; None: no such work."""

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
            raise UsageError(f"--peers has {unknown[0]!r}; there are {', '.join(PEERS)}")
        for url in self.peer_urls:
            Target.parse(url, None, "--peer-url")
        if not (self.routed_requests or self.works):
            raise UsageError(
                "no work is left: raise --max-prompt-tokens, leave --no-grid or --no-suite out, or take servers"
            )

    @cached_property
    def routed_requests(self) -> RoutedRequests | None:
        """Questions of the manifest; UsageError where it cannot be read."""
        has_part = self.routed is not None and self.only != "engines"
        return RoutedRequests(Path(str(self.routed))) if has_part else None

    @cached_property
    def works(self) -> list[Work]:
        """All work, in the order of contexts and streams as they were given."""
        chats = [Work(64, 1, SUITE_OUTPUT, "prompts")] if self.suite else []
        chats += [Work(self.arrivals, 1, SHORT_OUTPUT, "arrivals")] if self.arrivals else []
        chats += [Work(64, 1, SUITE_OUTPUT, "routed")] if self.routed is not None else []
        done = [work for work in self._grid if work not in self.left_out]
        return [*done, *(chats if self.only != "engines" else [])]

    @cached_property
    def left_out(self) -> list[Work]:
        """Work that has too many prompt tokens for the time there is."""
        return [work for work in self._grid if work.num_prompt_tokens > self.max_prompt_tokens]

    @cached_property
    def _grid(self) -> list[Work]:
        grid = [Work(context, streams, output) for context, output in self.contexts for streams in self.streams]
        return grid if self.grid else []


@dataclass(slots=True)
class Race:
    """Everything that was seen of a race."""

    options: RaceOptions
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kind and version of each that took part, and how it did its work."""
    out: dict[str, str] = field(default_factory=dict)
    """Those that did not, or not to the end, and why."""
    seen: dict[tuple[str, str], dict[int, dict[str, float]]] = field(default_factory=dict)
    """Figures by work and contender, then by round; a round that was not finished has none."""
    ended_by: str = ""
    """Whatever ended it before all rounds were done."""
    was_interrupted: bool = False
    """By Ctrl-C or SIGTERM."""
    duration_s: float = 0.0


def run_race(options: RaceOptions, say: Callable[[str], None]) -> Race:
    """Let all take part that can; what one cannot do is reported, and the race goes on without it.

    Args:
        say: told what happens, in sentences.

    Raises:
        UsageError: our own engine or server cannot run the model; once something was measured that ends the race.
    """
    race, begin_s = Race(options), time.monotonic()
    for work in options.left_out:
        say(f"left out: {work.name}, more than --max-prompt-tokens {options.max_prompt_tokens}")
    with ExitStack() as stack:
        course = _Course(race, stack, say)
        try:
            with _interrupts(race):
                course.start()
                course.warm()
                course.run()
        except _OwnError as error:
            if not race.seen:
                raise UsageError(str(error)) from None
            race.ended_by = str(error)
        if race.ended_by:
            say(f"ended by {race.ended_by}")
    race.duration_s = time.monotonic() - begin_s
    return race


class _OwnError(UsageError):
    """One of ours failed: nothing can be compared any longer."""


@contextmanager
def _interrupts(race: Race) -> Iterator[None]:
    """Let SIGTERM and the limit end the body as Ctrl-C does, wherever it is."""
    main, limit_s = threading.main_thread().ident, race.options.limit_s
    assert main is not None

    def on_limit() -> None:
        race.ended_by = f"--limit-s {limit_s:g}"
        signal.pthread_kill(main, signal.SIGTERM)

    def on_term(number: int, frame: FrameType | None) -> None:
        if not race.ended_by:
            race.ended_by, race.was_interrupted = "SIGTERM", True
        signal.raise_signal(signal.SIGINT)

    # asyncio makes a cancellation of Ctrl-C only where its handler is Python's own.
    handlers = {signal.SIGTERM: on_term, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    timer = threading.Timer(limit_s, on_limit)
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not race.ended_by:
            race.ended_by, race.was_interrupted = "Ctrl-C", True
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Course:
    """A race that goes on: who takes part, what is still to be done, and how long that will take."""

    def __init__(self, race: Race, stack: ExitStack, say: Callable[[str], None]) -> None:
        self._race, self._options, self._stack, self._say = race, race.options, stack, say
        self._end_s = time.monotonic() + race.options.limit_s
        self._works = list(race.options.works)
        self._taking: list[Contender] = []
        self._units = Units()
        self._spent_s: dict[str, float] = {}
        """Of the last round of each work, all contenders together."""

    @property
    def _left_s(self) -> float:
        return self._end_s - time.monotonic()

    def _tell(self, sentence: str) -> None:
        self._say(f"{sentence} ({max(0.0, self._left_s):.0f} s left)")

    def start(self) -> None:
        """Start all contenders; prompts are of token ids that every vocabulary of this model has as ordinary ones."""
        vocabulary = 0
        for name, start in self._starts().items():
            self._tell(f"loading {name}")
            try:
                contender = start()
            except OutError as error:
                if name in (*OURS.values(), ROUTER):
                    raise _OwnError(f"{name} cannot run {self._options.model}: {error}") from None
                self._race.out[name] = str(error)
                self._say(f"without {name}: {error}")
                continue
            self._stack.callback(contender.close)
            self._taking.append(contender)
            self._race.contenders[name] = {"kind": contender.kind, "version": contender.version, "ways": {}}
            if isinstance(contender, Engine) and contender.vocabulary is not None:
                vocabulary = contender.vocabulary
        self._units = Units(ids=tuple(range(min(300, vocabulary // 2), vocabulary)))

    def _starts(self) -> dict[str, Callable[[], Contender]]:
        options = self._options
        threads = options.threads or available_cores()
        max_seqs = max(work.streams for work in self._works)
        max_seqs = max(max_seqs, 32) if options.arrivals else max_seqs
        python, model = options.peer_python, options.model
        grid = [work for work in self._works if work.kind == "grid"]
        starts: dict[str, Callable[[], Contender]] = {}
        if grid and options.only != "servers":
            names = [name for name in options.peers if name in ENGINES]
            starts[OURS["engine"]] = partial(Engine, "lockstep", sys.executable, model, threads, grid)
            starts |= {name: partial(Engine, name, python, model, threads, grid) for name in names}
        if options.only == "engines":
            return starts
        routed = options.routed_requests
        if any(work.kind != "routed" for work in self._works):
            starts[OURS["server"]] = partial(start_server, OURS["server"], own_server(model, threads, max_seqs))
        if routed is not None:
            command = own_server(model, threads, 1, options.routed)
            starts[ROUTER] = partial(start_server, ROUTER, command, routed, is_router=True)
        for name in options.peers:
            if name in SERVERS:
                command = llama_cpp_server(python, model, threads, self._works)
                starts[name] = partial(start_server, name, command, routed)
        for url in options.peer_urls:
            starts[url] = partial(Server, url, Target.parse(url, None, "--peer-url"), routed=routed)
        return starts

    def warm(self) -> None:
        """Prepare everyone for each number of streams, the most first; for other kinds of work by a round of them."""
        grid = [work for work in self._works if work.kind == "grid"]
        longest = {work.streams: work for work in sorted(grid, key=lambda work: work.context)}
        widths = [longest[streams] for streams in sorted(longest, reverse=True)]
        for work in [*widths, *(work for work in self._works if work.kind != "grid")]:
            title = f"x{work.streams}" if work.kind == "grid" else work.name
            for each in self._able(work):
                self._tell(f"warming {title}: {each.name}")
                self._guarded(each, partial(self._warm, each, work, title))
        self._works = [self._paced(work) if work.kind == "arrivals" else work for work in self._works]

    def _warm(self, contender: Contender, work: Work, title: str) -> None:
        self._race.contenders[contender.name]["ways"][title] = contender.warm(work, self._units)

    def _paced(self, work: Work) -> Work:
        """Arrivals at a rate that our server has time for, on whatever machine."""
        own = next(each for each in self._taking if each.name == OURS["server"])
        alone = figures(Work(work.context), own.run(Work(work.context, 1, SHORT_OUTPUT), self._units, 0))
        gap_s = ARRIVAL_LOAD * alone["ttft_ms"] / 1e3
        for each in self._able(work):
            self._race.contenders[each.name]["ways"][work.name] = f"a long prompt every {gap_s:.2f} s"
        return replace(work, gap_s=gap_s)

    def run(self) -> None:
        """Do all rounds for which there is time: first those of the work that leaves time for other work."""
        late: list[Work] = []
        for number in range(self._options.rounds):
            for work in self._works:
                if self._expected_s(work) * self._options.rounds > self._options.limit_s * LATE_SHARE:
                    late.append(work)
                if work not in late:
                    self._round(work, number)
        for number in range(self._options.rounds):
            for work in dict.fromkeys(late):
                self._round(work, number)

    def _expected_s(self, work: Work) -> float:
        """Seconds of a round of a work: those of its last one, else by its cost beside what was seen."""
        if work.kind == "arrivals":
            return 1.2 * work.gap_s * NUM_LONG * len(list(self._able(work)))
        if work.name in self._spent_s or not self._spent_s:
            return self._spent_s.get(work.name, 0.0)
        return work.cost * sum(self._spent_s.values()) / sum(w.cost for w in self._works if w.name in self._spent_s)

    def _round(self, work: Work, number: int) -> None:
        """A round of one work, unless it was done, or would not end in time."""
        if any(work.name == name and number in rounds for (name, _), rounds in self._race.seen.items()):
            return
        if self._expected_s(work) > self._left_s:
            self._race.ended_by = f"--limit-s {self._options.limit_s:g}, which has no room for a round of {work.name}"
            return
        begin_s, turn = time.monotonic(), number % len(self._taking)
        for each in self._able(work, self._taking[turn:] + self._taking[:turn]):
            self._tell(f"round {number + 1} of {self._options.rounds}, {work.name}: {each.name}")
            self._guarded(each, partial(self._one, each, work, number))
        self._spent_s[work.name] = time.monotonic() - begin_s

    def _one(self, contender: Contender, work: Work, number: int) -> None:
        found = figures(work, contender.run(work, self._units, number + 1))
        self._race.seen.setdefault((work.name, contender.name), {})[number] = found

    def _able(self, work: Work, taking: Sequence[Contender] | None = None) -> list[Contender]:
        """Contenders that can do a work: but for plain prompts it takes a server, which has a template."""
        return [
            each
            for each in taking or self._taking
            if each.name not in self._race.out
            and not (work.kind != "grid" and each.kind == "engine")
            and (each.name != OURS["server"] if work.kind == "routed" else each.name != ROUTER)
        ]

    def _guarded(self, contender: Contender, act: Callable[[], None]) -> None:
        """Act; a peer that fails is out of the race, our own failure ends it."""
        try:
            act()
        except OutError as error:
            if contender.name in (*OURS.values(), ROUTER):
                raise _OwnError(f"{contender.name} failed: {error}") from None
            self._race.out[contender.name] = str(error)
            self._say(f"without {contender.name} from here: {error}")


def ratios(race: Race, work: str, peer: str, figure: str, own: str | None = None) -> list[float]:
    """Times that we are better, for each round in which both have the figure: above 1 we win.

    Args:
        own: which of ours; None: that of the peer's kind.
    """
    names = (OURS[race.contenders[peer]["kind"]], ROUTER) if own is None else (own,)
    ours = next((race.seen[work, name] for name in names if (work, name) in race.seen), {})
    more = FIGURES[figure][1]
    found: list[float] = []
    for number, theirs in race.seen.get((work, peer), {}).items():
        mine = ours.get(number, {})
        if mine.get(figure) and theirs.get(figure):
            found.append(mine[figure] / theirs[figure] if more else theirs[figure] / mine[figure])
    return found


def as_json(race: Race) -> dict[str, Any]:
    """The whole race: what `lockstep bench compare` reads is under ``figures``."""
    values: dict[str, Any] = {}
    better: dict[str, Any] = {}
    for (work, name), rounds in race.seen.items():
        for figure, (_, more) in FIGURES.items():
            seen = [found[figure] for found in rounds.values() if figure in found]
            if seen:
                key = f"{work} {name} {figure}"
                values[key] = {"values": seen, "better": "more" if more else "less"}
            for prefix, own in (("", None), *SERVED.get(race.contenders[name]["kind"], ())):
                found = [] if name in (*OURS.values(), ROUTER) else ratios(race, work, name, figure, own)
                if found:
                    spread = {"median": statistics.median(found), "least": min(found), "greatest": max(found)}
                    better[f"{work} {name} {prefix}{figure}"] = spread
    return {
        "kind": "peers",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "machine": machine_name(),
        "command": shlex.join(["lockstep", *sys.argv[1:]]),
        "options": asdict(race.options),
        "duration_s": round(race.duration_s, 1),
        "ended_by": race.ended_by,
        "not_measured": _not_measured(race),
        "contenders": race.contenders,
        "out": race.out,
        "figures": values,
        "times_better": better,
    }


def text_of(race: Race) -> str:
    """Tables by kind of work: medians of each contender, how many times better ours is, and of how many rounds."""
    of_kind: dict[str, list[str]] = {}
    for work in race.options.works:
        if any(name == work.name for name, _ in race.seen):
            of_kind.setdefault(work.kind, []).append(work.name)
    duration = f"{race.duration_s:.0f} s" + (f", ended by {race.ended_by}" if race.ended_by else "")
    lines = [
        f"{Path(race.options.model).name} on {machine_name()}, {duration}",
        "; ".join(dict.fromkeys(each["version"] for each in race.contenders.values())),
        *(f"{to_lines(_table(race, works))}\n" for works in of_kind.values()),
        "x: times that ours of the same kind was better (served x: our server), median of rounds (least to greatest)",
    ]
    if missing := _not_measured(race):
        lines.append(f"not measured: {', '.join(missing)}")
    lines += [f"without {name}: {reason}" for name, reason in race.out.items()]
    ways = {name: _ways(each["ways"]) for name, each in race.contenders.items()}
    lines += [f"{name}: {way}" for name, way in ways.items() if way]
    return "\n".join([*lines, *(ollama_lines(race.options.model) if race.options.routed else [])])


def _table(race: Race, works: Sequence[str]) -> Table:
    """Rows of some works, with the columns that any of them has."""
    seen = {key: rounds for key, rounds in race.seen.items() if key[0] in works}
    known = {figure for rounds in seen.values() for found in rounds.values() for figure in found}
    columns = [figure for figure in FIGURES if figure in known]
    has_peers = any(name not in (*OURS.values(), ROUTER) for _, name in seen)
    shown = [figure for figure in COMPARED if figure in known and has_peers]
    titles = [*(FIGURES[figure][0] for figure in columns), "rounds"]
    names = list(race.contenders)
    compared: list[tuple[str, str, str | None]] = [(f"x {FIGURES[figure][0]}", figure, None) for figure in shown]
    if has_peers and any(race.contenders[name]["kind"] == "engine" for _, name in seen) and OURS["server"] in names:
        compared.append(("served x output tok/s", "output_throughput", OURS["server"]))
    titled = words(*(title for title, _, _ in compared))
    table = Table("", (*words("work", "contender"), *numbers(*titles), *titled))
    for (work, name), rounds in sorted(
        seen.items(), key=lambda each: (works.index(each[0][0]), names.index(each[0][1]))
    ):
        cells = [_median([found[figure] for found in rounds.values() if figure in found]) for figure in columns]
        own = name in (*OURS.values(), ROUTER)
        is_server = race.contenders[name]["kind"] == "server"
        spreads = [
            "" if own or (is_server and ours) else _spread(ratios(race, work, name, figure, ours))
            for _, figure, ours in compared
        ]
        table.rows.append((work, name, *cells, str(len(rounds)), *spreads))
    return table


def _not_measured(race: Race) -> list[str]:
    seen = {work for work, _ in race.seen}
    return [work.name for work in (*race.options.works, *race.options.left_out) if work.name not in seen]


def _median(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:,.{1 if middle < 100 else 0}f}"


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-"


def _ways(ways: Mapping[str, str]) -> str:
    """Ways in which a contender did its work, where there was a choice."""
    chosen = {title: way for title, way in ways.items() if way and way != "defaults"}
    if len(set(chosen.values())) == 1:
        return next(iter(chosen.values()))
    return "; ".join(f"{title}: {way}" for title, way in chosen.items())
