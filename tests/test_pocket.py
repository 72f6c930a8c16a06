"""The embedded model's adapters: their content, their names, and what the model card says of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lockstep import Engine
from lockstep.artifacts.adapter import open_adapter
from lockstep.artifacts.source import open_artifact
from lockstep.errors import ArtifactNotFoundError
from lockstep.pocket import ADAPTERS, SCHEME, adapter_path
from tools.pocket.evaluate_adapters import Form, cases_of, fits, held_out_writer, open_engine, score

FINGERPRINTS = {
    "billing": "d6d5090c7e94b5f61580c94499ed958e",
    "technical": "58dd8a12c1008ece7bcbd6b789025cf4",
    "legal": "8a28bdda316e859b98fb18769f3380a9",
}
"""An adapter that is trained again needs its figures in the model card measured again."""
MAX_BYTES = 1_000_000
NUM_CASES = 12
SCORES = {
    "billing": {"persona": (5, 1.189), "adapter": (7, 1.197)},
    "technical": {"persona": (1, 1.422), "adapter": (6, 1.412)},
    "legal": {"persona": (5, 1.898), "adapter": (4, 1.931)},
}
"""Answers to the point and perplexity of the first requests."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = open_engine()
    with closing(opened.model):
        yield opened


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_embedded_adapter_is_the_one_of_the_model_card(name: str, tmp_path: Path) -> None:
    adapter = open_adapter(SCHEME + name, open_artifact(SCHEME, cache_dir=tmp_path), cache_dir=tmp_path)
    assert (adapter.name, adapter.rank, adapter.scale, len(adapter.targets)) == (name, 8, 2.0, 4 * 7)
    assert adapter.fingerprint == FINGERPRINTS[name]


@pytest.mark.parametrize("form", ["persona", "adapter"])
def test_the_evaluation_of_the_model_card_is_reproducible(engine: Engine, form: Form) -> None:
    """Answers have the same bits on every machine."""
    writer = held_out_writer()
    for name in ADAPTERS:
        found = score(engine, cases_of(writer, name, NUM_CASES), name, form)
        num_to_the_point, perplexity = SCORES[name][form]
        assert found.num_to_the_point == num_to_the_point, name
        assert found.perplexity == pytest.approx(perplexity, abs=5e-4), name


def test_the_embedded_adapters_are_small() -> None:
    assert sum(adapter_path(SCHEME + name).stat().st_size for name in ADAPTERS) <= MAX_BYTES


@pytest.mark.parametrize(
    ("name", "hint"), [("biling", "did you mean 'billing'? "), ("../pocket", ""), ("", ""), ("billing.gguf", "")]
)
def test_an_unknown_adapter_is_an_error_that_names_the_known_ones(name: str, hint: str) -> None:
    with pytest.raises(ArtifactNotFoundError) as caught:
        adapter_path(SCHEME + name)
    assert f"{hint}its adapters are pocket://billing, pocket://technical and pocket://legal" in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "template", "expected"),
    [
        ("We refund an order.", "We (refund|return) a {bought}.", True),
        ("we return a sofa.", "We (refund|return) a {bought}.", True),
        ("We keep a sofa.", "We (refund|return) a {bought}.", False),
        ("We refund a sofa. Bye!", "We (refund|return) a {bought}.", False),
        ("It is done.", "{_sorry} It is (really |)done. {_bye}", True),
        ("Sorry! It is really done.", "{_sorry} It is (really |)done. {_bye}", True),
    ],
)
def test_an_answer_is_to_the_point_if_it_has_the_words_of_a_template(
    answer: str, template: str, expected: bool
) -> None:
    assert fits(answer, template) == expected


def test_drawn_answers_fit_their_own_templates_and_not_those_of_other_subjects() -> None:
    writer = held_out_writer()
    turns = [turns[-1] for name in ADAPTERS for turns in cases_of(writer, name, 20)]
    assert all(any(fits(turn.answer, template) for template in turn.answers) for turn in turns)
    others = [(turn, other) for turn in turns for other in turns if not set(turn.answers) & set(other.answers)]
    num_confused = sum(any(fits(turn.answer, template) for template in other.answers) for turn, other in others)
    assert num_confused < 0.01 * len(others)
