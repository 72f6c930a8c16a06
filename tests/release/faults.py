"""Faults planted in a candidate, each with the signal, place and cause that the gate's triage has to name first.

    python -m tests.release.faults

plants all of them, or those whose names hold the words that follow, and prints the table of docs/gate-faults.md; with
``--sequential`` the one of sequential mode, on six times the requests.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.release.planting import DOCUMENT, Endpoint, Observation, Pair, Request, judged, mirror, requests_of
from tests.server.process import serve
from tools.random_models import write_huggingface

POLICY: Mapping[str, Any] = {
    "max_latency_p95_ratio": None,
    "max_ttft_p95_ratio": None,
    "max_decode_p95_ratio": None,
    "max_latency_p95_increase_ms": 150,
    "max_ttft_p95_increase_ms": 60,
    "max_decode_p95_increase_ms": 15,
    "min_candidate_routing_provenance_rate": 1,
    "min_candidate_streaming_trace_rate": 0.95,
    "min_join_rate": 0.98,
    "min_comparable_rate": 0.95,
}
"""Policy that requires all evidence. Its bounds are far above the differences that a busy machine causes with stubs."""
TIMELESS: Mapping[str, Any] = {
    "max_latency_p95_increase_ms": None,
    "max_ttft_p95_increase_ms": None,
    "max_decode_p95_increase_ms": None,
}
"""Policy for tests that must not depend on other load of the machine."""
STUB = "stub://alpha?step_ms=10&token_us=20"
POCKET = "pocket://"
_FLAGS = ("--stream-interval-ms", "0", "--worker", "thread", "--disable-log-requests")
_TEMPLATE = "{% for message in messages %}Somebody says: {{ message.content }}\n{% endfor %}And so:"
Change = Callable[[Request, dict[str, Any]], None]


class Stage:
    """Servers by their source and flags, each started once; and one run of equal servers.

    Args:
        times: so many times the requests are sent, each to a prompt of its own.
    """

    def __init__(self, folder: Path, times: int = 1) -> None:
        self.folder = folder
        self.times = times
        self._stack = ExitStack()
        self._urls: dict[tuple[str, ...], str] = {}
        self._equal: dict[tuple[str, int], list[Pair]] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, source: str, *flags: str) -> str:
        words = (source, *_FLAGS, *flags)
        if words not in self._urls:
            self._urls[words] = self._stack.enter_context(serve(*words)).base_url
        return self._urls[words]

    def file(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def run(
        self,
        name: str,
        source: str,
        candidates: Sequence[Endpoint],
        *,
        waves: Sequence[Sequence[Request]] = (),
        concurrency: int = 2,
        flags: Sequence[str] = (),
        count: int = 48,
        **body: Any,
    ) -> list[Pair]:
        """Mirrored run with the given baseline and candidates."""
        baseline = Endpoint(self.url(source, *flags))
        waves = waves or [requests_of(name, self.times * count, **body)]
        return asyncio.run(mirror(baseline, candidates, waves, concurrency))

    def equal(self, source: str = STUB, count: int = 48) -> list[Pair]:
        """Records of a run of equal servers, for changes."""
        if (source, count) not in self._equal:
            candidate = Endpoint(self.url(source, "--max-finished", "1023"))
            self._equal[source, count] = self.run("equal", source, [candidate], concurrency=6, count=count)
        return copy.deepcopy(self._equal[source, count])

    def judged(self, pairs: Sequence[Pair], policy: Mapping[str, Any]) -> dict[str, Any]:
        return judged(pairs, self.folder, policy)


@dataclass(frozen=True)
class Fault:
    """A fault with the expected first item of the triage; no signal: no items."""

    name: str
    planted_in: Literal["server", "requests", "answers", "records"]
    plant: Callable[[Stage], list[Pair]]
    signal: str = ""
    place: str = "all"
    """Part of the name of the place; ``all``: the whole traffic."""
    cause: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_of_equal_run(self) -> bool:
        """True if the fault is planted in the records of `Stage.equal`."""
        return self.planted_in in ("answers", "records")

    def found(self, stage: Stage, policy: Mapping[str, Any] | None = None) -> tuple[str, str, str, dict[str, Any]]:
        """Signal, place and cause of the first item, and the verdict."""
        verdict = stage.judged(self.plant(stage), {**POLICY, **(policy or {}), **self.policy})
        first = next(iter(verdict["triage"]), {"signal": "", "segment": "", "cause": ""})
        return first["signal"], first["segment"], first["cause"], verdict

    def is_named(self, signal: str, place: str, cause: str) -> bool:
        if not self.signal:
            return signal in ("", "undecided")
        is_there = place == "all" if self.place == "all" else self.place in place
        return (signal, cause) == (self.signal, self.cause) and is_there


# -- how they are planted ---------------------------------------------------------------------------------------------


def _server(
    name: str, baseline: str, source: str, *flags: str, concurrency: int = 2, **body: Any
) -> Callable[[Stage], list[Pair]]:
    """Fault by another source or other flags on the candidate's side."""

    def plant(stage: Stage) -> list[Pair]:
        return stage.run(name, baseline, [Endpoint(stage.url(source, *flags))], concurrency=concurrency, **body)

    return plant


