"""Every tokenisation is llama.cpp's, id by id."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.metadata import Metadata

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "tokenisations.json.gz"
FILE: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))

LIKE_TOKENIZERS = {"raw deepseek-coder": ("\u3000\u200b\U0001f44d\U0001f3fd\\we'LL'S\t",)}
"""Texts that are cut as by the model's original tokenizer instead: its range of CJK characters includes spaces of other
scripts, which llama.cpp leaves out."""


def golden_metadata(case: str) -> Metadata:
    content = FILE["bases"][FILE["cases"][case]["base"]] | FILE["cases"][case]["changes"]
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if key in content:
            content[key] = np.array(content[key])
    return Metadata(GOLDEN, content)


@pytest.mark.parametrize("parse_special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("case", FILE["cases"])
def test_ids_are_those_of_llama_cpp(case: str, parse_special: bool) -> None:
    tokenizer = read_vocabulary(golden_metadata(case), 2000).tokenizer
    tokenizer.encode_special_tokens = not parse_special
    expected = FILE["cases"][case]["special" if parse_special else "plain"]
    wrong = []
    for text, ids in zip(FILE["strings"], expected, strict=True):
        found = tokenizer.encode(text).ids
        if found != ids and text not in LIKE_TOKENIZERS.get(case, ()):
            wrong.append((text, [tokenizer.id_to_token(i) for i in found], [tokenizer.id_to_token(i) for i in ids]))
    assert not wrong, f"{len(wrong)} of {len(expected)} differ, e.g. {wrong[:3]}"


@pytest.mark.parametrize("case", FILE["cases"])
def test_ends_are_those_of_llama_cpp(case: str) -> None:
    assert list(read_vocabulary(golden_metadata(case), 2000).end_token_ids) == FILE["cases"][case]["ends"]


@pytest.mark.parametrize("case", FILE["cases"])
def test_text_survives_a_round_trip(case: str) -> None:
    tokenizer = read_vocabulary(golden_metadata(case), 2000).tokenizer
    tokenizer.encode_special_tokens = True
    for text in FILE["strings"]:
        if case.startswith("spm"):
            # SentencePiece takes an escaped space for a space, and puts one after a token that always matches.
            text = text.replace("\u2581", " ").replace("think>", "")
        found = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        assert found == text
