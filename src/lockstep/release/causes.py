"""Causes: the most likely origin of a signal, derived from all figures together, and which of several signals leads.

A late answer is a symptom. It waited for its first token or for the others; it waited in a queue or for its prefill; it
was longer; or the pool was smaller. Where answers differ, their tokens show whether they were cut off, lost tokens, had
tokens twice, came from another prompt, or were sampled otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.release.evidence import BUFFERED, OUTPUT_TOKENS, Bools, Evidence, Floats, p95
from lockstep.release.joining import EMPTY
from lockstep.release.observation import Reason
from lockstep.release.outputs import BOTH_ANSWERS, Output
from lockstep.release.statistics import nearest_rank
from lockstep.release.traffic_parts import ALL, Cut, TrafficPart, cuts_of, part_of_events, part_of_regression
from lockstep.release.verdict import Decision, Signal

MAX_ANSWERS = 200
"""Differing pairs whose tokens are looked at, the first in order."""
MOST = 0.5
"""Part of these that have to differ in one way, for it to be the cause."""
LONGER = 1.1
"""From this ratio on, answers are longer."""
SMALLER = 0.98
"""Below this ratio, a pool is smaller."""
BURST = 0.25
"""Failures within this part of all pairs are a burst, where there are at least `MIN_BURST`."""
MIN_BURST = 3
FULL = 0.9
"""From this part of a pool in use on, requests wait for it."""
QUEUED = 0.5
"""Requests that waited on average beyond the baseline's: from so many on, there is a queue."""
MIN_IDLE = 5
"""Pairs that found an idle candidate, for their first tokens to say what a prefill takes."""
IDLE = 0.1
"""Part of these that are taken at their word: requests that come at one moment do not find each other in any figure."""
SMALLER_POOL = "smaller-pool"
_METRICS = {
    "latency": "latency_ms",
    "latency-tail": "latency_ms",
    "ttft": "ttft_ms",
    "decode": "decode_ms",
    "kv-pressure": "kv_pressure",
}


class Cause(NamedTuple):
    """Cause of a signal."""

    name: str
    """Empty: the cause is unknown."""
    words: str
    action: str = ""
    """Instead of the signal's."""


class Finding(NamedTuple):
    """A signal with its place and its cause."""

    signal: Signal
    place: str
    cause: Cause


UNKNOWN = Cause("", "")


def find(signals: Sequence[Signal], evidence: Evidence) -> tuple[Finding, ...]:
    """Signals with their places and causes, in the order in which a person looks at them.

    Rollback comes first, then causes before their consequences. A finding of all pairs is not repeated for a segment.
    """
    cuts = cuts_of(evidence) if signals else ()
    found: dict[tuple[str, str], Finding] = {}
    for signal in signals:
        mask = evidence.mask_of(signal.segment)
        place = _place_of(signal, evidence, mask, cuts)
        if (signal.name, place.name) not in found:
            cause_of = _CAUSES.get(signal.name)
            cause = cause_of(evidence, mask & place.mask) if cause_of is not None else UNKNOWN
            found[signal.name, place.name] = Finding(signal, place.name, cause)
    severity = {each: _severity(each, found.values()) for each in found.values()}
    leading = [_leading([each for each, rank in severity.items() if rank == of]) for of in range(len(Decision))]
    order = {signal: place for place, signal in enumerate(signals)}
    ranks = {each: (rank, *_rank(each, leading[rank], order[each.signal])) for each, rank in severity.items()}
    return tuple(sorted(ranks, key=lambda each: ranks[each]))


def _place_of(signal: Signal, evidence: Evidence, mask: Bools, cuts: Sequence[Cut]) -> TrafficPart:
    pairs = evidence.pairs
    place = TrafficPart(ALL, mask)
    if signal.name in _METRICS:
        baseline, candidate = pairs.metrics[_METRICS[signal.name]]
        usable = mask & pairs.healthy & ~np.isnan(baseline) & ~np.isnan(candidate)
        place = part_of_regression(cuts, usable, baseline, candidate)
    elif (events := _events_of(signal, evidence)) is not None:
        population, affected = events
        place = part_of_events(cuts, population & mask, affected)
    if place.name == ALL or signal.segment in (ALL, place.name):
        return place._replace(name=signal.segment if place.name == ALL else place.name)
    return place._replace(name=f"{signal.segment}, {place.name}")


