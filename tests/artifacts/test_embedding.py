"""Files that describe how a model makes vectors: what they mean, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.artifacts.embedding import (
    files_of,
    from_gguf_metadata,
    max_tokens_of,
    read_sentence_transformers,
    scores_are_raw,
)
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import DenseModule, HeadLayer
from lockstep.errors import ArtifactError, CorruptArtifactError, UnsupportedArtifactError

MODULES = "sentence_transformers.models."
IDENTITY = "torch.nn.modules.linear.Identity"


def write_model(path: Path, *kinds: str) -> Path:
    """A directory with these modules, each in its own directory; dense layers take 4 values and give 3."""
    listed = []
    for index, kind in enumerate(kinds):
        directory = "" if index == 0 else f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": directory, "type": f"{MODULES}{kind}"})
        if directory:
            (path / directory).mkdir()
        if kind == "Pooling":
            (path / directory / "config.json").write_text('{"pooling_mode": "mean"}')
        if kind == "Dense":
            config = {"in_features": 4, "out_features": 3, "bias": True, "activation_function": IDENTITY}
            (path / directory / "config.json").write_text(json.dumps(config))
    (path / "modules.json").write_text(json.dumps(listed))
    return path


def test_a_directory_without_modules_has_no_pooling_of_its_own(tmp_path: Path) -> None:
    assert read_sentence_transformers(tmp_path) is None
    assert files_of(tmp_path) == ()


def test_a_transformer_alone_pools_nothing(tmp_path: Path) -> None:
    assert read_sentence_transformers(write_model(tmp_path, "Transformer")) is None


def test_all_modules_and_files_are_read(tmp_path: Path) -> None:
    path = write_model(tmp_path, "Transformer", "Pooling", "Dense", "Normalize")
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": false}')
    found = read_sentence_transformers(path)
    assert found is not None
    assert (found.pooling, found.normalize, found.max_tokens) == ("mean", True, 256)
    assert (dict(found.prompts), found.default_prompt) == ({"query": "q: ", "document": ""}, "query")
    assert found.dense == (DenseModule("2_Dense", HeadLayer(3, "", bias=True)),)
    assert files_of(path) == (
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
    )


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({}, "mean"),
    ],
)
def test_the_pooling_mode_of_each_version_is_read(tmp_path: Path, config: dict[str, object], pooling: str) -> None:
    path = write_model(tmp_path, "Transformer", "Pooling")
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    found = read_sentence_transformers(path)
    assert found is not None
    assert (found.pooling, found.normalize) == (pooling, False)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"model_max_length": 512}}, 512),
        ({"tokenizer_config": {"model_max_length": 10**30 + 19884624838656}}, None),
        ({"tokenizer_config": {"model_max_length": 1e30}}, None),
        ({"tokenizer_config": {"model_max_length": 512}, "sentence_bert_config": {"max_seq_length": None}}, 512),
        ({"tokenizer_config": {"model_max_length": 512}, "sentence_bert_config": {"max_seq_length": 256}}, 256),
        ({"sentence_xlm-roberta_config": {"max_seq_length": 128}}, 128),
        ({"sentence_bert_config": {"max_seq_length": 256}, "sentence_roberta_config": {"max_seq_length": 128}}, 256),
    ],
)
def test_the_maximum_length_is_that_of_the_modules_or_else_of_the_tokenizer(
    tmp_path: Path, files: dict[str, dict[str, object]], expected: int | None
) -> None:
    path = write_model(tmp_path, "Transformer", "Pooling")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    found = read_sentence_transformers(path)
    assert found is not None
    assert (found.max_tokens, max_tokens_of(path)) == (expected, expected)


def test_a_classifier_without_modules_has_the_maximum_length_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert max_tokens_of(tmp_path) == 512


def edited(name: str, **values: object) -> Callable[[Path], object]:
    """Replace values of a JSON object in the model's directory; None removes one."""

    def edit(path: Path) -> None:
        file = path / name
        config = {**(json.loads(file.read_text()) if file.exists() else {}), **values}
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return edit


