"""`lockstep bench embed`: an embedding model in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep import LLM, EngineOptions, LoadOptions
from lockstep.bench.embed import EmbedOptions, run_embed_bench
from lockstep.cli.main import invoke
from tests.cli.encoders import write_embedder, write_reranker

SMALL = ("--lengths", "4,9", "--batch-sizes", "1,2", "--num-texts", "3", "--rounds", "1")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_embedder(tmp_path_factory.mktemp("models") / "embedder"))


def test_every_length_and_batch_size_is_measured(
    embedder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    assert invoke(["bench", "embed", embedder, *SMALL, "--json", "--result-filename", str(path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(path.read_text())
    assert (result["model_id"], result["num_texts"]) == ("embedder", 3)
    cases = [(row["length"], row["batch_size"], row["num_texts"]) for row in result["results"]]
    assert cases == [(4, 1, 3), (4, 2, 4), (9, 1, 3), (9, 2, 4)]
    for row in result["results"]:
        assert row["text_throughput"] == pytest.approx(row["num_texts"] / row["duration"])
        assert row["token_throughput"] == pytest.approx(row["length"] * row["text_throughput"])
        assert row["call_s"] == pytest.approx(row["batch_size"] / row["text_throughput"])
        assert row["cpu_s_per_text"] > 0


def test_the_texts_of_a_batch_share_steps(embedder: str) -> None:
    steps = {}
    for size in (1, 4):
        with LLM(embedder, LoadOptions(EngineOptions(max_num_seqs=4))) as llm:
            run_embed_bench(llm, EmbedOptions("5", f"{size}", num_texts=8, rounds=1))
            steps[size] = llm.engine.metrics().counters["num_steps"]
    assert steps == {1: 9, 4: 3}


def test_people_get_a_table(embedder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "embed", embedder, *SMALL]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "tokens"
    assert [row.split()[:2] for row in rows] == [["4", "1"], ["4", "2"], ["9", "1"], ["9", "2"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "4,x"), "--lengths is '4,x'; it must be numbers from 1 to 100,000"),
        (("--batch-sizes", "0"), "--batch-sizes is '0'"),
        (("--num-texts", "0"), "--num-texts is 0"),
        (("--seed", "-1"), "--seed must not be negative"),
        (("--lengths", "61"), "60"),
    ],
)
def test_a_wrong_flag_is_one_line(
    embedder: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["bench", "embed", embedder, *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_model_of_text_or_for_scores_is_refused_without_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reranker = str(write_reranker(tmp_path / "reranker"))
    for model in ("stub://alpha", reranker):
        assert invoke(["bench", "embed", model, *SMALL]) == 2
        assert "add --task embed to measure it as one" in capsys.readouterr().err
    assert invoke(["bench", "embed", reranker, "--task", "embed", *SMALL]) == 0
