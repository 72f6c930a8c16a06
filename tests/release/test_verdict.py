"""The bytes of a verdict depend only on its contents, by a schema that describes each member."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.option_fields import field_docs
from lockstep.release import joining, verdict
from lockstep.release.verdict import DIGITS, Decision, Verdict, rounded, to_json
from tests.release.judging import judged, with_tokens
from tests.surface.held import WRITE

SCHEMA = Path(__file__).parents[2] / "docs" / "verdict.schema.json"


def schema() -> dict[str, Any]:
    """JSON Schema of verdicts, with the description of each field."""
    found = msgspec.json.schema(Verdict)
    owners = {**vars(joining), **vars(verdict)}
    for name, part in found["$defs"].items():
        sentences = field_docs(owners[name])
        for field, member in part.get("properties", {}).items():
            member["description"] = sentences[field]
    return found


def test_the_schema_in_the_documentation_is_that_of_the_code() -> None:
    text = msgspec.json.format(msgspec.json.encode(schema(), order="sorted"), indent=2).decode() + "\n"
    if WRITE in os.environ:
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "`make surface` writes it"


def test_every_member_of_the_schema_has_a_description() -> None:
    for part in schema()["$defs"].values():
        for name, member in part.get("properties", {}).items():
            assert len(member["description"]) > 10, (part["title"], name)


@pytest.mark.parametrize("mode", ["threshold", "sequential"])
def test_verdicts_are_of_the_schema(tmp_path: Path, mode: str) -> None:
    candidate = with_tokens(120, latency_ms=lambda number: 130.0 + number % 3, token_ids=lambda number: [number % 50])
    verdict = judged(tmp_path, with_tokens(120, route_id="r", ttft_ms=5.0), candidate, mode=mode, segments="enforce")
    found = json.loads(to_json(verdict))
    assert found["signals"]
    assert bool(found["series"]) == (mode == "sequential")
    jsonschema.validate(found, {**schema(), "$schema": "https://json-schema.org/draft/2020-12/schema"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "decision": "perhaps"}, schema())


def test_decisions_have_the_documented_exit_codes() -> None:
    assert {each.value: each.exit_code for each in Decision} == {"promote": 0, "rollback": 1, "hold": 2}
    assert verdict.EXIT_BAD_INPUT == 3


plain = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3)
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=8)


@given(values)
def test_numbers_have_six_digits_and_nan_is_null(value: Any) -> None:
    found = rounded(value)
    assert rounded(found) == found
    json.dumps(found, allow_nan=False)
    if isinstance(value, float) and math.isfinite(value):
        assert found == pytest.approx(value, rel=10.0**-DIGITS * 5)
