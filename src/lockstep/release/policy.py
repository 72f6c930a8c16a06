"""Policy of a gate: which differences between baseline and candidate are borne, and what follows from others.

"Outside" means strictly beyond a bound. Bounds that are None do not count. A policy is read from the input, from a YAML
or JSON file, and from ``--set``, later ones over earlier ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lockstep.errors import EvidenceError
from lockstep.release.evidence import SEGMENT_FIELDS
from lockstep.release.outputs import Tolerance
from lockstep.spelling import did_you_mean, listed

AGREEMENT = "agreement("


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All fields, with their defaults."""

    mode: Literal["threshold", "sequential"] = "threshold"
    """threshold compares figures of all pairs; sequential holds its error rates however often it is looked at."""
    outputs: str | None = None
    """Sameness of answers: exact, numeric, agreement(FIELD) or ignore. Default exact; it has to be said where the
    weights of the sides are known and differ."""
    min_pairs: int = 20
    """Matched pairs that a verdict needs; with fewer: hold."""
    max_mismatch_rate: float = 0.0
    """Part of the compared answers that may differ, 0 to 1; beyond: rollback."""
    min_agreement: float = 0.99
    """With outputs agreement(FIELD): part of the compared answers that have to agree; below: rollback."""
    max_logprob_gap: float | None = None
    """Mean difference of the log-probabilities of a pair's answers that is borne; beyond: rollback."""
    max_error_rate_increase: float = 0.0
    """Candidate's error rate less the baseline's, in percentage points; beyond: rollback."""
    max_latency_p95_ratio: float | None = 1.10
    """Candidate's 95th percentile of latency over the baseline's; beyond: hold."""
    max_latency_p95_increase_ms: float | None = None
    """Candidate's 95th percentile of latency less the baseline's; beyond: hold."""
    max_ttft_p95_ratio: float | None = 1.10
    """The same of the time to the first token."""
    max_ttft_p95_increase_ms: float | None = None
    """The same as a difference."""
    max_decode_p95_ratio: float | None = 1.10
    """The same of the gaps between tokens, all gaps of a side together."""
    max_decode_p95_increase_ms: float | None = None
    """The same as a difference."""
    max_kv_pressure_p95_increase: float | None = 0.10
    """95th percentile of kv_used / kv_total, candidate's less the baseline's; beyond: hold."""
    min_candidate_routing_provenance_rate: float = 0.0
    """Part of the candidate's answers whose route and scheduler have to be known; below: hold."""
    min_candidate_streaming_trace_rate: float = 0.0
    """Part of the candidate's answers whose token times have to be known; below: hold."""
    min_join_rate: float = 0.0
    """Part of each side's records that have to be in a pair; below: hold."""
    min_comparable_rate: float = 0.0
    """Part of the healthy pairs whose answers have to be comparable; below: hold."""
    numeric_tolerances: tuple[Tolerance, ...] = ()
    """Rules for vectors: absolute, relative, and the model, backend and accelerator that they hold for."""
    segments: Literal["report", "enforce"] = "report"
    """Whether segments of at least min_pairs decide, too."""
    alpha: float = 0.05
    """In sequential mode: chance of a wrong rollback, and of a wrong promotion."""
    tolerance: float = 0.02
    """In sequential mode: regression from which drift is reported, as a part."""
    margin: float = 0.05
    """In sequential mode: regression from which there is a rollback, as a part; below it is promoted."""
    error_margin: float = 1.0
    """In sequential mode: increase of the error rate from which there is a rollback, in percentage points."""
    missing_margin: float = 1.0
    """In sequential mode: records that only the candidate lacks less those that only the baseline lacks, in percentage
    points; what is not certain to be below it is not promoted."""
    burst_pairs: int = 5
    """In sequential mode: failures may come in bursts of so many pairs, of which none may have been seen yet."""
    mismatch_margin: float = 0.0
    """In sequential mode: mismatches from which there is a rollback, in percentage points over those of an A/A leg; 0
    with deterministic engines: the first one."""
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Who looks after a signal, over the built-in hints."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise EvidenceError(f"policy: {name} is {value}; it has to be from {low:g} to {high:g}")
        if self.tolerance > self.margin:
            raise EvidenceError(f"policy: tolerance {self.tolerance:g} is above margin {self.margin:g}")
        if self.outputs is not None and self.outputs not in ("exact", "numeric", "ignore") and not self.agreement_field:
            raise EvidenceError(
                f"policy: outputs is {self.outputs!r}; it is exact, numeric, agreement(FIELD) or ignore"
            )

    @property
    def agreement_field(self) -> str:
        """The field that answers have to agree in; empty: another sameness counts."""
        text = self.outputs or ""
        return text[len(AGREEMENT) : -1].strip() if text.startswith(AGREEMENT) and text.endswith(")") else ""


_MOST = 1e9
_RANGES: Mapping[str, tuple[float, float]] = {
    "min_pairs": (1, _MOST),
    "max_mismatch_rate": (0, 1),
    "min_agreement": (0, 1),
    "max_logprob_gap": (0, _MOST),
    "max_error_rate_increase": (0, 100),
    "max_latency_p95_ratio": (0, _MOST),
    "max_latency_p95_increase_ms": (0, _MOST),
    "max_ttft_p95_ratio": (0, _MOST),
    "max_ttft_p95_increase_ms": (0, _MOST),
    "max_decode_p95_ratio": (0, _MOST),
    "max_decode_p95_increase_ms": (0, _MOST),
    "max_kv_pressure_p95_increase": (0, 1),
    "min_candidate_routing_provenance_rate": (0, 1),
    "min_candidate_streaming_trace_rate": (0, 1),
    "min_join_rate": (0, 1),
    "min_comparable_rate": (0, 1),
    "alpha": (1e-6, 0.5),
    "tolerance": (0, 10),
    "margin": (1e-6, 0.99),
    "error_margin": (0.01, 50),
    "missing_margin": (0.01, 50),
    "burst_pairs": (1, 10_000),
    "mismatch_margin": (0, 100),
}
FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Policy))


def policy_of(*layers: tuple[str, Mapping[str, Any] | None]) -> Policy:
    """A policy from what its sources say, later ones over earlier ones.

    Args:
        layers: what each is called in messages, and its fields.

    Raises:
        EvidenceError: a name or a value that no policy has.
    """
    values: dict[str, Any] = {}
    for place, layer in layers:
        if layer is None:
            continue
        if not isinstance(layer, Mapping):
            raise EvidenceError(f"{place}: the policy is no object of fields")
        for name in layer:
            if name not in FIELD_NAMES:
                question = did_you_mean(str(name), FIELD_NAMES) or f"there are {listed(FIELD_NAMES)}"
                raise EvidenceError(f"{place}: the policy has no field {name!r}; {question}")
        values |= layer
    try:
        return msgspec.convert(values, Policy)
    except msgspec.ValidationError as error:
        raise EvidenceError(f"{layers[-1][0] if layers else 'policy'}: the policy's {_plain(str(error))}") from None


def _plain(message: str) -> str:
    """msgspec's sentence with the field's name in front."""
    text, _, path = message.partition(" - at `$.")
    return f"{path.rstrip('`')}: {text}" if path else message


def with_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` texts as fields; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise EvidenceError(f"--set {text!r}: write FIELD=VALUE")
        found[name.strip()] = yaml.safe_load(value)
    return found


SEGMENTS_ARE_BY = tuple(SEGMENT_FIELDS)
