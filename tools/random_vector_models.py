"""A random embedder and a random reranker with tokenizers, as their publishers write them, and a manifest of both."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path

from tools.random_encoders import ENCODERS, write_encoder
from tools.random_models import write_huggingface

SIZE = 64
"""Numbers in a vector of the embedder."""
CONTEXT = 256
"""Tokens of a text, with the two special ones."""
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MANIFEST = """
cluster: three
models:
  embedder: {{source: '{folder}/embedder', aliases: [text-embedding-3-small]}}
  reranker: {{source: '{folder}/reranker', aliases: [rerank-v3.5]}}
  chat: {{source: 'pocket://'}}
"""


def write_embedder(folder: Path) -> Path:
    """A bert with mean pooling and a prompt for queries."""
    write_encoder(folder, ENCODERS["bert"], seed=7)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "query: "}}')
    return _with_tokenizer(folder)


def write_reranker(folder: Path, num_labels: int = 1) -> Path:
    """A bert that scores pairs, with one label or several."""
    labels = {"id2label": {str(label): f"LABEL_{label}" for label in range(num_labels)}}
    encoder = ENCODERS["bert-classifier"]
    write_encoder(folder, replace(encoder, config={**encoder.config, **labels, "label2id": {}}), seed=7)
    return _with_tokenizer(folder)


def write_answering_reranker(folder: Path) -> Path:
    """A llama that scores by the logits of two tokens, as Qwen3-Reranker does."""
    write_huggingface(folder, "tiny-llama", "F16")
    modules = [
        ("sentence_transformers.models.Transformer", ""),
        ("sentence_transformers.models.LogitScore", "1_LogitScore"),
    ]
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": kind} for index, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 9}')
    return folder


def write_manifest(folder: Path) -> Path:
    """Write an embedder, a reranker, and a manifest that serves them beside pocket."""
    write_embedder(folder / "embedder")
    write_reranker(folder / "reranker")
    manifest = folder / "manifest.yaml"
    manifest.write_text(MANIFEST.format(folder=folder))
    return manifest


def _with_tokenizer(folder: Path) -> Path:
    """WordPiece over single characters, each also as a continuation of a word."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = string.ascii_lowercase + string.digits
    tokens = [*SPECIALS, *letters, *(f"##{each}" for each in letters), *string.punctuation]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizerFast", **named}))
    return folder
