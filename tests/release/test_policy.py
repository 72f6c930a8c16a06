"""A policy has fields with names, ranges and descriptions; later sources override earlier ones; others are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EvidenceError
from lockstep.option_fields import field_docs, option_types
from lockstep.release.judging import PolicySources
from lockstep.release.policy import FIELD_NAMES, Layer, Policy, digest_of, parsed_settings, policy_of


def test_every_field_has_a_sentence_that_stands_alone() -> None:
    docs = field_docs(Policy)
    assert set(docs) == set(FIELD_NAMES)
    for name, sentence in docs.items():
        assert len(sentence) > 30, name
        assert not re.match(r"The same|Likewise|As above", sentence), name


def test_every_number_has_a_range_with_its_default() -> None:
    for name, type_ in option_types(Policy).items():
        if type_.kind in (int, float):
            assert type_.range.low is not None, name
            assert type_.range.high is not None, name
            assert type_.fits(getattr(Policy(), name)), name


def test_later_sources_override_earlier_ones() -> None:
    policy = policy_of(Layer("a", {"min_pairs": 5, "alpha": 0.1}), Layer("b", None), Layer("c", {"min_pairs": 7}))
    assert (policy.min_pairs, policy.alpha, policy.margin) == (7, 0.1, Policy().margin)


def test_rules_for_vectors_are_read() -> None:
    policy = policy_of(Layer("a", {"numeric_tolerances": [{"absolute": 0.1, "backend": "vllm"}]}))
    assert (policy.numeric_tolerances[0].absolute, policy.numeric_tolerances[0].backend) == (0.1, "vllm")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_pair": 5}, "there: the policy has no field 'min_pair'; did you mean 'min_pairs'?"),
        ({"zzz": 5}, "there: the policy has no field 'zzz'; the fields are mode, outputs"),
        ({"min_pairs": "many"}, "there: min_pairs is 'many'; it must be a whole number, 1 to 1,000,000,000"),
        ({"mode": "both"}, "there: mode is 'both'; it must be threshold or sequential"),
        ({"alpha": 0.7}, "there: alpha is 0.7; it must be a number, 1e-06 to 0.5"),
        ({"alpha": float("nan")}, "there: alpha is nan"),
        ({"margin": 0.01}, "policy: tolerance 0.02 is above margin 0.01"),
        ({"outputs": "same"}, "policy: outputs is 'same'; it must be exact, numeric, agreement(FIELD) or ignore"),
        ({"outputs": "agreement()"}, "policy: outputs is 'agreement()'"),
        ({"max_latency_p95_ratio": -1}, "there: max_latency_p95_ratio is -1"),
        (
            {"numeric_tolerances": [{"absolute": -1}]},
            "there: numeric_tolerances[0]: absolute and relative",
        ),
    ],
)
def test_an_invalid_policy_is_rejected_with_the_name_of_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=re.escape(message)):
        policy_of(Layer("there", fields))


def test_a_policy_that_is_not_an_object_is_refused() -> None:
    fields: Any = [1]
    with pytest.raises(EvidenceError, match="must be a mapping of fields"):
        policy_of(Layer("there", fields))


def test_settings_are_read_as_yaml() -> None:
    found = parsed_settings(
        ["min_pairs=5", "outputs = agreement(a.b)", "max_ttft_p95_ratio=null", "owners={errors: me}"]
    )
    assert found == {
        "min_pairs": 5,
        "outputs": "agreement(a.b)",
        "max_ttft_p95_ratio": None,
        "owners": {"errors": "me"},
    }
    assert policy_of(Layer("--set", found)).agreement_field == "a.b"


@pytest.mark.parametrize("text", ["min_pairs", "owners=[1"])
def test_invalid_settings_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(EvidenceError, match=re.escape(repr(text))):
        parsed_settings([text])


@pytest.mark.parametrize(
    ("outputs", "field"), [(None, ""), ("exact", ""), ("agreement(x)", "x"), ("agreement( a.b )", "a.b")]
)
def test_the_field_of_an_agreement_is_between_its_brackets(outputs: str | None, field: str) -> None:
    assert Policy(outputs=outputs).agreement_field == field


def test_the_digest_depends_on_all_fields() -> None:
    assert digest_of(Policy()) == digest_of(Policy())
    assert digest_of(Policy()) != digest_of(Policy(owners={"errors": "me"})) != digest_of(Policy(alpha=0.04))


def test_a_field_of_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for text, line in (("min_pairs: 5\nalpha: 7\n", 2), ("policy:\n  min_pairs: 5\n  alpha: 7\n", 3)):
        path.write_text(text)
        with pytest.raises(EvidenceError, match=rf"policy\.yaml, line {line}: alpha is 7; it must be a number"):
            PolicySources(path).policy()


def test_a_file_of_a_policy_is_a_map_in_yaml_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("")
    assert PolicySources(path).policy() == Policy()
    for text, fault in (
        ("[1]", "must be a mapping of fields"),
        ("a: b: c", "line 1: it is not YAML"),
        ("x: !!python/name:os ", "tag"),
    ):
        path.write_text(text)
        with pytest.raises(EvidenceError, match=fault):
            PolicySources(path).policy()
