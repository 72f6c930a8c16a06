"""Triage of signals: determines the owner, cause and affected traffic of each signal, and the next action.

If there are several signals, causes come before their consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lockstep.errors import EvidenceError
from lockstep.release import causes
from lockstep.release.causes import Cause
from lockstep.release.evidence import Bools, Evidence
from lockstep.release.outputs import Output
from lockstep.release.policy import Policy
from lockstep.release.series import METRIC_OF
from lockstep.release.traffic_parts import Cut, TrafficPart, cuts_of, part_of_events, part_of_regression
from lockstep.release.verdict import ALL, Decision, Signal, Triage


class Group(IntEnum):
    """Group of a kind of signal. Findings of equal severity are investigated in the order of the groups."""

    EVIDENCE = 0
    """Makes all other signals unreliable until it is fixed."""
    TIMES = 1
    """Answers are late, or memory is short."""
    OTHERS = 2
    TOO_LITTLE = 3
    """There is too little evidence; more traffic may be all that it needs."""


class Kind(NamedTuple):
    """One kind of signal."""

    owner: str
    """Default owner, which a policy or an owners file can override."""
    action: str
    """Next action, if the cause does not have its own."""
    cause: Callable[[Evidence, Bools], Cause] | None = None
    """Function that finds the cause from the pairs that show the signal; None: the cause is unknown."""
    events: Callable[[Evidence], tuple[Bools, Bools]] | None = None
    """Function that returns the pairs that could show the signal, and those that do; None: the signal is shown by the
    growth of its metric, or by no pair."""
    group: Group = Group.OTHERS


KINDS: Mapping[str, Kind] = {
    "output-mismatch": Kind(
        "model or kernels",
        "run the example requests on both sides alone; compare weights, template and sampler",
        causes.of_mismatch,
        lambda it: (it.pairs.healthy, it.pairs.output == Output.DIFFERS),
    ),
    "numeric-drift": Kind(
        "numerics",
        "compare precision and kernels of both backends on the example requests",
        causes.of_drift,
        lambda it: (it.pairs.healthy, it.pairs.output == Output.DRIFTED),
    ),
    "agreement": Kind(
        "model or kernels",
        "read the example answers of both sides; compare weights and template",
        causes.of_mismatch,
        lambda it: (it.pairs.healthy, it.pairs.output == Output.DIFFERS),
    ),
    "logprob-gap": Kind("numerics", "compare precision of weights and kernels on the example requests"),
    "errors": Kind(
        "serving",
        "read the candidate's log for the example requests",
        causes.of_errors,
        lambda it: (np.ones(len(it.pairs), np.bool_), it.pairs.ok[0] & ~it.pairs.ok[1]),
    ),
    "outputs-policy": Kind(
        "release",
        "set outputs in the policy to exact, numeric, agreement(FIELD) or ignore",
        group=Group.EVIDENCE,
    ),
    "no-output-evidence": Kind(
        "mirroring",
        "record token ids of answers on both sides, for recordings with one --trace-key for both servers; or set "
        "outputs: ignore in the policy",
        causes.of_comparable,
        group=Group.TOO_LITTLE,
    ),
    "kv-pressure": Kind(
        "capacity",
        "compare KV pool sizes, context limits and prefix caching",
        causes.of_pressure,
        group=Group.TIMES,
    ),
    "decode": Kind(
        "executor",
        "compare step times at equal batch sizes",
        lambda _, __: Cause("decode", ""),
        group=Group.TIMES,
    ),
    "ttft": Kind(
        "scheduling",
        "compare prefill budget, chunking and prefix-cache hits",
        causes.of_first_token,
        group=Group.TIMES,
    ),
    "latency": Kind(
        "scheduling",
        "compare queue depth and time to the first token; replay the load on both settings",
        causes.of_latency,
        group=Group.TIMES,
    ),
    "latency-tail": Kind(
        "scheduling",
        "find out what ran at the same time as the slowest pairs",
        causes.of_latency,
        group=Group.TIMES,
    ),
    "output-length": Kind(
        "model or kernels", "compare max_tokens, stop sequences, end tokens and templates of both sides"
    ),
    "unsound-baseline": Kind(
        "mirroring",
        "find out what else differs between two runs of the baseline, and repeat both with another --aa",
        group=Group.EVIDENCE,
    ),
    "missing-pairs": Kind(
        "mirroring",
        "find out why one side lost requests: slow answers time out",
        causes.of_join,
        group=Group.EVIDENCE,
    ),
    "missing-join": Kind(
        "mirroring",
        "send the same x-request-id to both sides",
        causes.of_join,
        group=Group.EVIDENCE,
    ),
    "missing-output": Kind(
        "mirroring",
        "keep token ids, text or vector of each answer, on both sides",
        causes.of_output,
        lambda it: (
            it.pairs.ok[0] | it.pairs.ok[1],
            np.isin(np.arange(len(it.pairs)), np.concatenate(it.without_output)),
        ),
    ),
    "missing-comparable": Kind(
        "mirroring",
        "keep the same output material on both sides",
        causes.of_comparable,
        lambda it: (it.pairs.healthy, np.isin(it.pairs.output, (Output.INCOMPARABLE, Output.NO_MATERIAL))),
    ),
    "uncertain-agreement": Kind("mirroring", "mirror more traffic whose answers can be compared"),
    "missing-provenance": Kind(
        "gateway",
        "let the gateway write route_id and scheduler for each answer",
        causes.of_provenance,
        lambda it: (it.pairs.ok[1], it.pairs.ok[1] & ~it.pairs.routed[1]),
    ),
    "missing-streaming": Kind(
        "streaming",
        "record token times: stream the mirrored requests",
        causes.of_streaming,
        lambda it: (it.pairs.ok[1], it.pairs.ok[1] & ~it.pairs.streamed[1]),
    ),
    "missing-metric": Kind(
        "mirroring",
        "write the same times of every answer on both sides (latency_ms, ttft_ms, token_latencies_ms, kv_used); what "
        "cannot be had is left out by min_metric_rate: 0 or required_series: []",
    ),
    "missing-times": Kind("mirroring", "write the time of arrival (ts) of each request, on one side at least"),
    "too-few-pairs": Kind("mirroring", "mirror more traffic, or for longer", causes.of_join, group=Group.TOO_LITTLE),
    "no-evidence-yet": Kind("mirroring", "mirror more traffic, or for longer", group=Group.TOO_LITTLE),
    "non-stationary": Kind(
        "mirroring", "plot latency of both sides over time; mirror for several times as long as one change takes"
    ),
    "undecided": Kind(
        "mirroring",
        "mirror more traffic, or for longer; or widen the bound that is too narrow",
        group=Group.TOO_LITTLE,
    ),
}
"""Kinds of signals by name, in the order of investigation: causes before their consequences."""
RANKS = {name: rank for rank, name in enumerate(KINDS)}
"""Rank of each kind of signal in that order."""
_SEVERITY = {Decision.ROLLBACK: "critical", Decision.HOLD: "warning", Decision.PROMOTE: "info"}


class Finding(NamedTuple):
    """Signal with the part of the traffic that shows it, and its cause."""

    signal: Signal
    part: str
    """Name of the affected part of the traffic."""
    cause: Cause


def find(signals: Sequence[Signal], evidence: Evidence) -> tuple[Finding, ...]:
    """Signals with their parts of the traffic and causes, in the order of investigation.

    Rollback comes first, then causes before their consequences. A finding of all pairs is not repeated for a segment.
    """
    cuts = cuts_of(evidence) if signals else ()
    found: dict[tuple[str, str], Finding] = {}
    for signal in signals:
        mask = evidence.mask_of(signal.segment)
        part = _part_of(signal, evidence, mask, cuts)
        if (signal.name, part.name) not in found:
            cause_of = KINDS[signal.name].cause
            cause = causes.UNKNOWN if cause_of is None else cause_of(evidence, mask & part.mask)
            found[signal.name, part.name] = Finding(signal, part.name, cause)
    severity = {each: _severity(each, found.values()) for each in found.values()}
    leading = [_leading([each for each, rank in severity.items() if rank == of]) for of in range(len(Decision))]
    order = {signal: place for place, signal in enumerate(signals)}
    ranks = {each: (rank, *_rank(each, leading[rank], order[each.signal])) for each, rank in severity.items()}
    return tuple(sorted(ranks, key=lambda each: ranks[each]))


def _part_of(signal: Signal, evidence: Evidence, mask: Bools, cuts: Sequence[Cut]) -> TrafficPart:
    part = TrafficPart(ALL, mask)
    metric, events_of = METRIC_OF.get(signal.name), KINDS[signal.name].events
    if metric is not None:
        usable = mask & evidence.pairs.known(metric.name)
        part = part_of_regression(cuts, usable, *evidence.pairs.metrics[metric.name])
    elif events_of is not None:
        population, affected = events_of(evidence)
        part = part_of_events(cuts, population & mask, affected)
    if part.name == ALL or signal.segment in (ALL, part.name):
        return part._replace(name=signal.segment if part.name == ALL else part.name)
    return part._replace(name=f"{signal.segment}, {part.name}")


# -- order of findings ------------------------------------------------------------------------------------------------

_MAKES_LATE = (causes.SMALLER_POOL, "unlike-prompts", "truncated", "longer-answers", "doubled-tokens", "dropped-tokens")
"""Causes that also change times, for example because answers have fewer tokens."""


def _leading(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Signals of time and pressure, causes first: the KV pool, the part of the time that grew more, the total time."""
    names = {each.signal.name: each.cause.name for each in findings}
    order = ["kv-pressure"] if names.get("kv-pressure") == causes.SMALLER_POOL else []
    whole = names.get("latency") or names.get("latency-tail")
    if whole == "longer-answers":
        order += ["latency", "latency-tail"]
    # Slower steps cause queues, so decode comes before ttft; a slow prefill delays decoding, so it comes before decode.
    if "decode" in names and "ttft" in names and names["ttft"] == "prefill" and whole == "prefill":
        order.append("ttft")
    elif "decode" in names:
        order.append("decode")
    order += ["ttft", "decode", "latency", "latency-tail", "kv-pressure"]
    return tuple(dict.fromkeys(order))


