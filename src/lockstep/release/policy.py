"""Policy of a gate: which differences between baseline and candidate are borne, and what follows from others.

"Outside" means strictly beyond a bound. Bounds that are None do not count. A policy is read from the input, from a YAML
or JSON file, and from ``--set``, later ones over earlier ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from lockstep.errors import EvidenceError
from lockstep.release.outputs import Tolerance
from lockstep.spelling import did_you_mean, listed

AGREEMENT = "agreement("


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All fields, with their defaults."""

    mode: Literal["threshold", "sequential"] = "threshold"
    """threshold compares figures of all pairs with bounds; sequential keeps its error rates however often one looks."""
    outputs: str | None = None
    """Sameness of answers: exact, numeric, agreement(FIELD) or ignore. Default exact; it has to be set where the
    weights or the precisions of the sides are known and differ."""
    min_pairs: int = 20
    """Matched pairs that a verdict needs; with fewer: hold. Segments with fewer do not decide."""
    segments: Literal["report", "enforce"] = "report"
    """Whether segments decide, too, or are reported only."""
    max_mismatch_rate: float = 0.0
    """Part of the compared answers that may differ, 0 to 1; beyond: rollback."""
    min_agreement: float = 0.99
    """With outputs agreement(FIELD): part of the compared answers that has to agree; below: rollback."""
    max_logprob_gap: float | None = None
    """Mean difference, in nats, of the log-probabilities that both sides give to the same tokens; beyond: rollback."""
    max_error_rate_increase: float = 0.0
    """In threshold mode: candidate's error rate less the baseline's, in percentage points; beyond: rollback."""
    max_latency_p95_ratio: float | None = 1.10
    """In threshold mode: candidate's 95th percentile of latency over the baseline's; beyond: hold."""
    max_latency_p95_increase_ms: float | None = None
    """In threshold mode: candidate's 95th percentile of latency less the baseline's, in ms; beyond: hold."""
    max_ttft_p95_ratio: float | None = 1.10
    """In threshold mode: candidate's 95th percentile of the time to the first token over the baseline's; beyond:
    hold."""
    max_ttft_p95_increase_ms: float | None = None
    """In threshold mode: candidate's 95th percentile of the time to the first token less the baseline's, in ms; beyond:
    hold."""
    max_decode_p95_ratio: float | None = 1.10
    """In threshold mode: candidate's 95th percentile of all gaps between tokens over the baseline's; beyond: hold."""
    max_decode_p95_increase_ms: float | None = None
    """In threshold mode: candidate's 95th percentile of all gaps between tokens less the baseline's, in ms; beyond:
    hold."""
    max_kv_pressure_p95_increase: float | None = 0.10
    """Candidate's 95th percentile of kv_used / kv_total less the baseline's; beyond: hold."""
    min_candidate_routing_provenance_rate: float = 0.0
    """Part of the candidate's answers whose route and scheduler have to be known; below: hold."""
    min_candidate_streaming_trace_rate: float = 0.0
    """Part of the candidate's answers whose token times have to be known; below: hold."""
    min_join_rate: float = 0.9
    """Part of the records of the larger side that has to be in pairs, retried ones left out; below: hold."""
    min_comparable_rate: float = 0.9
    """Part of the healthy pairs whose answers have to be comparable; below: hold. It does not apply with outputs
    ignore, nor to answers neither of which has the field of agreement(FIELD)."""
    min_output_rate: float = 1.0
    """Part of the successful answers in pairs, of both sides together, that has to carry output material (tokens,
    vector, text or fingerprint); below: hold. It does not apply with outputs ignore."""
    min_metric_rate: float = 0.9
    """For latency, time to the first token, gaps between tokens and KV pressure, each: pairs in which both sides have
    the number, as a part of those in which one side has it; below: hold. It does not apply to what the baseline never
    has, nor in threshold mode to a metric whose bounds are all null."""
    required_series: tuple[Literal["latency", "ttft", "decode"], ...] = ("latency",)
    """In sequential mode: series without which nothing is promoted; an empty list requires none."""
    min_agreement_lower: float | None = None
    """Lower confidence bound, at alpha, of the part of the compared answers that agree; below: hold. Sequential mode
    has the series of mismatches in addition."""
    max_output_length_change: float | None = 0.2
    """Change of the mean number of output tokens of pairs, as a part and in either direction; beyond: hold."""
    numeric_tolerances: tuple[Tolerance, ...] = ()
    """Rules for vectors: absolute, relative, and the model, backend and accelerator that they hold for."""
    alpha: float = 0.05
    """In sequential mode: chance of a wrong rollback, and of a wrong promotion."""
    tolerance: float = 0.02
    """In sequential mode: regression of latency, as a part, from which drift is reported."""
    margin: float = 0.05
    """In sequential mode: regression of the mean latency, time to the first token or gap between tokens, as a part,
    from which there is a rollback; what is certainly below is promoted."""
    tail_margin: float = 5.0
    """In sequential mode: increase, in percentage points, of the answers beyond the baseline's 95th percentile of
    latency (of which the baseline has 5 %), from which there is a rollback."""
    error_margin: float = 1.0
    """In sequential mode: increase of the error rate, in percentage points, from which there is a rollback."""
    missing_margin: float = 1.0
    """In sequential mode: records that the candidate lacks less those that the baseline lacks, in percentage points;
    what is not certainly below is not promoted."""
    mismatch_margin: float = 1.0
    """In sequential mode, of engines that do not promise equal answers: mismatches beyond those of a second baseline,
    in percentage points, from which there is a rollback."""
    burst_pairs: int = 5
    """In sequential mode: failures may come in bursts of so many pairs, of which none may have been seen yet."""
    warmup_pairs: int = 500
    """In sequential mode: a warm-up or a slow spell may last for so many pairs. Times are not judged before; first
    pairs that are slower than the later ones are excluded; promotion takes five times as many."""
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Who looks after a signal, by patterns of its name or of name/segment; the last one that fits counts."""

    def __post_init__(self) -> None:
        for (low, high), names in _RANGES.items():
            for name in names:
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
    def compares_vectors(self) -> bool:
        """True if vectors decide where both answers have one, whatever else they hold."""
        return self.outputs == "numeric"

    @property
    def agreement_field(self) -> str:
        """The field that answers have to agree in; empty: another sameness counts."""
        text = self.outputs or ""
        return text[len(AGREEMENT) : -1].strip() if text.startswith(AGREEMENT) and text.endswith(")") else ""


def digest_of(policy: Policy) -> str:
    """Digest of all fields, 16 hex digits."""
    return hashlib.sha256(msgspec.json.encode(policy, order="sorted")).hexdigest()[:16]


_MOST = 1e9
_RANGES: Mapping[tuple[float, float], tuple[str, ...]] = {
    (0, _MOST): (
        "max_logprob_gap",
        *(f"max_{each}_p95_ratio" for each in ("latency", "ttft", "decode")),
        *(f"max_{each}_p95_increase_ms" for each in ("latency", "ttft", "decode")),
    ),
    (0, 1): (
        *("max_mismatch_rate", "min_agreement", "max_kv_pressure_p95_increase", "min_join_rate", "min_comparable_rate"),
        *("min_output_rate", "min_metric_rate", "min_agreement_lower"),
        *("min_candidate_routing_provenance_rate", "min_candidate_streaming_trace_rate"),
    ),
    (0.01, 50): ("error_margin", "missing_margin", "mismatch_margin"),
    (0, 100): ("max_error_rate_increase",),
    (0, 10): ("tolerance", "max_output_length_change"),
    (1e-6, 0.99): ("margin",),
    (1e-6, 0.5): ("alpha",),
    (0.01, 90): ("tail_margin",),
    (1, _MOST): ("min_pairs",),
    (1, 10_000): ("burst_pairs",),
    (0, 1_000_000): ("warmup_pairs",),
}
"""Least and most, and the fields that have to be between."""
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
    name = path.rstrip("`")
    if choices := [str(each) for each in get_args(get_type_hints(Policy).get(name)) if isinstance(each, str)]:
        text = f"{text}; it is {' or '.join(choices)}"
    return f"{name}: {text}" if path else message


def with_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` texts as fields; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise EvidenceError(f"--set {text!r}: write FIELD=VALUE")
        try:
            found[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise EvidenceError(f"--set {text!r}: {value!r} is no value; quote it as in YAML") from None
    return found
