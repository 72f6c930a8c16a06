"""Vectors and scores are those of sentence-transformers: files, tokens, prompts, truncation, pooling and layers.

tools/golden/sentence_transformers.py made the golden values. The largest differences that were seen:

- vectors of float weights: a cosine distance of 7e-7, and 8e-4 in the elements of a vector that is not normalized
- scores of float weights: 4e-4 of classifiers, and 2e-4 of the reranker that answers; keys and values in f16 cause most
- with ``--quantize int8``: a distance of 2.8e-3, and 1.7e-2 of scores; with matrices in Q8_0: a distance of 2.0e-4
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import LLM, LoadOptions
from lockstep.errors import InvalidParameterError, PromptTooLongError
from lockstep.executors.options import ExecutorOptions
from tools.golden.vector_cases import (
    CLASSIFIERS,
    EMBEDDERS,
    INSTRUCTION,
    MAX_ANSWER_TOKENS,
    MESSAGES_TEMPLATE,
    NUM_SHORT_PAIRS,
    PAIR_TEMPLATE,
    PAIRS,
    PROMPTED,
    TEXTS,
    distances,
    write_case,
    write_case_gguf,
    write_reranker,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "sentence_transformers.npz"
MAX_DISTANCE = 1e-4
MAX_SCORE_DIFFERENCE = 1e-3
QUANTISED_DISTANCE = 6e-3
QUANTISED_SCORE_DIFFERENCE = 3e-2
INT8 = LoadOptions(executor=ExecutorOptions(quantize="int8"))
SOME = [TEXTS[index] for index in PROMPTED]
INSTRUCTIONS = (None, "Find complaints about payments")


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(GOLDEN)


def scores_of(llm: LLM, **options: Any) -> Any:
    options = {"truncate_prompt_tokens": -1, **options}
    return np.array([llm.score(query, [document], **options)[0] for query, document in PAIRS])


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(name: str, golden: Any, tmp_path: Path) -> None:
    case = EMBEDDERS[name]
    with LLM(str(write_case(tmp_path / name, case))) as llm:
        assert llm.model.task == "embed"
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        assert distances(found, golden[f"embed.{name}"]).max() <= MAX_DISTANCE
        raw = llm.embed(TEXTS, truncate_prompt_tokens=-1, normalize=case.normalizes)
        assert np.abs(raw - golden[f"embed.{name}"]).max() <= 1e-3
        for prompt in case.prompts:
            found = llm.embed(SOME, prompt_name=prompt, truncate_prompt_tokens=-1)
            assert distances(found, golden[f"embed.{name}.{prompt}"]).max() <= MAX_DISTANCE, prompt
        if case.default_prompt is not None:
            found = llm.embed(SOME, prompt_name="", truncate_prompt_tokens=-1)
            assert distances(found, golden[f"embed.{name}.none"]).max() <= MAX_DISTANCE
        with pytest.raises(PromptTooLongError):
            llm.embed(TEXTS[-1])


@pytest.mark.parametrize("name", EMBEDDERS)
def test_cosines_have_the_prompts_of_queries_and_documents(name: str, golden: Any, tmp_path: Path) -> None:
    case = EMBEDDERS[name]
    expected = golden[f"embed.{name}.cosines"]
    with LLM(str(write_case(tmp_path / name, case))) as llm:
        assert np.abs(scores_of(llm) - expected).max() <= MAX_SCORE_DIFFERENCE
        texts = [each for pair in PAIRS for each in pair]
        vectors = llm.embed(texts, truncate_prompt_tokens=-1).astype(np.float64)
    by_default_prompt = (vectors[::2] * vectors[1::2]).sum(1)
    has_others = bool(case.prompts.get("query") or case.default_prompt)
    assert (np.abs(by_default_prompt - expected).max() > 10 * MAX_SCORE_DIFFERENCE) == has_others


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_are_those_of_a_cross_encoder(name: str, golden: Any, tmp_path: Path) -> None:
    with LLM(str(write_case(tmp_path / name, CLASSIFIERS[name]))) as llm:
        assert llm.model.task == "rerank"
        assert np.abs(scores_of(llm) - golden[f"score.{name}"]).max() <= MAX_SCORE_DIFFERENCE
        with pytest.raises(PromptTooLongError):
            llm.score(*PAIRS[4][:1], [PAIRS[4][1]])


@pytest.mark.parametrize("is_published", [True, False])
def test_answers_are_those_to_the_prompt_of_the_model_card(is_published: bool, golden: Any, tmp_path: Path) -> None:
    template = MESSAGES_TEMPLATE if is_published else PAIR_TEMPLATE
    path = write_reranker(tmp_path / "reranker", template, has_modules=not is_published)
    with LLM(str(path), LoadOptions(task="rerank" if is_published else None)) as llm:
        pairs = PAIRS[: NUM_SHORT_PAIRS + 1]
        for index, instruction in enumerate(INSTRUCTIONS):
            expected = 1 / (1 + np.exp(-golden[f"answer.{index}"].astype(np.float64)))
            found = [
                llm.score(query, [document], instruction=instruction, truncate_prompt_tokens=MAX_ANSWER_TOKENS)[0]
                for query, document in pairs
            ]
            assert np.abs(found - expected).max() <= MAX_SCORE_DIFFERENCE
        assert llm.score(*short(0), instruction=INSTRUCTION) == llm.score(*short(0))
        assert llm.score(*short(4)) != [found[4]]
        with pytest.raises(InvalidParameterError, match="it must be more than"):
            llm.score(*short(4), truncate_prompt_tokens=30)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_quantised_vectors_are_within_the_stated_distance(name: str, golden: Any, tmp_path: Path) -> None:
    with LLM(str(write_case(tmp_path / name, EMBEDDERS[name])), INT8) as llm:
        found = llm.embed(TEXTS, truncate_prompt_tokens=-1)
    assert MAX_DISTANCE < distances(found, golden[f"embed.{name}"]).max() <= QUANTISED_DISTANCE


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_quantised_scores_are_within_the_stated_difference(name: str, golden: Any, tmp_path: Path) -> None:
    with LLM(str(write_case(tmp_path / name, CLASSIFIERS[name])), INT8) as llm:
        assert np.abs(scores_of(llm) - golden[f"score.{name}"]).max() <= QUANTISED_SCORE_DIFFERENCE


@pytest.mark.parametrize(("encoding", "bound"), [("F32", MAX_DISTANCE), ("Q8_0", QUANTISED_DISTANCE)])
def test_a_gguf_file_gives_the_same_vectors(encoding: str, bound: float, golden: Any, tmp_path: Path) -> None:
    """It has no limit of its own, so that the request states that of the directory."""
    most = EMBEDDERS["bert-mean"].max_seq_length
    with LLM(str(write_case_gguf(tmp_path / "model.gguf", encoding))) as llm:
        assert llm.model.task == "embed"
        found = llm.embed(TEXTS, truncate_prompt_tokens=most)
    assert distances(found, golden["embed.bert-mean"]).max() <= bound


def test_another_prompt_and_another_cut_would_be_seen(golden: Any, tmp_path: Path) -> None:
    for name, case in EMBEDDERS.items():
        plain = golden[f"embed.{name}"][list(PROMPTED)]
        for prompt in case.prompts:
            is_same = prompt == case.default_prompt or not case.prompts[prompt]
            differences = distances(plain, golden[f"embed.{name}.{prompt}"])
            assert (differences.max() <= MAX_DISTANCE) if is_same else (differences.min() > 10 * MAX_DISTANCE)
    case = EMBEDDERS["bert-cls"]
    assert case.max_seq_length is not None
    with LLM(str(write_case(tmp_path / "bert-cls", case))) as llm:
        found = llm.embed(TEXTS[-1], truncate_prompt_tokens=case.max_seq_length - 1)
    assert distances(found, golden["embed.bert-cls"][-1:]).max() > MAX_DISTANCE


def short(index: int) -> tuple[str, list[str]]:
    query, document = PAIRS[index]
    return query, [document]