def _events_of(signal: Signal, evidence: Evidence) -> tuple[Bools, Bools] | None:
    """Pairs that could show a signal, and those that do."""
    pairs = evidence.pairs
    everything = np.ones(len(pairs), np.bool_)
    match signal.name:
        case "errors":
            return everything, pairs.ok[0] & ~pairs.ok[1]
        case "output-mismatch" | "agreement":
            return pairs.healthy, pairs.output == Output.DIFFERS
        case "numeric-drift":
            return pairs.healthy, pairs.output == Output.DRIFTED
        case "missing-provenance":
            return pairs.ok[1], pairs.ok[1] & ~pairs.routed[1]
        case "missing-streaming":
            return pairs.ok[1], pairs.ok[1] & ~pairs.streamed[1]
        case "missing-output":
            bare = np.isin(np.arange(len(pairs)), np.concatenate(evidence.without_output))
            return pairs.ok[0] | pairs.ok[1], bare
        case "missing-comparable":
            return pairs.healthy, np.isin(pairs.output, (Output.INCOMPARABLE, Output.NO_MATERIAL))
    return None


# -- which one leads --------------------------------------------------------------------------------------------------

_EVIDENCE_FIRST = ("outputs-policy", "unsound-baseline", "missing-pairs", "missing-join")
"""Signals that make all others unreliable until they are fixed."""
_MAKES_LATE = (SMALLER_POOL, "unlike-prompts", "truncated", "longer-answers", "doubled-tokens", "dropped-tokens")
"""Causes from which unlike times follow: of fewer tokens, each takes another part of the whole."""
_SYMPTOMS = ("kv-pressure", "decode", "ttft", "latency", "latency-tail")


