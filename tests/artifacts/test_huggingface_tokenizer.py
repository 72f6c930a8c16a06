"""The text side of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from lockstep.artifacts.model import TokenizerParts
from lockstep.artifacts.source import open_artifact
from lockstep.errors import CorruptArtifactError, MissingTokenizerError
from tests.artifacts.support import edit_json
from tools.golden.encoder_vocabularies import precompiled_charsmap
from tools.random_models import CHAT_TEMPLATE, SPECIAL_TOKENS, write_huggingface


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_huggingface(tmp_path_factory.mktemp("models") / "m", "tiny-llama", "F16")


@pytest.fixture
def model(weights: Path, tmp_path: Path) -> Path:
    """A copy whose small files may be changed."""
    for file in weights.iterdir():
        if file.suffix == ".safetensors":
            (tmp_path / file.name).symlink_to(file)
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(model: Path) -> TokenizerParts:
    return open_artifact(str(model), cache_dir=model / "cache").load_tokenizer()


def test_special_tokens_template_and_end_ids_are_read(model: Path) -> None:
    parts = load(model)
    assert parts.tokenizer.encode("the time<|im_end|>").ids[-1] == 2
    assert (parts.bos_token, parts.eos_token) == (None, "<|im_end|>")
    assert parts.chat_template == CHAT_TEMPLATE
    assert parts.end_token_ids == (0, 2)


def test_end_tokens_are_all_that_any_file_names(model: Path) -> None:
    """config.json, generation_config.json, the eos token's text, and special tokens with a well-known spelling."""
    edit_json(model / "config.json", lambda config: config.update(eos_token_id=7))
    edit_json(model / "generation_config.json", lambda config: config.update(eos_token_id=[9, 9, 100_000]))
    edit_json(model / "tokenizer_config.json", lambda config: config.update(eos_token="<|im_start|>"))
    assert load(model).end_token_ids == (0, 1, 2, 7, 9)


def test_ordinary_token_with_the_spelling_of_an_end_token_is_not_one(model: Path) -> None:
    def change(content: dict[str, object]) -> None:
        content["added_tokens"] = []

    edit_json(model / "tokenizer.json", change)
    edit_json(model / "generation_config.json", lambda config: config.update(eos_token_id=None))
    assert load(model).end_token_ids == (2,)  # by name, from tokenizer_config.json


def test_token_texts_may_be_objects(model: Path) -> None:
    text = {"content": "<|endoftext|>", "lstrip": False}
    edit_json(model / "tokenizer_config.json", lambda config: config.update(bos_token=text, eos_token=text))
    parts = load(model)
    assert (parts.bos_token, parts.eos_token) == ("<|endoftext|>", "<|endoftext|>")


def test_bos_is_added_where_tokenizer_json_requires_it(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[SPECIAL_TOKENS[0], "$A"], special_tokens=[(SPECIAL_TOKENS[0], 0)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    loaded = load(model).tokenizer
    assert loaded.encode("a").ids[0] == 0
    assert loaded.encode("a", add_special_tokens=False).ids[0] != 0


def test_truncation_and_padding_of_the_file_are_off(model: Path) -> None:
    """They belong to training; a prompt must not be cut in silence."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(model / "tokenizer.json"))
    assert len(load(model).tokenizer.encode("xyzxyzxyz").ids) == 9
    assert len(load(model).tokenizer.encode("x").ids) == 1


def test_a_tokenizer_of_an_encoder_has_no_end_and_no_template(model: Path) -> None:
    """WordPiece with [CLS] and [SEP], as a BERT has it."""
    vocabulary = {token: index for index, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##able"))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(vocabulary)[:4])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "generation_config.json").unlink()
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    edit_json(model / "config.json", lambda config: config.update(eos_token_id=None, pad_token_id=0))
    parts = load(model)
    assert (parts.bos_token, parts.eos_token, parts.chat_template, parts.end_token_ids) == (None, None, None, ())
    assert parts.tokenizer.encode("Unable").ids == [2, 4, 5, 3]


def test_a_damaged_character_map_is_corrupt(model: Path) -> None:
    """A text would lead out of it, which ends the process of the library."""
    charsmap = precompiled_charsmap({"\u00e9": "e", "x": "y"})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap)])
    tokenizer.save(str(model / "tokenizer.json"))
    assert load(model).tokenizer.normalizer.normalize_str("\u00e9x") == "ey"
    outside = charsmap[:4] + (1 << 29).to_bytes(4, "little") + charsmap[8:]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Precompiled(outside)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(CorruptArtifactError, match=r"tokenizer.json: has a precompiled .* places outside of it"):
        load(model)


def test_the_template_file_goes_before_the_configuration(model: Path) -> None:
    (model / "chat_template.jinja").write_text("from the file")
    assert load(model).chat_template == "from the file"


def test_of_several_templates_the_default_one_is_taken(model: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    edit_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=templates))
    assert load(model).chat_template == "plain"
    edit_json(model / "tokenizer_config.json", lambda config: config.update(chat_template=templates[:1]))
    assert load(model).chat_template is None


def test_a_directory_of_weights_only_still_opens_and_the_tokenizer_is_missing(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(MissingTokenizerError, match=r"has no tokenizer\.json$"):
        load(model)
    (model / "tokenizer.model").touch()
    with pytest.raises(MissingTokenizerError, match=r"tokenizer\.model is not sufficient"):
        load(model)


def test_configuration_of_the_tokenizer_is_optional(model: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    (model / "generation_config.json").unlink()
    parts = load(model)
    assert (parts.bos_token, parts.eos_token, parts.chat_template) == (None, None, None)
    assert parts.end_token_ids == (0, 2)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\xff\xff"])
def test_a_tokenizer_that_cannot_be_parsed_is_corrupt(content: bytes, model: Path) -> None:
    (model / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptArtifactError, match=r"tokenizer\.json: is not a tokenizer"):
        load(model)


def test_a_token_beyond_the_embedding_is_corrupt(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(CorruptArtifactError, match="the largest token id is 512 and the embedding has 512 rows"):
        load(model)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("generation_config.json", {"eos_token_id": "2"}, "'eos_token_id' has '2'"),
        ("generation_config.json", {"eos_token_id": [2, None]}, "has None"),
        ("tokenizer_config.json", {"eos_token": 2}, "'eos_token' is of type int"),
        ("tokenizer_config.json", {"eos_token": {"text": "x"}}, "'content' is missing"),
        ("tokenizer_config.json", {"chat_template": 5}, "'chat_template' is of type int"),
    ],
)
def test_values_of_the_wrong_kind_are_corrupt(file: str, change: dict[str, object], message: str, model: Path) -> None:
    edit_json(model / file, lambda config: config.update(change))
    with pytest.raises(CorruptArtifactError, match=message):
        load(model)


def test_a_template_file_that_is_not_text_is_corrupt(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CorruptArtifactError, match=r"chat_template\.jinja: is not UTF-8"):
        load(model)


def test_the_tokenizer_is_part_of_the_fingerprint(model: Path) -> None:
    before = open_artifact(str(model), cache_dir=model / "cache").fingerprint
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(content, indent=3))
    assert open_artifact(str(model), cache_dir=model / "cache").fingerprint != before