def module(**values: object) -> Callable[[Path], object]:
    """Replace values of the second module."""

    def edit(path: Path) -> None:
        listed = json.loads((path / "modules.json").read_text())
        listed[1] |= values
        (path / "modules.json").write_text(json.dumps(listed))

    return edit


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (module(type=f"{MODULES}CNN"), UnsupportedArtifactError),
        (module(path="../elsewhere"), CorruptArtifactError),
        (module(path=".."), CorruptArtifactError),
        (module(path=7), CorruptArtifactError),
        (lambda path: (path / "modules.json").write_text("[]"), CorruptArtifactError),
        (lambda path: (path / "modules.json").write_text("{"), CorruptArtifactError),
        (edited("1_Pooling/config.json", pooling_mode="max"), UnsupportedArtifactError),
        (edited("1_Pooling/config.json", pooling_mode=["cls", "mean"]), UnsupportedArtifactError),
        (edited("1_Pooling/config.json", include_prompt=False), UnsupportedArtifactError),
        (edited("2_Dense/config.json", activation_function="torch.nn.SELU"), UnsupportedArtifactError),
        (edited("2_Dense/config.json", use_residual=True), UnsupportedArtifactError),
        (edited("2_Dense/config.json", out_features=0), CorruptArtifactError),
        (module(type=f"{MODULES}Dense", path=""), CorruptArtifactError),
        (edited("config_sentence_transformers.json", default_prompt_name="query"), CorruptArtifactError),
        (edited("config_sentence_transformers.json", prompts={"query": 7}), CorruptArtifactError),
        (edited("sentence_bert_config.json", max_seq_length=-1), CorruptArtifactError),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: Callable[[Path], object], error: type[ArtifactError]) -> None:
    path = write_model(tmp_path, "Transformer", "Pooling", "Dense")
    change(path)
    with pytest.raises(error) as raised:
        read_sentence_transformers(path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"true_token_id": 5, "false_token_id": 3}, (5, 3)),
        ({"true_token_id": 5}, (5,)),
        ({"true_token_id": 5, "false_token_id": None}, (5,)),
        ({"true_token_id": -5}, None),
        ({"true_token_id": 5, "false_token_id": -1}, None),
        ({"false_token_id": 5}, None),
    ],
)
def test_a_reranker_names_the_tokens_of_its_answers(
    tmp_path: Path, config: dict[str, int | None], ids: tuple[int, ...] | None
) -> None:
    path = write_model(tmp_path, "Transformer", "LogitScore")
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(config))
    if ids is None:
        with pytest.raises(ArtifactError):
            read_sentence_transformers(path)
        return
    found = read_sentence_transformers(path)
    assert found is not None
    assert found.answer_ids == ids


SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("own", "declared", "is_raw"),
    [
        ({}, {}, False),
        ({}, {"sentence_transformers": {"version": "5.0"}}, False),
        ({}, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
        ({}, {"sbert_ce_default_activation_function": IDENTITY}, True),
        ({}, {"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, False),
        ({"activation_fn": IDENTITY}, {}, True),
        ({"activation_fn": SIGMOID}, {"sentence_transformers": {"activation_fn": IDENTITY}}, False),
        ({"activation_fn": "mine.Identity"}, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
        ({"activation_fn": "mine.Identity"}, {}, False),
    ],
)
def test_scores_are_logits_where_files_name_the_identity(
    tmp_path: Path, own: dict[str, object], declared: dict[str, object], is_raw: bool
) -> None:
    if own:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(own))
    assert scores_are_raw(tmp_path, Metadata(tmp_path / "config.json", declared)) is is_raw
    assert files_of(tmp_path) == (("config_sentence_transformers.json",) if own else ())


@pytest.mark.parametrize(
    ("activation", "error"), [("torch.nn.modules.activation.Tanh", UnsupportedArtifactError), (3, CorruptArtifactError)]
)
def test_another_activation_of_scores_is_refused(tmp_path: Path, activation: object, error: type[Exception]) -> None:
    declared = Metadata(tmp_path / "config.json", {"sentence_transformers": {"activation_fn": activation}})
    with pytest.raises(error, match=r"config\.json"):
        scores_are_raw(tmp_path, declared)


@pytest.mark.parametrize(("kind", "pooling"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)])
def test_gguf_files_name_the_pooling_by_a_number(kind: int, pooling: str | None) -> None:
    found = from_gguf_metadata(Metadata(Path("model.gguf"), {"bert.pooling_type": kind}), "bert")
    assert (None if found is None else found.pooling) == pooling


def test_an_unknown_pooling_of_a_gguf_file_is_refused() -> None:
    with pytest.raises(CorruptArtifactError, match=r"bert\.pooling_type"):
        from_gguf_metadata(Metadata(Path("model.gguf"), {"bert.pooling_type": 9}), "bert")
