"""Real vocabularies, which are not in the repository: ``LOCKSTEP_VOCABULARIES=DIR`` names a folder of them.

llama.cpp has them for its own tests (`models/` of its source, which is in the source distribution of
llama-cpp-python): `ggml-vocab-*.gguf`, with texts in `.inp` and the ids of Hugging Face's tokenizer in `.out`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.artifacts.gguf_file import read_gguf
from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.model import TokenizerParts
from tests.artifacts.test_encoder_tokenizers import FILE

FOLDER = os.environ.get("LOCKSTEP_VOCABULARIES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="LOCKSTEP_VOCABULARIES names no folder of real vocabularies")

FAMILIES = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
SEPARATOR = "\n__ggml_vocab_test__\n"


def load(name: str) -> TokenizerParts:
    assert FOLDER is not None
    path = Path(FOLDER) / name
    if not path.is_file():
        pytest.skip(f"{FOLDER} has no {name}")
    return read_vocabulary(read_gguf(path).metadata, 1 << 20)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_original_tokenizer(family: str) -> None:
    name = f"ggml-vocab-{family}.gguf"
    tokenizer = load(name).tokenizer
    tokenizer.encode_special_tokens = True
    assert FOLDER is not None
    texts = (Path(FOLDER) / f"{name}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    expected = (Path(FOLDER) / f"{name}.out").read_text().splitlines()
    assert len(texts) == len(expected) >= 46
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(i) for i in ids.split()], repr(text)


@pytest.mark.parametrize("name", [name for name in FILE["ids"] if name.endswith(".gguf")])
def test_ids_of_tricky_text_are_those_of_transformers(name: str) -> None:
    tokenizer = load(name).tokenizer
    for text, ids in zip(FILE["strings"], FILE["ids"][name], strict=True):
        assert tokenizer.encode(text).ids == ids, repr(text)