def _requests(name: str, change: Change, source: str = POCKET, **body: Any) -> Callable[[Stage], list[Pair]]:
    """Fault by requests that are changed on their way to the candidate."""

    def plant(stage: Stage) -> list[Pair]:
        url = stage.url(source, "--max-finished", "1023")
        return stage.run(name, source, [Endpoint(url, change=change)], **body)

    return plant


def _records(change: Callable[[int, Observation], None]) -> Callable[[Stage], list[Pair]]:
    """Fault by changed observations of the candidate, by their number."""

    def plant(stage: Stage) -> list[Pair]:
        pairs = stage.equal()
        for number, pair in enumerate(pairs):
            change(number, pair["candidate"])
        return pairs

    return plant


def _events(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Callable[[Stage], list[Pair]]:
    """Fault by stream events of the candidate that are changed on their way, as by a gateway."""

    def one(_: int, record: Observation) -> None:
        events = change(record["stream_events"])
        record["stream_events"] = [{**event, "index": index} for index, event in enumerate(events)]
        record["token_ids"] = [event["token_id"] for event in events]

    return _records(one)


def _shared_prefix(stage: Stage) -> list[Pair]:
    requests = [
        Request(f"shared-{at}", "chat", DOCUMENT + DOCUMENT + f"And so {at}?") for at in range(48 * stage.times)
    ]
    candidate = Endpoint(stage.url(_SLOW_PREFILL, "--no-enable-prefix-caching"))
    return stage.run("shared", _SLOW_PREFILL, [candidate], waves=[requests[:1], requests[1:]])


_SLOW_PREFILL = "stub://alpha?step_ms=10&token_us=100"


def _slow_prefill(stage: Stage) -> list[Pair]:
    requests = [
        Request(f"prompt-{at}", ("chat", "mail")[at % 2], f"prompt {at}: {DOCUMENT}") for at in range(48 * stage.times)
    ]
    candidate = Endpoint(stage.url("stub://alpha?step_ms=10&token_us=300"))
    return stage.run("prompt", "stub://alpha?step_ms=10", [candidate], waves=[requests], concurrency=1)


def _slow_segment(stage: Stage) -> list[Pair]:
    """Agents with a common prompt prefix, on a candidate without a prefix cache."""
    requests = [
        Request(f"agent-{at}", "agents", f"{DOCUMENT}{DOCUMENT} Task {at}")
        if at % 3 == 0
        else Request(f"mail-{at}", "mail", f"mail {at}: {DOCUMENT}{DOCUMENT}")
        for at in range(60 * stage.times)
    ]
    candidate = Endpoint(stage.url(_SLOW_PREFILL, "--no-enable-prefix-caching"))
    return stage.run("agents", _SLOW_PREFILL, [candidate], waves=[requests[:1], requests[1:]], concurrency=1)


def _slow_replica(stage: Stage) -> list[Pair]:
    slow = Endpoint(stage.url("stub://alpha?step_ms=60&token_us=20"), replica="r2")
    return stage.run("replica", STUB, [Endpoint(stage.url(STUB, "--max-finished", "1023")), slow])


def _wrong_version(stage: Stage) -> list[Pair]:
    other = Endpoint(stage.url("stub://other?step_ms=10&token_us=20"), replica="r2", version="v0")
    right = Endpoint(stage.url(STUB, "--max-finished", "1023"))
    return stage.run("version", STUB, [right, other], max_tokens=48)


def _burst(stage: Stage) -> list[Pair]:
    requests = requests_of("burst", 60 * stage.times)
    crowd = [Request(f"crowd-{at}", "chat", f"crowd {at}: hello") for at in range(16)]
    candidate = Endpoint(stage.url(STUB, "--max-num-seqs", "2", "--max-num-queued-reqs", "2", "--num-blocks", "32768"))
    quiet = [requests[at : at + 2] for at in range(0, len(requests), 2)]
    return stage.run("burst", STUB, [candidate], waves=[*quiet[:15], crowd, *quiet[15:]], concurrency=0)


def _lost(stage: Stage) -> list[Pair]:
    pairs = stage.equal()
    for pair in pairs[3::8]:
        del pair["candidate"]
    return pairs


def _own_ids(number: int, record: Observation) -> None:
    record["request_id"] = f"gw{7919 * (number + 1):08x}"


def _duplicated(number: int, record: Observation) -> None:
    if number % 6 == 1:
        record["request_id"] = f"equal.{number - 1}"


def _without_scheduler(_: int, record: Observation) -> None:
    del record["scheduler"]


def _not_streamed(_: int, record: Observation) -> None:
    del record["stream_events"]


def _stepping_clock(number: int, record: Observation) -> None:
    if number % 4 == 0:
        for event in record["stream_events"][3:]:
            event["elapsed_ms"] = max(0.0, event["elapsed_ms"] - 1000.0)


def _out_of_order(_: int, record: Observation) -> None:
    record["stream_events"] = record["stream_events"][::2] + record["stream_events"][1::2]


def _other_clock(_: int, record: Observation) -> None:
    record["ts"] += 7200.0


def _other_seed(number: int, record: Observation) -> None:
    record["seed"] = 2


def _seeds(stage: Stage) -> list[Pair]:
    pairs = _records(_other_seed)(stage)
    for pair in pairs:
        pair["baseline"]["seed"] = 1
    return pairs


def _vectors(stage: Stage) -> list[Pair]:
    pairs = stage.equal()
    for number, pair in enumerate(pairs):
        for side, scale in (("baseline", 1.0), ("candidate", 1.01)):
            del pair[side]["token_ids"]
            stamps = [event["elapsed_ms"] for event in pair[side].pop("stream_events")]
            pair[side]["ttft_ms"] = stamps[0]
            pair[side]["token_latencies_ms"] = [end - begin for begin, end in itertools.pairwise(stamps)]
            pair[side]["vector"] = [scale * (number + at) for at in range(1, 9)]
    return pairs


def _buffered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**event, "elapsed_ms": events[-1]["elapsed_ms"]} for event in events]


