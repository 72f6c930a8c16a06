"""Causes of signals: derives the most likely cause of a signal from all figures together.

A late answer is a symptom. The delay may be before the first token or after it, and may come from a queue, a slow
prefill, a longer answer or a smaller KV pool. If answers differ, their tokens show whether they were truncated, lost
tokens, repeated tokens, answered another prompt, or were sampled differently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.release.evidence import BUFFERED, OUTPUT_TOKENS, Bools, Evidence, Floats, p95
from lockstep.release.joining import EMPTY
from lockstep.release.observation import LeftOutReason
from lockstep.release.outputs import BOTH_ANSWERS, Output, first_unlike
from lockstep.release.statistics import nearest_rank
from lockstep.release.store import floats

MAX_ANSWERS = 200
"""Maximum number of differing pairs, the first in order, whose tokens are compared."""
MOST = 0.5
"""Fraction of these pairs that must differ in the same way, so that this way is the cause."""
LONGER = 1.1
"""Minimum ratio of lengths from which answers count as longer."""
SMALLER = 0.98
"""Ratio of pool sizes below which the candidate's pool counts as smaller."""
BURST = 0.25
"""Failures within this fraction of all pairs are a burst, if there are at least `MIN_BURST`."""
MIN_BURST = 3
"""Minimum number of failures of a burst."""
FULL = 0.9
"""Fraction of the pool in use from which requests wait for blocks."""
QUEUED = 0.5
"""Increase of the mean number of waiting requests from which there is a queue."""
MIN_IDLE = 5
"""Minimum number of pairs that arrived at an idle candidate, to measure prefill times by their first tokens."""
IDLE = 0.1
"""Quantile of these pairs' delays that is used. Simultaneous requests are not visible in any figure, so not all of
these pairs really found an idle candidate."""
SMALLER_POOL = "smaller-pool"


class Cause(NamedTuple):
    """Cause of a signal."""

    name: str
    """Name of the cause; empty: unknown."""
    words: str
    """Evidence of the cause, as part of a sentence."""
    action: str = ""
    """Next step of the investigation; empty: that of the signal."""


UNKNOWN = Cause("", "")


def of_mismatch(evidence: Evidence, mask: Bools) -> Cause:
    """Way in which most of the differing answers differ."""
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
        "continue after the end of the baseline's",
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
        "diverge from the baseline's at some token",
        "run the example requests on both sides alone; compare weights, precision, sampling parameters and seeds",
    ),
}


def kind_of_difference(baseline: Sequence[Any], candidate: Sequence[Any]) -> str:
    """Kind of difference between two answers: truncated, longer, with repeated or dropped tokens, or diverging."""
    common = first_unlike(baseline, candidate)
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
    """True if the candidate is the baseline, or a prefix of it, with some tokens repeated."""
    at = 0
    for place, token in enumerate(candidate):
        if at < len(baseline) and token == baseline[at]:
            at += 1
        elif not place or token != candidate[place - 1]:
            return False
    return True


_EMPTY_ANSWER = "an empty answer: 0 tokens"


def of_errors(evidence: Evidence, mask: Bools) -> Cause:
    """Describe the failures: whether they came in one burst, and the error that most of them report."""
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
    most_frequent = f'; most say "{texts[0][0][:80]}"' if texts else ""
    span = int(failed[-1] - failed[0]) + 1
    if len(failed) >= MIN_BURST and span <= BURST * len(pairs):
        words = (
            f"all within {span:,} of {len(pairs):,} pairs in a row, from the {int(failed[0]) + 1:,}. on{most_frequent}"
        )
        return Cause("burst", words, "read the candidate's log of the time from the first of them to the last")
    if len(failed) < MIN_BURST:
        return Cause("", most_frequent.removeprefix("; "))
    return Cause("spread", f"spread over {span:,} of {len(pairs):,} pairs{most_frequent}")


def of_join(evidence: Evidence, _: Bools) -> Cause:
    """Reason why records have no partners: shared ids, no ids, requests of one side only, or different ids."""
    joining = evidence.joining
    lost = {side: Counter[LeftOutReason]() for side in ("baseline", "candidate")}
    for each in joining.unjoined:
        lost[each.side][each.reason] += each.count
    baseline, candidate = lost["baseline"], lost["candidate"]
    total = baseline + candidate
    alone = baseline[LeftOutReason.NO_PARTNER], candidate[LeftOutReason.NO_PARTNER]
    if total[LeftOutReason.DUPLICATE] and 2 * total[LeftOutReason.DUPLICATE] >= total[LeftOutReason.DUPLICATE] + abs(
        alone[0] - alone[1]
    ):
        words = f"{total[LeftOutReason.DUPLICATE]:,} records have an id that another one has"
        action = "configure the gateway to give each request its own id, and to keep it on retries"
        return Cause("duplicate-id", words, action)
    if total[LeftOutReason.NO_ID] > sum(alone):
        return Cause("no-id", f"{total[LeftOutReason.NO_ID]:,} records have no id")
    for lacking, other, most, least in (("candidate", "baseline", *alone), ("baseline", "candidate", *alone[::-1])):
        if most > 2 * least:
            words = f"the {lacking} lacks {most:,} requests that the {other} has, the {other} {least:,}"
            action = f"find out why the {lacking} lost requests: slow answers time out; where only a sample is "
            action += f"mirrored, leave the other requests out of the {other}'s file, or lower min_join_rate"
            return Cause(f"{lacking}-lost", words, action)
    if not sum(alone):
        return UNKNOWN
    words = f"{alone[0]:,} and {alone[1]:,} records have ids that do not occur on the other side"
    return Cause("unlike-ids", words, "compare the ids of both sides: a gateway may write its own over x-request-id")