def _leading(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Signals of time and pressure, causes first: a pool, then the part of the time that grew more, then the whole."""
    causes = {each.signal.name: each.cause.name for each in findings}
    order = ["kv-pressure"] if causes.get("kv-pressure") == SMALLER_POOL else []
    whole = causes.get("latency") or causes.get("latency-tail")
    if whole == "longer-answers":
        order += ["latency", "latency-tail"]
    # A queue is what slower steps lead to, so steps go before it; a slow prefill holds up decoding, so it goes before.
    if "decode" in causes and "ttft" in causes and causes["ttft"] == "prefill" and whole == "prefill":
        order.append("ttft")
    elif "decode" in causes:
        order.append("decode")
    order += ["ttft", "decode", "latency", "latency-tail", "kv-pressure"]
    return tuple(dict.fromkeys(order))


def _severity(finding: Finding, findings: Iterable[Finding]) -> int:
    """Place among responses; what makes answers late has that of the late answers."""
    is_cause = finding.cause.name in _MAKES_LATE
    shown = [each for each in findings if each == finding or (is_cause and each.signal.name in _SYMPTOMS)]
    return min((Decision.ROLLBACK, Decision.HOLD, Decision.PROMOTE).index(each.signal.response) for each in shown)


def _rank(finding: Finding, leading: Sequence[str], place: int) -> tuple[int, int, bool, int]:
    name = finding.signal.name
    is_all = finding.signal.segment == ALL
    if name in _EVIDENCE_FIRST:
        return 0, _EVIDENCE_FIRST.index(name), not is_all, place
    if name in _SYMPTOMS:
        return 1, leading.index(name), not is_all, place
    if finding.cause.name in _MAKES_LATE:
        return 0, len(_EVIDENCE_FIRST), not is_all, place
    return 2 if not name.startswith(("too-", "no-", "undecided")) else 3, 0, not is_all, place


# -- causes by signal -------------------------------------------------------------------------------------------------


def _of_mismatch(evidence: Evidence, mask: Bools) -> Cause:
    """The way in which most of the differing answers differ."""
    places = np.flatnonzero(mask & (evidence.pairs.output == Output.DIFFERS))[:MAX_ANSWERS]
    if not len(places):
        return UNKNOWN
    wanted = ", ".join(str(int(place)) for place in places)
    rows = evidence.store.rows(
        "SELECT x.tokens, y.tokens, x.text, y.text, coalesce(x.prompt_tokens <> y.prompt_tokens, false)"
        f" FROM {BOTH_ANSWERS} WHERE place IN ({wanted}) ORDER BY place"
    )
    kinds: Counter[str] = Counter()
    for b_tokens, c_tokens, b_text, c_text, is_other_prompt in rows:
        pairs = [pair for pair in ((b_tokens, c_tokens), (b_text, c_text)) if None not in pair]
        kinds["unlike-prompts" if is_other_prompt else kind_of_difference(*pairs[0]) if pairs else ""] += 1
    kind, count = min(kinds.items(), key=lambda each: (-each[1], each[0]))
    if count <= MOST * len(rows) or not kind:
        kind, count = ("diverging", len(rows)) if any(kinds) else ("", 0)
    if not kind:
        return UNKNOWN
    words, action = _MISMATCHES[kind]
    return Cause(kind, f"{count:,} of {len(rows):,} looked at {words}", action)


_MISMATCHES: Mapping[str, tuple[str, str]] = {
    "unlike-prompts": (
        "have prompts of unlike lengths",
        "compare the chat templates, system prompts and tokenizers of both sides",
    ),
    "truncated": (
        "are beginnings of the baseline's",
        "compare max_tokens, stop sequences, time limits and context lengths of both sides",
    ),
    "longer-answers": (
        "go on where the baseline's end",
        "compare max_tokens, stop sequences and end tokens of both sides",
    ),
    "doubled-tokens": (
        "are the baseline's with tokens repeated",
        "look for a gateway or client that sends events of a stream again",
    ),
    "dropped-tokens": (
        "are the baseline's with tokens left out",
        "look for a gateway, client or detokenizer that loses events of a stream",
    ),
    "diverging": (
        "part from the baseline's and go on otherwise",
        "run the example requests on both sides alone; compare weights, precision, sampling parameters and seeds",
    ),
}


def kind_of_difference(baseline: Sequence[Any], candidate: Sequence[Any]) -> str:
    """Kind of change from one answer to another: cut off, going on, with parts doubled or left out, or otherwise."""
    pairs = zip(baseline, candidate, strict=False)
    common = next((at for at, (b, c) in enumerate(pairs) if b != c), min(len(baseline), len(candidate)))
    if common == len(candidate):
        return "truncated"
    if common == len(baseline):
        return "longer-answers"
    if len(candidate) >= len(baseline) and _is_doubled(baseline, candidate):
        return "doubled-tokens"
    rest = iter(baseline)
    if all(token in rest for token in candidate):
        return "dropped-tokens"
    return "diverging"


def _is_doubled(baseline: Sequence[Any], candidate: Sequence[Any]) -> bool:
    """True if the candidate is the baseline, or a beginning of it, with some tokens repeated."""
    at = 0
    for place, token in enumerate(candidate):
        if at < len(baseline) and token == baseline[at]:
            at += 1
        elif not place or token != candidate[place - 1]:
            return False
    return True


_EMPTY_ANSWER = "an empty answer: 0 tokens"


def _of_errors(evidence: Evidence, mask: Bools) -> Cause:
    pairs = evidence.pairs
    failed = np.flatnonzero(mask & pairs.ok[0] & ~pairs.ok[1])
    if not len(failed):
        return UNKNOWN
    wanted = ", ".join(str(int(place)) for place in failed[:MAX_ANSWERS])
    texts = evidence.store.rows(
        f"SELECT coalesce(nullif(y.error, ''), CASE WHEN {EMPTY} THEN '{_EMPTY_ANSWER}' END) AS fault_text, count(*)"
        f" FROM ordered o JOIN candidate y ON o.c = y.row WHERE place IN ({wanted}) AND fault_text IS NOT NULL"
        " GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1"
    )
    said = f'; most say "{texts[0][0][:80]}"' if texts else ""
    span = int(failed[-1] - failed[0]) + 1
    if len(failed) >= MIN_BURST and span <= BURST * len(pairs):
        words = f"all within {span:,} of {len(pairs):,} pairs in a row, from the {int(failed[0]) + 1:,}. on{said}"
        return Cause("burst", words, "read the candidate's log of the time from the first of them to the last")
    if len(failed) < MIN_BURST:
        return Cause("", said.removeprefix("; "))
    return Cause("spread", f"spread over {span:,} of {len(pairs):,} pairs{said}")


def _of_join(evidence: Evidence, _: Bools) -> Cause:
    joining = evidence.joining
    lost = {side: Counter[Reason]() for side in ("baseline", "candidate")}
    for each in joining.unjoined:
        lost[each.side][each.reason] += each.count
    baseline, candidate = lost["baseline"], lost["candidate"]
    total = baseline + candidate
    alone = baseline[Reason.NO_PARTNER], candidate[Reason.NO_PARTNER]
    if total[Reason.DUPLICATE] and 2 * total[Reason.DUPLICATE] >= total[Reason.DUPLICATE] + abs(alone[0] - alone[1]):
        words = f"{total[Reason.DUPLICATE]:,} records have an id that another one has"
        action = "let the gateway give each request an id of its own, and keep it on retries"
        return Cause("duplicate-id", words, action)
    if total[Reason.NO_ID] > sum(alone):
        return Cause("no-id", f"{total[Reason.NO_ID]:,} records have no id")
    for lacking, other, most, least in (("candidate", "baseline", *alone), ("baseline", "candidate", *alone[::-1])):
        if most > 2 * least:
            words = f"the {lacking} lacks {most:,} requests that the {other} has, the {other} {least:,}"
            action = f"find out why the {lacking} lost requests: slow answers time out; where only a sample is "
            action += f"mirrored, leave the other requests out of the {other}'s file, or lower min_join_rate"
            return Cause(f"{lacking}-lost", words, action)
    if not sum(alone):
        return UNKNOWN
    words = f"{alone[0]:,} and {alone[1]:,} records have ids that the other side does not know"
    return Cause("unlike-ids", words, "compare the ids of both sides: a gateway may write its own over x-request-id")


def _of_provenance(evidence: Evidence, mask: Bools) -> Cause:
    fields = {"route": "route_id", "scheduler": "scheduler"}
    lacking = [name for name, field in fields.items() if not evidence.names[field][1]]
    if not lacking:
        num = int((mask & evidence.pairs.ok[1] & ~evidence.pairs.routed[1]).sum())
        return Cause("some", f"{num:,} answers lack route or scheduler, others have both")
    return Cause("no-" + "-no-".join(lacking), f"no answer names its {' or '.join(lacking)}")


def _of_streaming(evidence: Evidence, _: Bools) -> Cause:
    faults = {reason: count for side, reason, count in evidence.faults if side == "candidate"}
    missing = int((evidence.pairs.ok[1] & ~evidence.pairs.streamed[1]).sum())
    for reason, count in faults.items():
        if 2 * count >= missing:
            action = "stamp events by one clock that never steps back, and give each its own index"
            return Cause(reason.value, f"{count:,} records of the candidate have {reason.value}", action)
    return Cause("not-streamed", f"{missing:,} answers have no times of tokens")


def _of_comparable(evidence: Evidence, mask: Bools) -> Cause:
    nothing = int((mask & (evidence.pairs.output == Output.NO_MATERIAL)).sum())
    reasons = dict(evidence.incomparable)
    reason = min(reasons, key=lambda each: (-reasons[each], each), default="")
    if reason and reasons[reason] >= nothing:
        words, action = f"{reasons[reason]:,} pairs: {reason}", f"send the same to both sides: {reason}"
        return Cause(reason.replace(" ", "-"), words, action)
    return Cause("no-material", f"{nothing:,} pairs hold nothing of either answer") if nothing else UNKNOWN


def _of_output(evidence: Evidence, _: Bools) -> Cause:
    baseline, candidate = map(len, evidence.without_output)
    words = f"{baseline:,} answers of the baseline and {candidate:,} of the candidate carry none"
    return Cause("no-material", words)


# -- causes of late answers -------------------------------------------------------------------------------------------


def _of_pressure(evidence: Evidence, mask: Bools) -> Cause:
    baseline, candidate = _pools(evidence, mask)
    used = evidence.pairs.metrics["kv_pressure"][1]
    is_full = p95(used[mask]) >= FULL
    if len(baseline) and np.median(candidate) < SMALLER * np.median(baseline):
        words = f"the candidate's KV pool is {np.median(candidate) / np.median(baseline):.3g} times the baseline's"
        room = "is full at times" if is_full else "has room at all times"
        action = "compare the sizes of the KV pools: memory for them, block sizes and precisions"
        return Cause(SMALLER_POOL if is_full else f"{SMALLER_POOL}-with-room", f"{words} and {room}", action)
    if len(baseline):
        return Cause("more-in-use", "the pools are equal, so more of the candidate's is in use")
    return UNKNOWN


def _of_first_token(evidence: Evidence, mask: Bools) -> Cause:
    pairs = evidence.pairs
    first, whole = pairs.metrics["ttft_ms"], pairs.metrics["latency_ms"]
    usable = mask & pairs.healthy & _known(*first)
    if not usable.any():
        return UNKNOWN
    late = first[1][usable] - first[0][usable]
    with_whole = usable & _known(*whole)
    if with_whole.any():
        sides = zip(first, whole, strict=True)
        parts = [float(np.median(a[with_whole] / np.maximum(b[with_whole], 1e-9))) for a, b in sides]
        longer = float(np.mean(whole[1][with_whole] - whole[0][with_whole]))
        if parts[1] >= BUFFERED > parts[0] and longer < 0.5 * float(np.mean(late)):
            words = f"the first token comes after {100 * parts[1]:.3g} % of the whole time, the baseline's after "
            return Cause("buffering", f"{words}{100 * parts[0]:.3g} %", "look for a gateway that buffers event streams")
    queue = pairs.metrics["queue_depth"]
    queued = usable & _known(*queue)
    has_grown = queued.any() and float(np.mean(queue[1][queued] - queue[0][queued])) >= QUEUED
    if has_grown:
        idle = queued & (queue[1] == 0) & ~(pairs.metrics["kv_pressure"][1] > 0)
        alone = nearest_rank(first[1][idle] - first[0][idle], IDLE) if idle.sum() >= MIN_IDLE else 0.0
        if alone < 0.5 * float(np.median(late)):
            words = f"{np.mean(queue[0][queued]):.3g} requests waited before it on the baseline, "
            words += f"{np.mean(queue[1][queued]):.3g} on the candidate"
            return Cause("queueing", words, "compare limits of sequences and tokens a step, step times and replicas")
    action = "compare prefix-cache hits, prefill budget, chunking and kernels"
    if not queued.any():
        return Cause("", "nothing is known of queues", action)
    words = "it is late where no request was before it, too" if has_grown else "no more requests waited before it"
    return Cause("prefill", words, action)


def _of_latency(evidence: Evidence, mask: Bools) -> Cause:
    """The part of the time that grew more; longer answers, where each token takes no longer."""
    pairs = evidence.pairs
    first, whole = pairs.metrics["ttft_ms"], pairs.metrics["latency_ms"]
    lengths = pairs.metrics[OUTPUT_TOKENS]
    tokens = [side[mask & pairs.healthy & _known(*lengths)] for side in lengths]
    ratio = float(np.sum(tokens[1]) / max(np.sum(tokens[0]), 1.0)) if len(tokens[0]) else 1.0
    usable = mask & pairs.healthy & _known(*first) & _known(*whole)
    if not usable.any():
        return Cause("longer-answers", _longer(ratio), _LONGER_ACTION) if ratio >= LONGER else UNKNOWN
    sums = [(float(np.sum(first[side][usable])), float(np.sum(whole[side][usable]))) for side in (0, 1)]
    late_first = sums[1][0] - sums[0][0]
    rest = [total - begin for begin, total in sums]
    late_rest = rest[1] - rest[0]
    if ratio >= LONGER and late_rest > late_first and rest[1] / ratio <= rest[0] + 0.5 * late_rest:
        return Cause("longer-answers", _longer(ratio), _LONGER_ACTION)
    count = int(usable.sum())
    words = f"{late_first / count:+.4g} ms to the first token, {late_rest / count:+.4g} ms after it"
    if late_rest >= late_first:
        return Cause("decode", words, "compare step times at equal batch sizes")
    return _of_first_token(evidence, mask)._replace(words=words)


_LONGER_ACTION = "compare max_tokens, stop sequences and end tokens of both sides"


def _longer(ratio: float) -> str:
    return f"answers are {ratio:.3g} times as long"


def _known(baseline: Floats, candidate: Floats) -> Bools:
    return ~np.isnan(baseline) & ~np.isnan(candidate)


def _pools(evidence: Evidence, mask: Bools) -> tuple[Floats, Floats]:
    """Sizes of the KV pools of both sides, of the pairs that have both."""
    columns = evidence.store.connection.execute(
        "SELECT b.kv_total AS b, c.kv_total AS c FROM ordered o JOIN baseline b ON o.b = b.row"
        " JOIN candidate c ON o.c = c.row ORDER BY place"
    ).fetchnumpy()
    baseline, candidate = (np.ma.filled(np.ma.asarray(columns[side]).astype(np.float64), math.nan) for side in "bc")
    known = mask & _known(baseline, candidate)
    return baseline[known], candidate[known]


def _of_drift(evidence: Evidence, _: Bools) -> Cause:
    largest = evidence.max_drift
    return Cause("drift", "" if math.isnan(largest) else f"numbers differ by {largest:.3g} at most")


_CAUSES: Mapping[str, Callable[[Evidence, Bools], Cause]] = {
    "output-mismatch": _of_mismatch,
    "agreement": _of_mismatch,
    "numeric-drift": _of_drift,
    "errors": _of_errors,
    "missing-join": _of_join,
    "missing-pairs": _of_join,
    "too-few-pairs": _of_join,
    "missing-provenance": _of_provenance,
    "missing-streaming": _of_streaming,
    "missing-comparable": _of_comparable,
    "no-output-evidence": _of_comparable,
    "missing-output": _of_output,
    "kv-pressure": _of_pressure,
    "decode": lambda _, __: Cause("decode", ""),
    "ttft": _of_first_token,
    "latency": _of_latency,
    "latency-tail": _of_latency,
}