def _thinned(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for at, event in enumerate(events) if at % 5 != 2]


def _doubled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [events[0], *events]


def _hot(_: Request, body: dict[str, Any]) -> None:
    body["temperature"] = 1.5


def _hot_in_documents(request: Request, body: dict[str, Any]) -> None:
    if request.segment == "documents":
        body["temperature"] = 1.5


def _unseeded(_: Request, body: dict[str, Any]) -> None:
    del body["seed"]


def _shorter(_: Request, body: dict[str, Any]) -> None:
    body["max_tokens"] = 6


def _longer(_: Request, body: dict[str, Any]) -> None:
    body["max_tokens"] = 36


def _template(stage: Stage) -> list[Pair]:
    path = stage.file("template.jinja", _TEMPLATE)
    return stage.run("template", POCKET, [Endpoint(stage.url(POCKET, "--chat-template", path))])


def _quantised(stage: Stage) -> list[Pair]:
    model = str(write_huggingface(stage.folder / "random", "tiny-qwen3", "F32"))
    flags = ("--chat-template", stage.file("template.jinja", _TEMPLATE))
    requests = [
        Request(f"weights-{at}", ("chat", "mail")[at % 2], f"hello {at}", _LONG) for at in range(40 * stage.times)
    ]
    candidate = Endpoint(stage.url(model, *flags, "--quantize", "int4"))
    return stage.run("weights", model, [candidate], waves=[requests], flags=flags)


