"""Policy of a gate: which differences between baseline and candidate are allowed, and what follows from others.

"Outside" means strictly beyond a bound. Bounds that are None do not count. A policy is read from the input, from a YAML
or JSON file, and from ``--set``, later ones over earlier ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from lockstep.errors import ConfigError, EvidenceError
from lockstep.option_fields import Range, check_options, option_types
from lockstep.release.outputs import Tolerance
from lockstep.spelling import did_you_mean, listed

AGREEMENT = "agreement("
SHARE = Range(0, 1)
NOT_NEGATIVE = Range(0, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All fields, with their defaults."""

    mode: Literal["threshold", "sequential"] = "threshold"
    """threshold compares figures of all pairs with bounds; sequential keeps its error rates however often one looks."""
    outputs: str | None = None
    """Sameness of answers: exact, numeric, agreement(FIELD) or ignore. Default exact; it has to be set where the
    weights or the precisions of the sides are known and differ."""
    min_pairs: Annotated[int, Range(1, 1e9)] = 20
    """Matched pairs that a verdict needs; with fewer: hold. Segments with fewer do not decide."""
    segments: Literal["report", "enforce"] = "report"
    """Whether segments decide, too, or are reported only."""
    max_mismatch_rate: Annotated[float, SHARE] = 0.0
    """Part of the compared answers that may differ, 0 to 1; beyond: rollback."""
    min_agreement: Annotated[float, SHARE] = 0.99
    """With outputs agreement(FIELD): part of the compared answers that has to agree; below: rollback."""
    max_logprob_gap: Annotated[float | None, NOT_NEGATIVE] = None
    """Mean difference, in nats, of the log-probabilities that both sides give to the same tokens; beyond: rollback."""
    max_error_rate_increase: Annotated[float, Range(0, 100)] = 0.0
    """In threshold mode: candidate's error rate less the baseline's, in percentage points; beyond: rollback."""
    max_latency_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: candidate's 95th percentile of latency over the baseline's; beyond: hold."""
    max_latency_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: candidate's 95th percentile of latency less the baseline's, in ms; beyond: hold."""
    max_ttft_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: candidate's 95th percentile of the time to the first token over the baseline's; beyond:
    hold."""
    max_ttft_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: candidate's 95th percentile of the time to the first token less the baseline's, in ms; beyond:
    hold."""
    max_decode_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: candidate's 95th percentile of all gaps between tokens over the baseline's; beyond: hold."""
    max_decode_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: candidate's 95th percentile of all gaps between tokens less the baseline's, in ms; beyond:
    hold."""
    max_kv_pressure_p95_increase: Annotated[float | None, SHARE] = 0.10
    """Candidate's 95th percentile of kv_used / kv_total less the baseline's; beyond: hold."""
    min_candidate_routing_provenance_rate: Annotated[float, SHARE] = 0.0
    """Part of the candidate's answers whose route and scheduler have to be known; below: hold."""
    min_candidate_streaming_trace_rate: Annotated[float, SHARE] = 0.0
    """Part of the candidate's answers whose token times have to be known; below: hold."""
    min_join_rate: Annotated[float, SHARE] = 0.9
    """Part of the records of the larger side that has to be in pairs, retried ones left out; below: hold."""
    min_comparable_rate: Annotated[float, SHARE] = 0.9
    """Part of the healthy pairs whose answers have to be comparable; below: hold. It does not apply with outputs
    ignore, nor to answers neither of which has the field of agreement(FIELD)."""
    min_output_rate: Annotated[float, SHARE] = 1.0
    """Part of the successful answers in pairs, of both sides together, that has to carry output material (tokens,
    vector, text or fingerprint); below: hold. It does not apply with outputs ignore."""
    min_metric_rate: Annotated[float, SHARE] = 0.9
    """For latency, time to the first token, gaps between tokens and KV pressure, each: pairs in which both sides have
    the number, as a part of those in which one side has it; below: hold. It does not apply to what the baseline never
    has, nor in threshold mode to a metric whose bounds are all null."""
    required_series: tuple[Literal["latency", "ttft", "decode"], ...] = ("latency",)
    """In sequential mode: series without which nothing is promoted; an empty list requires none."""
    min_agreement_lower: Annotated[float | None, SHARE] = None
    """Lower confidence bound, at alpha, of the part of the compared answers that agree; below: hold. Sequential mode
    has the series of mismatches in addition."""
    max_output_length_change: Annotated[float | None, Range(0, 10)] = 0.2
    """Change of the mean number of output tokens of pairs, as a part and in either direction; beyond: hold."""
    numeric_tolerances: tuple[Tolerance, ...] = ()
    """Rules for vectors: absolute, relative, and the model, backend and accelerator that they hold for."""
    alpha: Annotated[float, Range(1e-6, 0.5)] = 0.05
    """In sequential mode: chance of a wrong rollback, and of a wrong promotion."""
    tolerance: Annotated[float, Range(0, 10)] = 0.02
    """In sequential mode: regression of latency, as a part, from which drift is reported."""
    margin: Annotated[float, Range(1e-6, 0.99)] = 0.05
    """In sequential mode: regression of the mean latency, time to the first token or gap between tokens, as a part,
    from which there is a rollback; what is certainly below is promoted."""
    tail_margin: Annotated[float, Range(0.01, 90)] = 5.0
    """In sequential mode: increase, in percentage points, of the answers beyond the baseline's 95th percentile of
    latency (of which the baseline has 5 %), from which there is a rollback."""
    error_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode: increase of the error rate, in percentage points, from which there is a rollback."""
    missing_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode: records that the candidate lacks less those that the baseline lacks, in percentage points;
    what is not certainly below is not promoted."""
    mismatch_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode, of engines that do not guarantee equal answers: mismatches beyond those of a second baseline,
    in percentage points, from which there is a rollback."""
    burst_pairs: Annotated[int, Range(1, 10_000)] = 5
    """In sequential mode: failures may come in bursts of so many pairs, of which none may have been seen yet."""
    warmup_pairs: Annotated[int, Range(0, 1_000_000)] = 500
    """In sequential mode: a warm-up or a slow spell may last for so many pairs. Times are not judged before; first
    pairs that are slower than the later ones are excluded; promotion takes five times as many."""
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Who looks after a signal, by patterns of its name or of name/segment; the last one that fits counts."""

    def __post_init__(self) -> None:
        check_options(self, lambda message: EvidenceError(f"policy: {message}"))
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


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Policy))