def _severity(finding: Finding, findings: Iterable[Finding]) -> int:
    """Rank of a finding's response. A cause of late answers has at least the rank of the late answers."""
    is_cause = finding.cause.name in _MAKES_LATE
    shown = [each for each in findings if each == finding or (is_cause and _group(each) is Group.TIMES)]
    return min(each.signal.response.rank for each in shown)


def _rank(finding: Finding, leading: Sequence[str], place: int) -> tuple[Group, int, bool, int]:
    """Rank of a finding among those of its severity: by group, then by the order in the group."""
    name, group = finding.signal.name, _group(finding)
    within = 0
    if group is Group.EVIDENCE:
        within = RANKS[name]
    elif group is Group.TIMES:
        within = leading.index(name)
    elif finding.cause.name in _MAKES_LATE:  # before the times that it explains
        group, within = Group.EVIDENCE, len(RANKS)
    return group, within, finding.signal.segment != ALL, place


def _group(finding: Finding) -> Group:
    return KINDS[finding.signal.name].group


# -- items ------------------------------------------------------------------------------------------------------------


def triage_of(findings: Sequence[Finding], policy: Policy) -> tuple[Triage, ...]:
    """Triage items of the findings, in the same order."""
    return tuple(
        Triage(
            signal=signal.name,
            severity=_SEVERITY[signal.response],
            segment=part,
            cause=cause.name,
            evidence=f"{signal.sentence}; {cause.words}" if cause.words else signal.sentence,
            response=signal.response.value,
            owner=owner_of(signal.name, part, policy.owners),
            action=cause.action or KINDS[signal.name].action,
            examples=signal.examples,
        )
        for signal, part, cause in findings
    )


def owner_of(signal: str, part: str, owners: Mapping[str, str]) -> str:
    """Owner of a signal: that of the last pattern that matches ``signal`` or ``signal/part``, else the default
    owner."""
    fitting = [
        owner
        for pattern, owner in owners.items()
        if fnmatchcase(signal, pattern) or fnmatchcase(f"{signal}/{part}", pattern)
    ]
    return fitting[-1] if fitting else KINDS[signal].owner


def read_owners(path: Path) -> dict[str, str]:
    """Owners by pattern, from an owners file. As in CODEOWNERS, a line has a pattern and its owners; the last match
    counts.

    Raises:
        EvidenceError: the file cannot be read, or a line has no owner.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{path}: cannot read the owners file: {error}") from None
    owners: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        pattern, *names = line.partition("#")[0].split()[:16] or [""]
        if not pattern:
            continue
        if not names:
            raise EvidenceError(f"{path}, line {number}: {pattern!r} has no owner; write PATTERN OWNER")
        owners.pop(pattern, None)
        owners[pattern] = " ".join(names)
    return owners