_LONG: Mapping[str, Any] = {"max_tokens": 12, "ignore_eos": True}
_BY_SEGMENT = {"segments": "enforce", "min_pairs": 20}
FAULTS: tuple[Fault, ...] = (
    Fault(
        "slower decode: each step takes longer",
        "server",
        _server("steps", STUB, "stub://alpha?step_ms=60&token_us=20"),
        "decode",
        cause="decode",
    ),
    Fault("slower prefill: each token of a prompt takes longer", "server", _slow_prefill, "ttft", cause="prefill"),
    Fault("prefix cache off", "server", _shared_prefix, "ttft", cause="prefill"),
    Fault(
        "fewer sequences at once",
        "server",
        _server("sequences", STUB, STUB, "--max-num-seqs", "1", concurrency=6),
        "ttft",
        cause="queueing",
    ),
    Fault(
        "smaller KV pool",
        "server",
        _server("pool", STUB, STUB, "--num-blocks", "120", concurrency=8),
        "kv-pressure",
        cause="smaller-pool",
    ),
    Fault(
        "a gateway buffers streams",
        "answers",
        _events(_buffered),
        "ttft",
        cause="buffering",
        policy={"max_ttft_p95_increase_ms": 5},
    ),
    Fault(
        "longer answers, outputs ignored",
        "requests",
        _requests("ignored", _longer, STUB, **_LONG),
        "latency",
        cause="longer-answers",
        policy={"outputs": "ignore"},
    ),
    Fault("one replica of two decodes slowly", "server", _slow_replica, "decode", "replica_id r2", "decode"),
    Fault("one segment is prefilled slowly", "server", _slow_segment, "ttft", "agents", "prefill", _BY_SEGMENT),
    Fault("wrong chat template", "server", _template, "output-mismatch", cause="unlike-prompts"),
    Fault("temperature above 0", "requests", _requests("hot", _hot), "output-mismatch", cause="diverging"),
    Fault(
        "seed ignored",
        "requests",
        _requests("seed", _unseeded, temperature=1.0, seed=7),
        "output-mismatch",
        cause="diverging",
    ),
    Fault("quantised weights", "server", _quantised, "output-mismatch", cause="diverging"),
    Fault("one replica serves another model version", "server", _wrong_version, "output-mismatch", "v0", "diverging"),
    Fault("dropped tokens", "answers", _events(_thinned), "output-mismatch", cause="dropped-tokens"),
    Fault("doubled first token", "answers", _events(_doubled), "output-mismatch", cause="doubled-tokens"),
    Fault(
        "truncated answers",
        "requests",
        _requests("shorter", _shorter, ignore_eos=True),
        "output-mismatch",
        cause="truncated",
    ),
    Fault(
        "longer answers", "requests", _requests("longer", _longer, **_LONG), "output-mismatch", cause="longer-answers"
    ),
    Fault(
        "wrong answers in one segment",
        "requests",
        _requests("wrong", _hot_in_documents),
        "output-mismatch",
        "documents",
        "diverging",
    ),
    Fault(
        "steps that fail now and then",
        "server",
        _server("failing", STUB, f"{STUB}&fail_every=50"),
        "errors",
        cause="spread",
    ),
    Fault("a burst of errors", "server", _burst, "errors", cause="burst"),
    Fault(
        "errors in one segment",
        "server",
        _server("context", STUB, STUB, "--max-model-len", "512"),
        "errors",
        "documents",
        "spread",
    ),
    Fault("the candidate loses requests", "answers", _lost, "missing-join", cause="candidate-lost"),
    Fault("ids rewritten by a gateway", "answers", _records(_own_ids), "missing-join", cause="unlike-ids"),
    Fault("duplicated ids", "records", _records(_duplicated), "missing-join", cause="duplicate-id"),
    Fault("provenance missing", "records", _records(_without_scheduler), "missing-provenance", cause="no-scheduler"),
    Fault("streaming evidence missing", "records", _records(_not_streamed), "missing-streaming", cause="not-streamed"),
    Fault(
        "clock steps back within answers",
        "records",
        _records(_stepping_clock),
        "missing-streaming",
        cause="falling-event-stamps",
    ),
    Fault("stream events out of order, with their indices", "records", _records(_out_of_order)),
    Fault("clocks of the sides hours apart", "records", _records(_other_clock)),
    Fault("other seeds sent to the candidate", "records", _seeds, "missing-comparable", cause="unlike-seed"),
    Fault(
        "vectors drift beyond their tolerance",
        "records",
        _vectors,
        "numeric-drift",
        cause="drift",
        policy={"numeric_tolerances": [{"relative": 0.001}]},
    ),
)


def _row(fault: Fault, stage: Stage, policy: Mapping[str, Any]) -> str:
    signal, place, cause, verdict = fault.found(stage, policy)
    expected = ", ".join((fault.signal, fault.place, fault.cause)) if fault.signal else "nothing"
    found = ", ".join(filter(None, (signal, place, cause))) or "nothing"
    cells = [fault.name, fault.planted_in, expected, found]
    cells.append("yes" if fault.is_named(signal, place, cause) else "**no**")
    if policy:
        certain = [each["outside_after"] for each in verdict["series"] if each["signal"] == signal]
        cells += [verdict["decision"], str(min(filter(None, certain), default="-"))]
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str], times: int = 6) -> None:
    policy = {"mode": "sequential", "warmup_pairs": 0} if "--sequential" in words else {}
    print("| fault | planted in | expected | found first | |" + " decision | certain after pairs |" * bool(policy))
    print("|---|---|---|---|---|" + "---|---|" * bool(policy))
    with tempfile.TemporaryDirectory() as folder, Stage(Path(folder), times if policy else 1) as stage:
        for fault in FAULTS:
            if all(word in fault.name for word in words if word != "--sequential"):
                print(_row(fault, stage, policy), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