def of_provenance(evidence: Evidence, mask: Bools) -> Cause:
    """Provenance fields that all answers lack, or the number of answers that lack some."""
    fields = {"route": "route_id", "scheduler": "scheduler"}
    lacking = [name for name, field in fields.items() if not evidence.names[field][1]]
    if not lacking:
        num = int((mask & evidence.pairs.ok[1] & ~evidence.pairs.routed[1]).sum())
        return Cause("some", f"{num:,} answers lack route or scheduler, others have both")
    return Cause("no-" + "-no-".join(lacking), f"no answer names its {' or '.join(lacking)}")


def of_streaming(evidence: Evidence, _: Bools) -> Cause:
    """Invalid stream events, or answers that were not streamed."""
    faults = {reason: count for side, reason, count in evidence.faults if side == "candidate"}
    missing = int((evidence.pairs.ok[1] & ~evidence.pairs.streamed[1]).sum())
    for reason, count in faults.items():
        if 2 * count >= missing:
            action = "stamp events by one clock that never steps back, and give each its own index"
            return Cause(reason.value, f"{count:,} records of the candidate have {reason.value}", action)
    return Cause("not-streamed", f"{missing:,} answers have no times of tokens")


def of_comparable(evidence: Evidence, mask: Bools) -> Cause:
    """Most frequent reason why answers were not compared."""
    nothing = int((mask & (evidence.pairs.output == Output.NO_MATERIAL)).sum())
    reasons = dict(evidence.incomparable)
    reason = min(reasons, key=lambda each: (-reasons[each], each), default="")
    if reason and reasons[reason] >= nothing:
        words, action = f"{reasons[reason]:,} pairs: {reason}", f"send the same to both sides: {reason}"
        return Cause(reason.replace(" ", "-"), words, action)
    return Cause("no-material", f"{nothing:,} pairs hold nothing of either answer") if nothing else UNKNOWN


def of_output(evidence: Evidence, _: Bools) -> Cause:
    """Number of answers of each side without output material."""
    baseline, candidate = map(len, evidence.without_output)
    words = f"{baseline:,} answers of the baseline and {candidate:,} of the candidate carry none"
    return Cause("no-material", words)


# -- causes of late answers -------------------------------------------------------------------------------------------


def of_pressure(evidence: Evidence, mask: Bools) -> Cause:
    """Compare the KV pools: the candidate's is smaller, or more of an equal one is in use."""
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


def of_first_token(evidence: Evidence, mask: Bools) -> Cause:
    """Explain a late first token: it was buffered, queued, or computed more slowly."""
    pairs = evidence.pairs
    first, whole = pairs.metrics["ttft_ms"], pairs.metrics["latency_ms"]
    usable = mask & pairs.known("ttft_ms")
    if not usable.any():
        return UNKNOWN
    late = first[1][usable] - first[0][usable]
    with_whole = usable & pairs.known("latency_ms")
    if with_whole.any():
        sides = zip(first, whole, strict=True)
        parts = [float(np.median(a[with_whole] / np.maximum(b[with_whole], 1e-9))) for a, b in sides]
        longer = float(np.mean(whole[1][with_whole] - whole[0][with_whole]))
        if parts[1] >= BUFFERED > parts[0] and longer < 0.5 * float(np.mean(late)):
            words = f"the first token comes after {100 * parts[1]:.3g} % of the whole time, the baseline's after "
            return Cause("buffering", f"{words}{100 * parts[0]:.3g} %", "look for a gateway that buffers event streams")
    queue = pairs.metrics["queue_depth"]
    queued = usable & pairs.known("queue_depth")
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


def of_latency(evidence: Evidence, mask: Bools) -> Cause:
    """Part of the time that grew more, or longer answers if the time per token did not grow."""
    pairs = evidence.pairs
    first, whole = pairs.metrics["ttft_ms"], pairs.metrics["latency_ms"]
    tokens = [side[mask & pairs.known(OUTPUT_TOKENS)] for side in pairs.metrics[OUTPUT_TOKENS]]
    ratio = float(np.sum(tokens[1]) / max(np.sum(tokens[0]), 1.0)) if len(tokens[0]) else 1.0
    usable = mask & pairs.known("ttft_ms") & pairs.known("latency_ms")
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
    return of_first_token(evidence, mask)._replace(words=words)


_LONGER_ACTION = "compare max_tokens, stop sequences and end tokens of both sides"


def _longer(ratio: float) -> str:
    return f"answers are {ratio:.3g} times as long"


def _pools(evidence: Evidence, mask: Bools) -> tuple[Floats, Floats]:
    """KV pool sizes of both sides, in the pairs that have both."""
    columns = evidence.store.columns(
        "SELECT b.kv_total AS b, c.kv_total AS c FROM ordered o JOIN baseline b ON o.b = b.row"
        " JOIN candidate c ON o.c = c.row ORDER BY place"
    )
    baseline, candidate = (floats(columns[side]) for side in "bc")
    known = mask & ~np.isnan(baseline) & ~np.isnan(candidate)
    return baseline[known], candidate[known]


def of_drift(evidence: Evidence, _: Bools) -> Cause:
    """Largest difference between two numbers of a pair of vectors."""
    largest = evidence.max_drift
    return Cause("drift", "" if math.isnan(largest) else f"numbers differ by {largest:.3g} at most")
