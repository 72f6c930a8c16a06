"""Policy of the gate: defines the allowed differences between baseline and candidate, and the decision for others.

A figure is outside policy if it is strictly beyond a bound. Bounds that are None are not checked. A policy is read from
the input file, from a YAML or JSON file, and from ``--set``. Later sources override earlier ones.
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
    """All fields of a policy with their defaults."""

    mode: Literal["threshold", "sequential"] = "threshold"
    """threshold compares figures of all pairs with bounds; sequential keeps its error rates for any number of looks."""
    outputs: str | None = None
    """Comparison of answers: exact, numeric, agreement(FIELD) or ignore. The default is exact. It must be set if the
    weights or the precisions of both sides are known and differ."""
    min_pairs: Annotated[int, Range(1, 1e9)] = 20
    """Minimum number of matched pairs; fewer cause a hold. Segments with fewer pairs do not decide."""
    segments: Literal["report", "enforce"] = "report"
    """Whether segments are only reported, or also decide."""
    max_mismatch_rate: Annotated[float, SHARE] = 0.0
    """Maximum fraction of the compared answers that differ (0 to 1); more causes a rollback."""
    min_agreement: Annotated[float, SHARE] = 0.99
    """With outputs agreement(FIELD): minimum fraction of the compared answers that agree; less causes a rollback."""
    max_logprob_gap: Annotated[float | None, NOT_NEGATIVE] = None
    """Maximum mean difference between both sides' log-probabilities of the same tokens, in nats; more causes a
    rollback."""
    max_error_rate_increase: Annotated[float, Range(0, 100)] = 0.0
    """In threshold mode: maximum increase of the error rate, in percentage points; more causes a rollback."""
    max_latency_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: maximum ratio of the 95th percentiles of latency, candidate to baseline; more causes a
    hold."""
    max_latency_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: maximum increase of the 95th percentile of latency, in ms; more causes a hold."""
    max_ttft_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: maximum ratio of the 95th percentiles of the time to the first token, candidate to baseline;
    more causes a hold."""
    max_ttft_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: maximum increase of the 95th percentile of the time to the first token, in ms; more causes a
    hold."""
    max_decode_p95_ratio: Annotated[float | None, NOT_NEGATIVE] = 1.10
    """In threshold mode: maximum ratio of the 95th percentiles of all gaps between tokens, candidate to baseline; more
    causes a hold."""
    max_decode_p95_increase_ms: Annotated[float | None, NOT_NEGATIVE] = None
    """In threshold mode: maximum increase of the 95th percentile of all gaps between tokens, in ms; more causes a
    hold."""
    max_kv_pressure_p95_increase: Annotated[float | None, SHARE] = 0.10
    """Maximum increase of the 95th percentile of kv_used / kv_total; more causes a hold."""
    min_candidate_routing_provenance_rate: Annotated[float, SHARE] = 0.0
    """Minimum fraction of the candidate's answers with known route and scheduler; less causes a hold."""
    min_candidate_streaming_trace_rate: Annotated[float, SHARE] = 0.0
    """Minimum fraction of the candidate's answers with known token times; less causes a hold."""
    min_join_rate: Annotated[float, SHARE] = 0.9
    """Minimum fraction of the larger side's records that are in pairs, without retried records; less causes a hold."""
    min_comparable_rate: Annotated[float, SHARE] = 0.9
    """Minimum fraction of the healthy pairs with comparable answers; less causes a hold. Not applied with outputs
    ignore, nor to pairs in which neither answer has the field of agreement(FIELD)."""
    min_output_rate: Annotated[float, SHARE] = 1.0
    """Minimum fraction of both sides' successful answers in pairs that contain output (tokens, vector, text or
    fingerprint); less causes a hold. Not applied with outputs ignore."""
    min_metric_rate: Annotated[float, SHARE] = 0.9
    """For each of latency, time to the first token, gaps between tokens and KV pressure: minimum fraction of the pairs
    with a value that have values of both sides; less causes a hold. Not applied to metrics that the baseline never has,
    nor in threshold mode to metrics whose bounds are all null."""
    required_series: tuple[Literal["latency", "ttft", "decode"], ...] = ("latency",)
    """In sequential mode: series that a promotion requires; an empty list requires none."""
    min_agreement_lower: Annotated[float | None, SHARE] = None
    """Minimum of the lower confidence bound, at alpha, of the fraction of compared answers that agree; less causes a
    hold. In sequential mode it applies in addition to the series of mismatches."""
    max_output_length_change: Annotated[float | None, Range(0, 10)] = 0.2
    """Maximum relative change of the mean number of output tokens, in either direction; more causes a hold."""
    numeric_tolerances: tuple[Tolerance, ...] = ()
    """Rules for vectors: absolute and relative tolerance, and the model, backend and accelerator to which they
    apply."""
    alpha: Annotated[float, Range(1e-6, 0.5)] = 0.05
    """In sequential mode: maximum probability of a wrong rollback, and of a wrong promotion."""
    tolerance: Annotated[float, Range(0, 10)] = 0.02
    """In sequential mode: relative regression of latency above which drift is reported."""
    margin: Annotated[float, Range(1e-6, 0.99)] = 0.05
    """In sequential mode: maximum relative regression of the mean latency, time to the first token or gap between
    tokens. A certainly larger one causes a rollback; a promotion needs a certainly smaller one."""
    tail_margin: Annotated[float, Range(0.01, 90)] = 5.0
    """In sequential mode: maximum increase of the fraction of answers beyond the baseline's 95th percentile of latency
    (5 % of the baseline's answers), in percentage points; more causes a rollback."""
    error_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode: maximum increase of the error rate, in percentage points; more causes a rollback."""
    missing_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode: maximum rate of records that only the candidate lacks minus those that only the baseline
    lacks, in percentage points. A promotion needs a certainly smaller rate."""
    mismatch_margin: Annotated[float, Range(0.01, 50)] = 1.0
    """In sequential mode, for engines that do not guarantee equal answers: maximum increase of the mismatch rate over
    that of a second baseline, in percentage points; more causes a rollback."""
    burst_pairs: Annotated[int, Range(1, 10_000)] = 5
    """In sequential mode: assumed maximum length of a burst of failures, in pairs, even if no burst was seen yet."""
    warmup_pairs: Annotated[int, Range(0, 1_000_000)] = 500
    """In sequential mode: assumed maximum length of a warm-up or a slow period, in pairs. Times are not judged earlier.
    First pairs that are slower than the later ones are excluded. A promotion takes at least five times as many
    pairs."""
    owners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Owners of signals by patterns of the signal's name or of name/segment; the last matching pattern counts."""

    def __post_init__(self) -> None:
        check_options(self, lambda message: EvidenceError(f"policy: {message}"))
        if self.tolerance > self.margin:
            raise EvidenceError(f"policy: tolerance {self.tolerance:g} is above margin {self.margin:g}")
        if self.outputs is not None and self.outputs not in ("exact", "numeric", "ignore") and not self.agreement_field:
            raise EvidenceError(
                f"policy: outputs is {self.outputs!r}; it must be exact, numeric, agreement(FIELD) or ignore"
            )

    @property
    def compares_vectors(self) -> bool:
        """True if vectors are compared whenever both answers have one, even if they also have tokens."""
        return self.outputs == "numeric"

    @property
    def agreement_field(self) -> str:
        """Field of the answers that is compared; empty if outputs is not agreement(FIELD)."""
        text = self.outputs or ""
        return text[len(AGREEMENT) : -1].strip() if text.startswith(AGREEMENT) and text.endswith(")") else ""


