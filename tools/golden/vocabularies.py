"""Make tests/golden/encoder_tokenisations.json.gz: how transformers cuts tricky text with vocabularies of encoders.

    python -m tools.golden.vocabularies DIR      (golden extra; made with transformers 5.24.0)

DIR has the vocabularies of llama.cpp's tests (`models/` of its source, which is in the source distribution of
llama-cpp-python). They are too large for the repository: the test that compares with them needs the same folder. The
file has the strings and, for each vocabulary, the ids of each string with the special tokens around it.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from transformers import BertTokenizer, T5Tokenizer, XLMRobertaTokenizer

from tools.golden import encoder_vocabularies as made
from tools.golden.tricky_text import tricky_strings

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "encoder_tokenisations.json.gz"
REAL = ("ggml-vocab-bert-bge.gguf", "ggml-vocab-nomic-bert-moe.gguf")
KEYS = ("model", "tokens", "token_type", "scores", "precompiled_charsmap", "bos_token_id", "normalizer.lowercase")

Encode = Callable[[str], list[int]]


def read(path: Path) -> made.Metadata:
    """The metadata of a file that this script needs."""
    fields = gguf.GGUFReader(path).fields
    found = {key: fields[key].contents() for name in KEYS if (key := f"tokenizer.ggml.{name}") in fields}
    charsmap = found.get("tokenizer.ggml.precompiled_charsmap")
    return found if charsmap is None else found | {"tokenizer.ggml.precompiled_charsmap": bytes(charsmap)}


def tokenizer_of(metadata: made.Metadata) -> Encode:
    """The tokenizer of transformers for a vocabulary."""
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, types = _list(values["tokens"]), _list(values["token_type"])
    if values["model"] == "bert":
        named = [
            token if kind == made.CONTROL else token[1:] if token.startswith(made.SPACE) else f"##{token}"
            for token, kind in zip(tokens, types, strict=True)
        ]
        vocabulary = {token: index for index, token in enumerate(named)}
        bert = BertTokenizer(vocab=vocabulary, do_lower_case=values.get("normalizer.lowercase", True))
        return lambda text: list(bert.encode(text))
    scores, charsmap = _list(values["scores"]), values["precompiled_charsmap"]
    pieces = [(t, s) for t, s, kind in zip(tokens, scores, types, strict=True) if kind != made.UNUSED]
    if "bos_token_id" in values:
        xlm_roberta = XLMRobertaTokenizer(vocab=pieces, _spm_precompiled_charsmap=charsmap)
        return lambda text: list(xlm_roberta.encode(text))
    t5 = T5Tokenizer(vocab=pieces, _spm_precompiled_charsmap=charsmap, extra_ids=0, additional_special_tokens=[])
    return lambda text: list(t5.encode(text))


def _list(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value


def main(folder: Path) -> None:
    strings = tricky_strings()
    vocabularies = {
        "bert": made.word_piece(),
        "bert cased": made.word_piece(lowercase=False),
        "xlm-roberta": made.unigram(),
        "t5": made.unigram(sentence_begin=False),
        **{name: read(folder / name) for name in REAL},
    }
    encoders = {name: tokenizer_of(metadata) for name, metadata in vocabularies.items()}
    ids = {name: [encode(text) for text in strings] for name, encode in encoders.items()}
    content = json.dumps({"strings": strings, "ids": ids}, separators=(",", ":"), sort_keys=True)
    OUT.write_bytes(gzip.compress(content.encode(), mtime=0))
    print(f"{OUT.name}: {len(strings)} strings, {len(ids)} vocabularies, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
