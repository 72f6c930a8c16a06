"""Triage: the meaning of each signal, its owner, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import EvidenceError
from lockstep.release.causes import Finding
from lockstep.release.policy import Policy
from lockstep.release.verdict import Decision, Triage


class Hint(NamedTuple):
    """Advice for one signal."""

    owner: str
    action: str


HINTS: Mapping[str, Hint] = {
    "output-mismatch": Hint(
        "model or kernels", "run the example requests on both sides alone; compare weights, template and sampler"
    ),
    "numeric-drift": Hint("numerics", "compare precision and kernels of both backends on the example requests"),
    "agreement": Hint("model or kernels", "read the example answers of both sides; compare weights and template"),
    "logprob-gap": Hint("numerics", "compare precision of weights and kernels on the example requests"),
    "errors": Hint("serving", "read the candidate's log for the example requests"),
    "outputs-policy": Hint("release", "say in the policy what sameness of outputs means"),
    "no-output-evidence": Hint(
        "mirroring",
        "keep token ids of answers on both sides, of recordings give both servers the same --trace-key; or say "
        "outputs: ignore",
    ),
    "kv-pressure": Hint("capacity", "compare KV pool sizes, context limits and prefix caching"),
    "decode": Hint("executor", "compare step times at equal batch sizes"),
    "ttft": Hint("scheduling", "compare prefill budget, chunking and prefix-cache hits"),
    "latency": Hint("scheduling", "compare queue depth and time to the first token; replay the load on both settings"),
    "latency-tail": Hint("scheduling", "look at the slowest pairs: what ran beside them"),
    "output-length": Hint(
        "model or kernels", "compare max_tokens, stop sequences, end tokens and templates of both sides"
    ),
    "unsound-baseline": Hint(
        "mirroring", "find out what else differs between two runs of the baseline, and repeat both with another --aa"
    ),
    "missing-pairs": Hint("mirroring", "find out why one side lost requests: slow answers time out"),
    "missing-join": Hint("mirroring", "send the same x-request-id to both sides"),
    "missing-output": Hint("mirroring", "keep token ids, text or vector of each answer, on both sides"),
    "missing-comparable": Hint("mirroring", "keep the same output material on both sides"),
    "uncertain-agreement": Hint("mirroring", "mirror more traffic whose answers can be compared"),
    "missing-provenance": Hint("gateway", "let the gateway write route_id and scheduler for each answer"),
    "missing-streaming": Hint("streaming", "record token times: stream the mirrored requests"),
    "missing-metric": Hint(
        "mirroring",
        "write the same times of every answer on both sides (latency_ms, ttft_ms, token_latencies_ms, kv_used); what "
        "cannot be had is left out by min_metric_rate: 0 or required_series: []",
    ),
    "missing-times": Hint("mirroring", "write the time of arrival (ts) of each request, on one side at least"),
    "too-few-pairs": Hint("mirroring", "mirror more traffic, or for longer"),
    "no-evidence-yet": Hint("mirroring", "mirror more traffic, or for longer"),
    "non-stationary": Hint(
        "mirroring", "plot latency of both sides over time; mirror for several times as long as one change takes"
    ),
    "undecided": Hint("mirroring", "mirror more traffic, or for longer; or widen the bound that is too narrow"),
}
"""Hints by signal, in the order in which to look: causes before their consequences. Owners are defaults: a policy or a
file of owners sets the real ones."""
RANKS = {name: rank for rank, name in enumerate(HINTS)}
"""Places of signals in that order."""
_SEVERITY = {Decision.ROLLBACK: "critical", Decision.HOLD: "warning", Decision.PROMOTE: "info"}


def triage_of(findings: Sequence[Finding], policy: Policy) -> tuple[Triage, ...]:
    """An item per finding, in their order."""
    return tuple(
        Triage(
            signal=signal.name,
            severity=_SEVERITY[signal.response],
            segment=place,
            cause=cause.name,
            evidence=f"{signal.sentence}; {cause.words}" if cause.words else signal.sentence,
            response=signal.response.value,
            owner=owner_of(signal.name, place, policy.owners),
            action=cause.action or HINTS[signal.name].action,
            examples=signal.examples,
        )
        for signal, place, cause in findings
    )


def owner_of(signal: str, place: str, owners: Mapping[str, str]) -> str:
    """Owner of a signal: the last pattern that fits ``signal`` or ``signal/place``, else the built-in hint."""
    fitting = [
        owner
        for pattern, owner in owners.items()
        if fnmatchcase(signal, pattern) or fnmatchcase(f"{signal}/{place}", pattern)
    ]
    return fitting[-1] if fitting else HINTS[signal].owner


def read_owners(path: Path) -> dict[str, str]:
    """A file of owners, a pattern and its owners a line, as in CODEOWNERS; the last one that fits counts.

    Raises:
        EvidenceError: it cannot be read, or a line has no owner.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{path}: cannot be read as a file of owners: {error}") from None
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
