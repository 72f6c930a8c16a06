"""A race against peers on one machine: the same model and work for each in turn, in rounds; ratios of a round count.

Engines are compared with our engine, servers with our server. Who begins changes from round to round.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.bench.contenders import (
    Contender,
    Done,
    Engine,
    OutError,
    Server,
    Work,
    llama_cpp_server,
    own_server,
    start_server,
)
from lockstep.bench.prompts import Units
from lockstep.bench.protocol import Target
from lockstep.errors import UsageError
from lockstep.executors.machine import available_cores, machine_name
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines

OURS = {"engine": "lockstep", "server": "lockstep serve"}
"""Names of our contenders, by the kind of those that they are compared with."""
PEERS = ("llama.cpp", "openvino-genai", "llama_cpp.server")
SUITE = (
    "Explain in two sentences why the sky is blue.",
    "Write a function that reverses a linked list.",
    "A customer was charged twice for one order. Draft a short, friendly answer.",
    "List three differences between a process and a thread.",
)
"""Short prompts one after the other, as the scripts ask them that compare local servers."""
SUITE_OUTPUT = 32
FIGURES: Mapping[str, tuple[str, bool]] = {
    "output_throughput": ("output tok/s", True),
    "decode_throughput": ("decode tok/s", True),
    "ttft_ms": ("TTFT ms", False),
    "cpu_ms_per_token": ("CPU ms/token", False),
    "memory_mb": ("MB", False),
}
"""Figures of a piece of work with their titles; True: more is better."""


@dataclass(frozen=True, slots=True)
class RaceOptions:
    """The work, and who takes part."""

    model: str
    contexts: tuple[int, ...] = (200, 1000, 4000)
    streams: tuple[int, ...] = (1, 8, 32)
    output_len: int = 64
    max_prompt_tokens: int = 8192
    rounds: int = 5
    limit_s: float = 600.0
    peers: tuple[str, ...] = PEERS
    peer_python: str = sys.executable
    peer_urls: tuple[str, ...] = ()
    threads: int = 0
    """0: as many as there are cores for us."""
    suite: bool = True
    grid: bool = True

    def __post_init__(self) -> None:
        for name in ("output_len", "rounds", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if min((*self.contexts, *self.streams), default=0) < 1:
            raise UsageError("--contexts and --streams take numbers from 1, such as 200,1000")
        unknown = [name for name in self.peers if name not in PEERS]
        if unknown:
            raise UsageError(f"--peers has {unknown[0]!r}; there are {', '.join(PEERS)}")
        for url in self.peer_urls:
            Target.parse(url, None, "--peer-url")
        if not self.works()[0]:
            raise UsageError("no work is left: raise --max-prompt-tokens, or leave --no-grid or --no-suite out")

    def works(self) -> tuple[list[Work], list[Work]]:
        """Work that is done, and that which has too many prompt tokens for the time there is."""
        grid = [Work(context, streams, self.output_len) for context in self.contexts for streams in self.streams]
        done = [work for work in grid if work.context * work.streams <= self.max_prompt_tokens] if self.grid else []
        left = [work for work in grid if work not in done] if self.grid else []
        return [*done, *([Work(64, 1, SUITE_OUTPUT, SUITE)] if self.suite else [])], left


@dataclass(slots=True)
class Race:
    """Everything that was seen of a race."""

    options: RaceOptions
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kind and version of each that took part, and how it did each work."""
    out: dict[str, str] = field(default_factory=dict)
    """Those that did not, or not to the end, and why."""
    seen: dict[tuple[str, str], dict[int, dict[str, float]]] = field(default_factory=dict)
    """Figures by work and contender, then by round."""
    num_rounds: int = 0
    was_interrupted: bool = False


