"""`lockstep run` with models for vectors and scores: what is printed, and what is refused with one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep import LLM
from lockstep.cli.main import invoke
from tests.adapter_files import write_pocket_adapter
from tests.cli.encoders import write_embedder, write_reranker

Run = Callable[..., tuple[int, str, str]]
TEXTS = ("I was charged twice", "where is my refund", "the login page shows an error")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_embedder(tmp_path_factory.mktemp("models") / "embedder"))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_reranker(tmp_path_factory.mktemp("models") / "reranker"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def call(*arguments: str, piped: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(piped))
        code = invoke(["run", *arguments, "--cache-dir", str(tmp_path / "cache")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_json_has_whole_vectors_which_are_those_of_the_python_api(run: Run, embedder: str) -> None:
    code, out, err = run(embedder, *TEXTS, "--json")
    answer = json.loads(out)
    assert (code, err, answer["model"], answer["task"]) == (0, "", "embedder", "embed")
    assert [each["text"] for each in answer["data"]] == list(TEXTS)
    with LLM(embedder) as llm:
        vectors = llm.embed(list(TEXTS))
        assert answer["artifact"] == llm.model.fingerprint
    assert np.array_equal(np.array([each["vector"] for each in answer["data"]], np.float32), vectors)


def test_people_get_sizes_first_numbers_norms_and_cosines(run: Run, embedder: str) -> None:
    lines = run(embedder, *TEXTS)[1].splitlines()
    assert lines[0].startswith("1  I was charged twice ")
    assert "48 numbers" in lines[0]
    assert lines[0].endswith("...  norm 1.0000")
    assert lines[4] == "cosines"
    table = [line.split() for line in lines[6:]]
    assert [row[0] for row in table] == ["1", "2", "3"]
    assert [table[at][at + 1] for at in range(3)] == ["1.0000"] * 3
    assert table[0][2] == table[1][1]
    assert len(run(embedder, TEXTS[0])[1].splitlines()) == 1


def test_each_line_of_standard_input_is_a_text(run: Run, embedder: str) -> None:
    piped = run(embedder, "--json", piped=f"{TEXTS[0]}\n\n  {TEXTS[1]}  \n")[1]
    assert piped == run(embedder, TEXTS[0], TEXTS[1], "--json")[1]
    many = run(embedder, piped="one order\n" * 21)[1].splitlines()
    assert many[-1] == "cosines are printed for at most 20 texts; --json prints whole vectors"
    whole = json.loads(run(embedder, "-p", "-", "--json", piped="a refund\nfor one order")[1])
    assert [each["text"] for each in whole["data"]] == ["a refund\nfor one order"]


def test_a_prompt_of_the_model_and_fewer_dimensions(run: Run, embedder: str) -> None:
    with LLM(embedder) as llm:
        expected = llm.embed(TEXTS[0], prompt_name="query", dimensions=8)
    arguments = (embedder, TEXTS[0], "--prompt-name", "query", "--dimensions", "8", "--json")
    [found] = json.loads(run(*arguments)[1])["data"]
    assert np.array_equal(np.array([found["vector"]], np.float32), expected)


def test_a_reranker_sorts_documents_for_people_and_keeps_their_order_as_json(run: Run, reranker: str) -> None:
    query, *documents = TEXTS
    answer = json.loads(run(reranker, *TEXTS, "--json")[1])
    with LLM(reranker) as llm:
        scores = llm.score(query, documents)
    assert (answer["task"], answer["query"]) == ("rerank", query)
    assert answer["data"] == [
        {"index": index, "document": document, "score": score}
        for index, (document, score) in enumerate(zip(documents, scores, strict=True))
    ]
    shown = [f"{score:.4f}  {document}" for document, score in zip(documents, scores, strict=True)]
    assert run(reranker, *TEXTS)[1].splitlines() == sorted(shown, reverse=True)
    assert run(reranker, query, piped="\n".join(documents))[1].splitlines() == sorted(shown, reverse=True)


def test_long_texts_are_cut_at_the_flag(run: Run, embedder: str, reranker: str) -> None:
    long = "refund " * 500
    code, _, err = run(embedder, "hi", long)
    assert (code, "prompts[1]: the text has 502 tokens" in err) == (2, True), err
    flags = ("--truncate-prompt-tokens", "20", "--json")
    cut = json.loads(run(embedder, long, *flags)[1])["data"][0]["vector"]
    assert cut == json.loads(run(embedder, "refund " * 18, "--json")[1])["data"][0]["vector"]
    assert run(reranker, "hi", long)[0] == 2
    code, out, _ = run(reranker, "hi", long, *flags)
    assert (code, len(json.loads(out)["data"])) == (0, 1)


def test_a_model_of_text_answers_one_text(run: Run) -> None:
    flags = ("--max-tokens", "4", "--temperature", "0")
    assert run("stub://alpha", "hello", *flags)[1] == run("stub://alpha", "-p", "hello", *flags)[1] != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{embedder}", "hi", "--temperature", "1"), "--temperature is for models that generate text"),
        (("{embedder}", "hi", "--raw"), "--raw is for models that generate text; this model's task is 'embed'"),
        (("{embedder}", "hi", "--regex", "a"), "--regex is for models that generate text"),
        (("stub://alpha", "hi", "--lora", ""), "--lora is empty"),
        (("{embedder}",), "no text is given"),
        (("{embedder}", "hi", "-p", "hi"), "a TEXT and --prompt are both given"),
        (("{embedder}", "hi", "--prompt-name", "other"), "this model's prompts are: document, query"),
        (("{embedder}", "hi", "--dimensions", "49"), "this model's vectors have 48"),
        (("{embedder}", "hi", "--instruction", "x"), "--instruction is for models with the task 'rerank'"),
        (("{reranker}",), 'this model scores documents: lockstep run MODEL "query" "document"'),
        (("{reranker}", "hi"), "no document is given"),
        (("{reranker}", "hi", "ho", "--dimensions", "4"), "--dimensions is for models with the task 'embed'"),
        (("{reranker}", "hi", "ho", "--instruction", "x"), "takes no instruction"),
        (("stub://alpha", "hi", "ho"), "this model answers one prompt"),
        (("stub://alpha", "hi", "--dimensions", "4"), "this model's task is 'generate'"),
        (
            ("stub://alpha", "hi", "--truncate-prompt-tokens", "-1"),
            "--truncate-prompt-tokens is for models with the task 'embed' or 'rerank'",
        ),
        (("{embedder}", "hi", "--truncate-prompt-tokens", "0"), "truncate_prompt_tokens is 0"),
        (("{embedder}", "hi", "--task", "generate"), "task is 'generate', but bert is an encoder"),
        (("{embedder}", "hi", "ho", "--task", "rerank"), "task is 'rerank', but this encoder has no classifier"),
        (("{reranker}", "hi", "--task", "generate"), "task is 'generate', but bert is an encoder"),
        (("{reranker}", "", "hi"), "query: the text is empty"),
        (("{reranker}", "hi", "ho", " "), "documents[1]: the text is blank"),
        (("stub://alpha", "--json"), "--json requires a prompt"),
    ],
)
def test_wrong_use_is_one_line(
    run: Run, embedder: str, reranker: str, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(*(each.format(embedder=embedder, reranker=reranker) for each in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_an_adapter_that_has_no_effect_on_vectors_is_refused(run: Run, tmp_path: Path) -> None:
    adapter = str(write_pocket_adapter(tmp_path / "adapter"))
    code, _, err = run("pocket://", "hi", "--task", "embed", "--lora", adapter)
    assert (code, "--lora applies to generated text only" in err) == (2, True), err
