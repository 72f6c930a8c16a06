"""Rules are read from their text, and an entry's answer leads to exactly the model that it names, or to nobody."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.cluster.dispatch import MAX_ANSWER_CHARS, NONE_OF_THESE, DispatchRule, parse_literal, parse_rule
from lockstep.errors import ConfigError
from tests.cluster.manifests import NAMES, SETS

IDS = ("billing", "technical", "legal")
BY_FIELD = parse_rule("router.output.intent -> specialists.{intent}")
TO_ONE = parse_rule("router.output.escalate -> specialists.legal")
LITERAL = parse_rule("router.output.intent -> specialists.{intent}", {"refund": "billing", "bug": "technical"})
FIELDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
WORDS = NAMES.filter(lambda word: word.lower() != NONE_OF_THESE)


def test_a_rule_names_entry_field_and_list() -> None:
    assert DispatchRule("router", "intent", "specialists") == BY_FIELD
    assert DispatchRule("router", "escalate", "specialists", "legal") == TO_ONE
    assert parse_rule("  a.b-1.output.x->s_1.{x} ") == DispatchRule("a.b-1", "x", "s_1")
    assert parse_rule("qwen2.5.output.x -> all.qwen2.5-3b") == DispatchRule("qwen2.5", "x", "all", "qwen2.5-3b")


@given(NAMES, FIELDS, SETS, st.none() | NAMES)
def test_a_rule_is_written_as_it_is_read(entry: str, field_name: str, set_: str, target: str | None) -> None:
    rule = DispatchRule(entry, field_name, set_, target)
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "router",
        "router.output.intent",
        "router.output.intent -> specialists",
        "router.output.intent => specialists.{intent}",
        "router.intent -> specialists.{intent}",
        "router.output. -> specialists.{}",
        "router.output.intent -> specialists.{intent} -> more",
        "router.output.intent -> specialists.{other}",
        "router.output.intent -> .{intent}",
        "router.output.intent -> spec ialists.{intent}",
        "röuter.output.intent -> specialists.{intent}",
        "a" * 100_000,
    ],
)
def test_invalid_rule_is_rejected_with_the_expected_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"<entry>\.output\.<field> -> <set>|write \{intent\}") as caught:
        parse_rule(text)
    assert len(str(caught.value)) < 400


def test_a_fixed_target_has_no_literal_map() -> None:
    with pytest.raises(ConfigError, match="always leads to 'legal'"):
        parse_rule("router.output.intent -> specialists.legal", {"a": "legal"})


@given(st.dictionaries(WORDS, NAMES, min_size=1, max_size=5))
def test_a_literal_map_in_one_line(literal: dict[str, str]) -> None:
    text = ", ".join(f"{value}={id_}" for value, id_ in literal.items())
    assert parse_literal(text) == literal


@pytest.mark.parametrize("text", ["", "a", "a=", "=a", "a=b,", "a=b, a=c", "a:b"])
def test_invalid_literal_map_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_literal(text)


def test_entry_constraint_contains_every_routable_word_and_none() -> None:
    assert BY_FIELD.constraint_words(IDS) == ("billing", "technical", "legal", "none")
    assert LITERAL.constraint_words(IDS) == ("refund", "bug", "legal", "none")
    assert TO_ONE.constraint_words(IDS) == ("legal", "none")
    assert BY_FIELD.constraint_words(()) == ("none",)
    swapped = parse_rule(str(BY_FIELD), {"billing": "technical"})
    assert swapped.constraint_words(IDS) == ("billing", "legal", "none"), "an id that means another is said once"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("billing", "billing"),
        (" Billing.\n", "Billing"),
        ('"billing"', "billing"),
        ("intent=billing", "billing"),
        ("Intent: billing", "billing"),
        ("intent = `billing`;", "billing"),
        ("\n\nbilling\nbecause of the refund", "billing"),
        ('{"intent": "billing", "why": [1]}', "billing"),
        ('{"intent": "billing"', None),
        ('{"intent": 7}', None),
        ('{"intent": " Billing.\\n"}', "Billing"),
        ('{"intent": "..."}', None),
        ('{"topic": "billing"}', None),
        ("{" * 5000, None),
        ('{"intent": ' + "[" * 5000, None),
        ("topic=billing", None),
        ("I think billing", None),
        ("", None),
        ("...", None),
        ("intent=", None),
    ],
)
def test_value_is_parsed_from_an_answer(answer: str, value: str | None) -> None:
    assert BY_FIELD.read(answer) == value


def test_of_a_long_answer_only_the_beginning_is_looked_at() -> None:
    assert BY_FIELD.read("\n" * (MAX_ANSWER_CHARS - len("legal")) + "legal") == "legal"
    assert BY_FIELD.read("\n" * MAX_ANSWER_CHARS + "legal") is None


@given(FIELDS, WORDS, st.sampled_from(["{word}", "{field}={word}", "{field}: {word}", " {word}\n", "json"]))
def test_decision_is_read_from_every_form_of_answer(field_name: str, word: str, form: str) -> None:
    rule = DispatchRule("router", field_name, "specialists")
    answer = json.dumps({field_name: word}) if form == "json" else form.format(field=field_name, word=word)
    assert rule.read(answer) == word


@given(st.lists(WORDS, unique=True, max_size=6), st.data())
def test_each_constraint_word_leads_to_a_known_model_and_none_leads_to_no_model(
    ids: list[str], data: st.DataObject
) -> None:
    literal = data.draw(st.dictionaries(WORDS, st.sampled_from(ids), max_size=4)) if ids else {}
    assume(all(key not in ids or key in literal.values() for key in literal))
    rule = DispatchRule("router", "intent", "specialists", None, literal)
    words = rule.constraint_words(ids)
    targets = [rule.target_of(rule.read(f"intent={word}"), ids) for word in words]
    assert targets[-1] is None
    assert words[-1] == NONE_OF_THESE
    assert len(set(words)) == len(words)
    assert set(targets[:-1]) == set(ids), "each model can be reached, and nothing else"
    for word, target in zip(words[:-1], targets[:-1], strict=True):
        assert target == literal.get(word, word)


@given(st.text(max_size=40), st.sampled_from([BY_FIELD, TO_ONE, LITERAL]))
def test_any_answer_leads_to_a_known_model_or_to_none(answer: str, rule: DispatchRule) -> None:
    assert rule.target_of(rule.read(answer), IDS) in (*IDS, None)


def test_unknown_values_lead_to_no_model_and_case_does_not_matter() -> None:
    assert BY_FIELD.target_of("sales", IDS) is None
    assert BY_FIELD.target_of(None, IDS) is None
    assert BY_FIELD.target_of("NONE", IDS) is None
    assert BY_FIELD.target_of("LEGAL", IDS) == "legal"
    assert BY_FIELD.target_of("a", ("A", "a")) == "a"
    assert BY_FIELD.target_of("É", ("é",)) == "é"
    assert BY_FIELD.target_of("ab", ("AB", "Ab")) is None, "two could be meant"
    assert LITERAL.target_of("Refund", IDS) == "billing"


def test_a_fixed_target_takes_every_value_but_none() -> None:
    assert TO_ONE.target_of("yes", IDS) == "legal"
    for value in ("none", "None", "NONE", None):
        assert TO_ONE.target_of(value, IDS) is None
    assert TO_ONE.target_of("yes", ("billing",)) is None