def figures(work: Work, done: Done) -> dict[str, float]:
    """Figures of one piece of work.

    Decoding is counted while every stream is in it: from the last stream's first token to the first stream's last one;
    not at all where that is less than four tokens each.
    """
    answers = done.answers
    total = sum(len(answer.tokens_s) for answer in answers)
    result = {"ttft_ms": statistics.median(answer.tokens_s[0] - answer.sent_s for answer in answers) * 1e3}
    if work.texts:  # one after the other
        result["output_throughput"] = total / sum(answer.tokens_s[-1] - answer.sent_s for answer in answers)
        windows = [(answer.tokens_s[0], answer.tokens_s[-1], [answer]) for answer in answers]
    else:
        result["output_throughput"] = total / max(answer.tokens_s[-1] for answer in answers)
        begin_s, end_s = max(a.tokens_s[0] for a in answers), min(a.tokens_s[-1] for a in answers)
        windows = [(begin_s, end_s, answers)]
    spent_s = sum(end_s - begin_s for begin_s, end_s, _ in windows)
    count = sum(
        begin_s < at_s <= end_s for begin_s, end_s, inside in windows for answer in inside for at_s in answer.tokens_s
    )
    if count >= 4 * len(answers) and spent_s > 0:
        result["decode_throughput"] = count / spent_s
    if done.cpu_s is not None:
        result["cpu_ms_per_token"] = done.cpu_s * 1e3 / total
    if done.memory_mb is not None:
        result["memory_mb"] = done.memory_mb
    return result


def run_race(options: RaceOptions, say: Callable[[str], None]) -> Race:
    """Let all take part that can; what one cannot do is said, and the race goes on without it.

    Args:
        say: told what happens, in sentences.

    Raises:
        UsageError: our own engine cannot run the model.
    """
    race = Race(options)
    works, left = options.works()
    for work in left:
        say(f"left out: {work.name}, more than --max-prompt-tokens {options.max_prompt_tokens}")
    with ExitStack() as stack:
        taking, units = _start(options, works, race, stack, say)
        started_s = time.monotonic()
        try:
            for work in works:
                say(f"warming {work.name}")
                for each in _able(taking, race, work):
                    _guarded(race, each, say, partial(_warm, race, each, work, units))
            longest_s = 0.0
            for number in range(options.rounds):
                begin_s = time.monotonic()
                if number and begin_s - started_s + longest_s > options.limit_s:
                    say(f"--limit-s {options.limit_s:g} ends the race after {number} of {options.rounds} rounds")
                    break
                say(f"round {number + 1} of {options.rounds}")
                _round(race, works, taking[number % len(taking) :] + taking[: number % len(taking)], units, number, say)
                race.num_rounds += 1
                longest_s = max(longest_s, time.monotonic() - begin_s)
        except KeyboardInterrupt:
            race.was_interrupted = True
    return race


