"""A random embedding model and a random reranker with tokenizers, as sentence-transformers writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tools.random_encoders import ENCODERS, Encoder, write_encoder

WORDS = ["i", "was", "charged", "twice", "for", "one", "order", "the", "login", "page", "where", "is", "my", "refund"]
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_TOKENS = 60


def write_embedder(folder: Path) -> Path:
    """A BERT with mean pooling, vectors of 48 numbers of length 1, and the prompts ``query`` and ``document``."""
    path = _write(folder, replace(ENCODERS["bert"], dense=((48, "activation.Tanh", True),)))
    prompts = {"query": "where is ", "document": ""}
    (path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))
    return path


def write_reranker(folder: Path) -> Path:
    """A BERT with a classifier of one label."""
    encoder = ENCODERS["bert-classifier"]
    one_label = {"id2label": {"0": "relevant"}, "label2id": {"relevant": 0}}
    return _write(folder, replace(encoder, config={**encoder.config, **one_label}))


def _write(folder: Path, encoder: Encoder) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import BertProcessing

    path = write_encoder(folder, encoder)
    letters = [f"{prefix}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz" for prefix in ("", "##")]
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys([*SPECIALS, *WORDS, *letters]))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return path