def digest_of(policy: Policy) -> str:
    """Digest of all fields, with 16 hex digits."""
    return hashlib.sha256(msgspec.json.encode(policy, order="sorted")).hexdigest()[:16]


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Policy))


class Layer(NamedTuple):
    """Fields of a policy from one source."""

    name: str
    """Name of the source in messages."""
    fields: Mapping[str, Any] | None
    lines: Mapping[str, int] = {}
    """Line of each field, if the source is a file."""

    def location(self, field: str) -> str:
        """Name of the source, with the line of a field."""
        return f"{self.name}, line {self.lines[field]}" if field in self.lines else self.name


def policy_of(*layers: Layer) -> Policy:
    """Policy from several sources. Later sources override earlier ones.

    Raises:
        EvidenceError: a source has an unknown field or an invalid value.
    """
    values: dict[str, Any] = {}
    locations: dict[str, str] = {}
    types = option_types(Policy)
    for layer in layers:
        if layer.fields is None:
            continue
        if not isinstance(layer.fields, Mapping):
            raise EvidenceError(f"{layer.name}: the policy must be a mapping of fields")
        for name, value in layer.fields.items():
            location = layer.location(name)
            if name not in types:
                question = did_you_mean(str(name), FIELD_NAMES) or f"the fields are {listed(FIELD_NAMES)}"
                raise EvidenceError(f"{location}: the policy has no field {name!r}; {question}")
            if not types[name].fits(value):
                hint = did_you_mean(str(value), types[name].words)
                right = f"{types[name].right(value)}{hint and '; '}{hint}"
                raise EvidenceError(f"{location}: {name} is {value!r}; it must be {right}")
            values[name], locations[name] = value, location
    try:
        return msgspec.convert(values, Policy)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        field = path.partition("`")[0]
        location = locations.get(re.split(r"[.\[]", field)[0], "policy")
        raise EvidenceError(f"{location}: {field}: {text}" if field else f"{location}: {text}") from None


def parsed_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Fields from ``FIELD=VALUE`` texts. Values are parsed as YAML."""
    from lockstep.yaml_reading import read_plain

    found: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise EvidenceError(f"--set {text!r}: write FIELD=VALUE")
        try:
            found[name.strip()] = read_plain(value, "")[0]
        except ConfigError:
            raise EvidenceError(f"--set {text!r}: {value!r} is not a valid YAML value; quote it") from None
    return found