def _start(
    options: RaceOptions, works: Sequence[Work], race: Race, stack: ExitStack, say: Callable[[str], None]
) -> tuple[list[Contender], Units]:
    """Start all contenders; prompts are of token ids that every vocabulary of this model has as ordinary ones."""
    threads = options.threads or available_cores()
    max_seqs = max(work.streams for work in works)
    python, model = options.peer_python, options.model
    grid = [work for work in works if not work.texts]
    starts: dict[str, Callable[[], Contender]] = {}
    if grid:
        starts[OURS["engine"]] = partial(Engine, "lockstep", sys.executable, model, threads, grid)
    starts[OURS["server"]] = partial(start_server, OURS["server"], own_server(model, threads, max_seqs))
    for name in options.peers:
        if name == "llama_cpp.server":
            starts[name] = partial(start_server, name, llama_cpp_server(python, model, threads, works))
        elif grid:
            starts[name] = partial(Engine, name, python, model, threads, grid)
    for url in options.peer_urls:
        target = Target.parse(url, None, "--peer-url")
        starts[url] = partial(Server, url, target)
    taking: list[Contender] = []
    vocabulary = 0
    for name, start in starts.items():
        say(f"loading {name}")
        try:
            contender = start()
        except OutError as error:
            if name in OURS.values():
                raise UsageError(f"{name} cannot run {model}: {error}") from None
            race.out[name] = str(error)
            say(f"without {name}: {error}")
            continue
        stack.callback(contender.close)
        taking.append(contender)
        race.contenders[name] = {"kind": contender.kind, "version": contender.version, "ways": {}}
        if isinstance(contender, Engine) and contender.vocabulary is not None:
            vocabulary = contender.vocabulary
    return taking, Units(ids=tuple(range(min(300, vocabulary // 2), vocabulary)))


def _able(taking: Sequence[Contender], race: Race, work: Work) -> Iterator[Contender]:
    """Contenders that can do a piece of work: texts need a server, which has a template and a tokenizer."""
    return (each for each in taking if each.name not in race.out and not (work.texts and each.kind == "engine"))


def _warm(race: Race, contender: Contender, work: Work, units: Units) -> None:
    race.contenders[contender.name]["ways"][work.name] = contender.warm(work, units)


def _round(
    race: Race,
    works: Sequence[Work],
    taking: Sequence[Contender],
    units: Units,
    number: int,
    say: Callable[[str], None],
) -> None:
    def one(each: Contender, work: Work) -> None:
        done = each.run(work, units, number + 1)
        race.seen.setdefault((work.name, each.name), {})[number] = figures(work, done)

    for work in works:
        for each in _able(taking, race, work):
            _guarded(race, each, say, partial(one, each, work))


def _guarded(race: Race, contender: Contender, say: Callable[[str], None], act: Callable[[], None]) -> None:
    """Act; a peer that fails is out of the race, whose own failure would make it worthless."""
    try:
        act()
    except OutError as error:
        if contender.name in OURS.values():
            raise UsageError(f"{contender.name} failed: {error}") from None
        race.out[contender.name] = str(error)
        say(f"without {contender.name} from here: {error}")


def ratios(race: Race, work: str, peer: str, figure: str) -> list[float]:
    """Times that we are better, for each round in which both have the figure: above 1 we win."""
    ours = race.seen.get((work, OURS[race.contenders[peer]["kind"]]), {})
    more = FIGURES[figure][1]
    found = []
    for number, theirs in race.seen.get((work, peer), {}).items():
        own = ours.get(number, {})
        if own.get(figure) and theirs.get(figure):
            found.append(own[figure] / theirs[figure] if more else theirs[figure] / own[figure])
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
            if name not in OURS.values() and (found := ratios(race, work, name, figure)):
                better[f"{work} {name} {figure}"] = {
                    "median": statistics.median(found),
                    "least": min(found),
                    "greatest": max(found),
                }
    return {
        "kind": "peers",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "machine": machine_name(),
        "command": shlex.join(["lockstep", *sys.argv[1:]]),
        "options": asdict(race.options),
        "num_rounds": race.num_rounds,
        "contenders": race.contenders,
        "out": race.out,
        "figures": values,
        "times_better": better,
    }


def text_of(race: Race) -> str:
    """A table: medians of each contender, and how many times better ours is (median, least to greatest of rounds)."""
    shown = ("output_throughput", "decode_throughput", "ttft_ms")
    titles = [FIGURES[figure][0] for figure in FIGURES]
    table = Table("", (*words("work", "contender"), *numbers(*titles), *words(*(f"x {FIGURES[f][0]}" for f in shown))))
    for (work, name), rounds in sorted(race.seen.items(), key=lambda item: _place(race, *item[0])):
        cells = []
        for figure in FIGURES:
            seen = [found[figure] for found in rounds.values() if figure in found]
            cells.append(f"{statistics.median(seen):,.{1 if statistics.median(seen) < 100 else 0}f}" if seen else "-")
        own = name in OURS.values()
        table.rows.append((work, name, *cells, *("" if own else _spread(ratios(race, work, name, f)) for f in shown)))
    lines = [
        f"{Path(race.options.model).name} on {machine_name()}, {race.num_rounds} rounds",
        "; ".join(dict.fromkeys(each["version"] for each in race.contenders.values())),
        to_lines(table),
        "x: how many times better ours of the same kind was, median of rounds (least to greatest)",
    ]
    lines += [f"without {name}: {reason}" for name, reason in race.out.items()]
    ways = {name: _ways(each["ways"]) for name, each in race.contenders.items()}
    return "\n".join([*lines, *(f"{name}: {way}" for name, way in ways.items() if way)])


def _place(race: Race, work: str, name: str) -> tuple[int, int]:
    return [each.name for each in race.options.works()[0]].index(work), list(race.contenders).index(name)


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-"


def _ways(ways: Mapping[str, str]) -> str:
    """Ways in which a contender did its work, where there was a choice."""
    chosen = {work: way for work, way in ways.items() if way and way != "defaults"}
    if len(set(chosen.values())) == 1:
        return next(iter(chosen.values()))
    return "; ".join(f"{work}: {way}" for work, way in chosen.items())
