"""GGUF vocabularies: defaults, end tokens, and everything that can be wrong with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.gguf_bpe import SPLITTERS
from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.source import open_artifact
from lockstep.errors import CorruptArtifactError, MissingTokenizerError, UnsupportedArtifactError
from tools.random_models import CHAT_TEMPLATE, write_gguf

PATH = Path("some.gguf")
BPE: dict[str, object] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>", "<|endoftext|>", "<|end|>", "\u0120"],
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 3, 3, 1, 1]),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 4,
}
SPM: dict[str, object] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x61>", "\u2581", "b", "\u2581b", "<turn>"],
    "tokenizer.ggml.scores": np.array([0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -1.0, 0.0]),
    "tokenizer.ggml.token_type": np.array([2, 3, 3, 6, 1, 1, 1, 3]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def metadata(base: dict[str, object], **changes: object) -> Metadata:
    """The base with tokenizer.ggml.* replaced, or removed by None."""
    values = base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Metadata(PATH, {key: value for key, value in values.items() if value is not None})


def test_the_random_models_vocabulary_is_whole(tmp_path: Path) -> None:
    artifact = open_artifact(str(write_gguf(tmp_path / "m.gguf", "tiny-llama")), cache_dir=tmp_path)
    parts = artifact.load_tokenizer()
    assert (parts.bos_token, parts.eos_token, parts.end_token_ids) == ("<|endoftext|>", "<|im_end|>", (0, 2))
    assert parts.chat_template == CHAT_TEMPLATE
    ids = parts.tokenizer.encode("<|im_start|>the time 12!<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert parts.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the time 12!<|im_end|>"
    assert parts.tokenizer.decode(ids) == "the time 12!"
    assert parts.tokenizer.get_vocab_size() == 512


def test_token_with_a_known_spelling_is_an_end_token_of_any_type() -> None:
    """<|im_end|> by its spelling, <|endoftext|> as eos; <|end|> is typed as an ordinary token here."""
    parts = read_vocabulary(metadata(BPE), 7)
    assert parts.end_token_ids == (3, 4, 5)
    assert parts.tokenizer.encode("<|end|>").ids == [5]


def test_end_of_turn_and_end_of_message_are_named_by_the_file() -> None:
    assert read_vocabulary(metadata(SPM, eot_token_id=7, eom_token_id=5), 8).end_token_ids == (2, 5, 7)


def test_the_family_decides_on_bos_unless_the_file_does() -> None:
    def first(base: dict[str, object], **changes: object) -> int:
        return read_vocabulary(metadata(base, **changes), 10).tokenizer.encode("b").ids[0]

    assert first(BPE) == 1
    assert first(BPE, pre="llama-bpe") == 4
    assert first(BPE, pre="llama-bpe", add_bos_token=False) == 1
    assert first(BPE, pre="llama-bpe", bos_token_id=None) == 1
    assert first(BPE, add_bos_token=True) == 4
    assert first(SPM) == 1
    assert first(SPM, add_bos_token=False) == 6
    assert read_vocabulary(metadata(SPM, add_eos_token=True), 8).tokenizer.encode("b").ids == [1, 6, 2]


def test_uncovered_text_becomes_byte_tokens_or_the_unknown_token() -> None:
    tokenizer = read_vocabulary(metadata(SPM), 8).tokenizer
    assert tokenizer.encode("ba", add_special_tokens=False).ids == [6, 3]
    assert tokenizer.encode("bz", add_special_tokens=False).ids == [6, 0]


def test_an_empty_token_gets_a_name() -> None:
    tokens = ["a", "b", "ab", "", "<|endoftext|>", "", "c"]
    parts = read_vocabulary(metadata(BPE, tokens=tokens), 7)
    assert parts.tokenizer.id_to_token(5) == "[EMPTY_5]"


def test_without_types_only_known_spellings_are_control_tokens() -> None:
    parts = read_vocabulary(metadata(BPE, token_type=None), 7)
    assert parts.tokenizer.get_added_tokens_decoder().keys() == {3, 4, 5}


def test_a_vocabulary_may_be_smaller_than_the_embedding() -> None:
    assert read_vocabulary(metadata(BPE), 64).tokenizer.get_vocab_size() == 7


def test_weights_without_a_vocabulary_miss_their_tokenizer() -> None:
    with pytest.raises(MissingTokenizerError, match=r"some\.gguf: has no vocabulary"):
        read_vocabulary(Metadata(PATH, {}), 10)


@pytest.mark.parametrize(("key", "value"), [("model", "rwkv"), ("pre", "viking")])
def test_an_unknown_kind_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(UnsupportedArtifactError, match=f"'{value}'.* supported"):
        read_vocabulary(metadata(BPE, **{key: value}), 7)


GEMMA4: dict[str, object] = {
    "tokenizer.ggml.model": "gemma4",
    "tokenizer.ggml.tokens": [
        "<unk>", "<bos>", "<eos>", "<turn|>", "<|tool_response>", "</s>",
        "\u2581", "a", "b", "\u2581a", "a\u2581", "\n", "\n\n", "<0xC3>", "<0xA9>",
    ],
    "tokenizer.ggml.token_type": np.array([3, 3, 3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 6, 6]),
    "tokenizer.ggml.merges": ["\n \n", "a \u2581", "\u2581 a"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def test_merges_of_gemma_4_cross_words() -> None:
    parts = read_vocabulary(metadata(GEMMA4), 15)
    assert parts.tokenizer.encode("a a b").ids == [1, 10, 10, 8]
    assert parts.tokenizer.encode("\n\n\u00e9").ids == [1, 12, 13, 14]
    assert parts.tokenizer.decode([1, 9, 12, 13, 14]) == " a\n\n\u00e9"


def test_gemma_4_begins_every_text_with_bos_and_has_an_ordinary_closing_tag() -> None:
    parts = read_vocabulary(metadata(GEMMA4, add_bos_token=False), 15)
    assert parts.tokenizer.encode("b").ids == [1, 8]
    assert parts.end_token_ids == (2, 3, 4)


def test_a_missing_family_is_the_default_one() -> None:
    assert "default" in SPLITTERS
    assert read_vocabulary(metadata(BPE, pre=None), 7).tokenizer.encode("ab").ids == [2]


CORRUPT = {
    "no tokens": (metadata(BPE, tokens=None), "'tokenizer.ggml.tokens' is missing"),
    "empty list": (metadata(BPE, tokens=[]), "0 tokens"),
    "tokens are numbers": (metadata(BPE, tokens=np.array([1.0])), "a list of strings is expected"),
    "more tokens than rows": (metadata(BPE, tokens=[str(i) for i in range(9)]), "9 tokens and an embedding of 8 rows"),
    "a token twice": (metadata(BPE, tokens=["a", "b", "ab", "a", "c", "d", "e"]), "'a' appears twice"),
    "an endless token": (metadata(BPE, tokens=["a" * 5000]), "a token of 5000 characters"),
    "too few types": (metadata(BPE, token_type=np.array([1])), "1 token types for 7 tokens"),
    "no merges": (metadata(BPE, merges=None), "'tokenizer.ggml.merges' is missing"),
    "merge without space": (metadata(BPE, merges=["ab"]), "merge 'ab'"),
    "merge of strangers": (metadata(BPE, merges=["a c"]), "merge 'a c'"),
    "merge into a stranger": (metadata(BPE, merges=["b a"]), "merge 'b a'"),
    "eos out of range": (metadata(BPE, eos_token_id=7), "eos_token_id' is 7; the vocabulary has 7 tokens"),
    "negative bos": (metadata(BPE, bos_token_id=-1), "bos_token_id' is -1"),
    "bos is a string": (metadata(BPE, bos_token_id="a"), "an integer is expected"),
    "bos wanted and not named": (metadata(BPE, add_bos_token=True, bos_token_id=None), "add_bos_token"),
    "eos wanted and not named": (metadata(BPE, add_eos_token=True, eos_token_id=None), "add_eos_token"),
    "flag is a number": (metadata(BPE, add_bos_token=1), "a boolean is expected"),
    "no scores": (metadata(SPM, scores=None), "'tokenizer.ggml.scores' is missing"),
    "too few scores": (metadata(SPM, scores=np.array([1.0])), "1 scores for 8 tokens"),
    "NaN score": (metadata(SPM, scores=np.full(8, np.nan)), "scores that are not finite"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_vocabulary_that_contradicts_itself_is_corrupt(case: str) -> None:
    values, message = CORRUPT[case]
    with pytest.raises(CorruptArtifactError, match=message):
        read_vocabulary(values, 8)