class Layer(NamedTuple):
    """Fields of a policy that one source sets."""

    name: str
    """What the source is called in messages."""
    fields: Mapping[str, Any] | None
    lines: Mapping[str, int] = {}
    """The line of each path, where it is a file."""

    def place(self, field: str) -> str:
        """The source of a field, with its line."""
        return f"{self.name}, line {self.lines[field]}" if field in self.lines else self.name


def policy_of(*layers: Layer) -> Policy:
    """A policy from what its sources set, later ones over earlier ones.

    Raises:
        EvidenceError: a name or a value that no policy has.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    types = option_types(Policy)
    for layer in layers:
        if layer.fields is None:
            continue
        if not isinstance(layer.fields, Mapping):
            raise EvidenceError(f"{layer.name}: the policy is no object of fields")
        for name, value in layer.fields.items():
            place = layer.place(name)
            if name not in types:
                question = did_you_mean(str(name), FIELD_NAMES) or f"there are {listed(FIELD_NAMES)}"
                raise EvidenceError(f"{place}: the policy has no field {name!r}; {question}")
            if not types[name].fits(value):
                hint = did_you_mean(str(value), types[name].words)
                right = f"{types[name].right(value)}{hint and '; '}{hint}"
                raise EvidenceError(f"{place}: {name} is {value!r}; it must be {right}")
            values[name], places[name] = value, place
    try:
        return msgspec.convert(values, Policy)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.partition("`")[0]
        place = places.get(re.split(r"[.\[]", field)[0], "policy")
        raise EvidenceError(f"{place}: {field}: {text}" if field else f"{place}: {text}") from None


def with_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` texts as fields; values are read as YAML."""
    from lockstep.yaml_reading import read_plain

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise EvidenceError(f"--set {text!r}: write FIELD=VALUE")
        try:
            found[name.strip()] = read_plain(value, "")[0]
        except ConfigError:
            raise EvidenceError(f"--set {text!r}: {value!r} is no value; quote it as in YAML") from None
    return found
