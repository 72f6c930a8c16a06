"""Fields of answers are found in any formatting, and equal values give equal texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.release.agreement import MAX_TEXT, field_of
from lockstep.release.verdict import Decision
from tests.release.judging import judged, named, signal, with_tokens

CALL = {"name": "route", "arguments": {"id": 3, "why": "late"}}
plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
names = st.text("abc", min_size=1, max_size=3)
values = st.recursive(
    plain | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)


@given(values)
def test_a_field_is_equal_with_other_fields_and_spacing(value: Any) -> None:
    compact = json.dumps({"x": value, "y": 1})
    spaced = json.dumps({"y": 2, "x": value}, indent=3, ensure_ascii=False)
    fenced = f"Here it is:\n```json\n{spaced}\n```\nAnything else?"
    assert field_of(compact, "x") == field_of(spaced, "x") == field_of(fenced, "x") is not None


@given(values, values)
def test_different_values_give_different_texts(one: Any, other: Any) -> None:
    texts = [field_of(json.dumps({"x": each}), "x") for each in (one, other)]
    assert (texts[0] == texts[1]) == (_distinguishable(one) == _distinguishable(other))


def _distinguishable(value: Any) -> Any:
    """Value in which true differs from 1, and 1.0 does not."""
    if isinstance(value, dict):
        return {name: _distinguishable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_distinguishable(each) for each in value]
    return (type(value).__name__, value) if isinstance(value, bool | str) else value


@pytest.mark.parametrize(
    ("text", "path", "found"),
    [
        ('{"a": {"b": [1.0, 2]}}', "a.b.1", "2"),
        ('{"a": {"b": [1.0, 2]}}', "a.b", "[1,2]"),
        ('[{"n": "x"}]', "0.n", '"x"'),
        ('{"a": "{\\"b\\": 5}"}', "a.b", "5"),
        ('{"a": 1}', "b", None),
        ('{"a": 1}', "a.b", None),
        ('{"a": [1]}', "a.1", None),
        ("no JSON", "a", None),
        ("", "a", None),
        ('{"a": NaN}', "a", None),
        ("```\n1\n```\n```\n2\n```", "a", None),
        ("[" * 100_000, "a", None),
    ],
)
def test_paths_traverse_objects_lists_and_texts(text: str, path: str, found: str | None) -> None:
    assert field_of(text, path) == found


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CALL),
        json.dumps([CALL]),
        json.dumps({"tool_calls": [{"id": "1", "type": "function", "function": CALL}]}),
        json.dumps({"function": {"name": "route", "arguments": json.dumps(CALL["arguments"])}}),
        json.dumps({"name": "route", "parameters": {"why": "late", "id": 3.0}}),
        f"<tool_call>\n{json.dumps(CALL, indent=2)}\n</tool_call>",
    ],
)
def test_a_tool_call_is_equal_in_any_format(text: str) -> None:
    assert field_of(text, "tool_call") == '[["route",{"id":3,"why":"late"}]]'


def test_calls_are_distinguished_by_number_order_name_and_arguments() -> None:
    other = {"name": "route", "arguments": {"id": 4}}
    texts = [
        json.dumps(calls)
        for calls in ([CALL], [other], [CALL, other], [other, CALL], [{**CALL, "name": "send"}], [{"name": "route"}])
    ]
    found = [field_of(text, "tool_call") for text in texts]
    assert len(set(found)) == len(found)
    blocks = "".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in (CALL, other))
    assert field_of(blocks, "tool_call") == found[2]


@pytest.mark.parametrize("text", ['{"a": 1}', '[{"name": 3}]', "<tool_call>no</tool_call>", '["route"]'])
def test_texts_without_a_call_have_none(text: str) -> None:
    assert field_of(text, "tool_call") is None


def test_endless_texts_are_not_read() -> None:
    text = '{"x": "' + "a" * MAX_TEXT + '"}'
    assert field_of(text, "x") is None


def test_an_answer_in_another_environment_agrees_but_one_to_another_prompt_is_incomparable(tmp_path: Path) -> None:
    def side(environment: str, prompt: str) -> Any:
        digest: Any = {"prompt_digest": lambda number: prompt if number < 4 else "same"}
        return with_tokens(30, text='{"x": 1}', environment=environment, **digest)

    verdict = judged(tmp_path, side("int8", "a"), side("bf16", "b"), outputs="agreement(x)")
    assert (verdict.summary.same, verdict.summary.incomparable) == (26, 4)
    assert "4 pairs were not compared: unlike prompt" in verdict.notes


def test_disagreement_is_judged_at_any_look(tmp_path: Path) -> None:
    def text(every: int) -> Any:
        return lambda number: f'{{"x": {0 if number % every == 0 else 1}}}'

    baseline = with_tokens(1_500, text='{"x": 1}')
    policy = {"mode": "sequential", "outputs": "agreement(x)", "min_agreement": 0.9}
    worse = judged(tmp_path, baseline, with_tokens(1_500, text=text(4)), policy=policy)
    assert named(worse) == {"agreement": "rollback"}
    assert signal(worse, "agreement").value == pytest.approx(25.0)
    near = judged(tmp_path, baseline, with_tokens(1_500, text=text(50)), policy=policy)
    [series] = [each for each in near.series if each.signal == "agreement"]
    assert series.state == "within"
    assert near.agreement is not None
    assert near.agreement.rate == pytest.approx(0.98)
    assert 0.9 < near.agreement.lower < 0.98
    strict = {**policy, "min_agreement": 1.0}
    assert judged(tmp_path, baseline, with_tokens(1_500, text=text(1_000)), policy=strict).decision is Decision.ROLLBACK
