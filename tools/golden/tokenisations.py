"""Writes tests/golden/tokenisations.json.gz: small vocabularies, and llama.cpp's tokens of tricky text with them.

    python -m tools.golden.tokenisations      (golden extra: llama-cpp-python; made with 0.3.36)

The file has the vocabularies as GGUF metadata, the strings, and for each vocabulary the ids of each string with and
without parsing of special tokens, BOS and EOS as in the metadata, and the ids that end a generation.
"""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from pathlib import Path

import gguf
import llama_cpp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.golden.tricky_text import CASED, TRAINING, tricky_strings

OUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "tokenisations.json.gz"
CONTROL, USER_DEFINED, NORMAL, UNKNOWN, UNUSED, BYTE = 3, 4, 1, 2, 5, 6
FAMILIES = ("gpt-2", "default", "llama-bpe", "qwen2", "smollm")
MORE_FAMILIES = (
    "qwen2", "smollm", "olmo", "dbrx", "smaug-bpe", "gpt-4o", "tekken",
    "qwen35", "mpt", "falcon", "deepseek-llm", "deepseek-coder", "lfm2",
)  # fmt: skip

Metadata = dict[str, object]


def byte_level(whole_lines: bool = False) -> Metadata:
    """Vocabulary trained on the text, word by word, or with merges across words, which expose every split.

    It has control and user-defined tokens, a token that no merge produces, and an unused one.

    No control token is called `<|start|>`: llama.cpp also matches that one (and similar ones) in plain text, for one
    model family.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_lines)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    plain = [text for text in tricky_strings() if "<" not in text and "unmerge" not in text and "   " not in text]
    text = CASED * 8 + " ".join(plain) if whole_lines else TRAINING
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [NORMAL] * len(tokens)
    extra = [("unmergeable", NORMAL), ("\u0120unmergeable", NORMAL), ("<unused0>", UNUSED)]
    extra += [("<|begin|>", CONTROL), ("<|end|>", CONTROL), ("<s>", CONTROL)]
    extra += [("<think>", USER_DEFINED), ("</think>", USER_DEFINED), ("      ", USER_DEFINED)]
    ids = {text: len(tokens) + index for index, (text, _) in enumerate(extra)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + [text for text, _ in extra],
        "tokenizer.ggml.token_type": types + [kind for _, kind in extra],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": ids["<s>"],
        "tokenizer.ggml.eos_token_id": ids["<|end|>"],
    }


def sentencepiece() -> Metadata:
    """Layout of a Llama 2 vocabulary: special tokens, 256 bytes, merged pieces by rank, single characters last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TRAINING.splitlines(), trainers.BpeTrainer(vocab_size=1100, show_progress=False))
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    merged = ["\u2581" * 2, "\u2581" * 4, "\u2581" * 8, *[piece for piece in pieces if len(piece) > 1]]
    single = [piece for piece in pieces if len(piece) == 1]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    special = ["<unk>", "<s>", "</s>", *byte_tokens]
    tokens = [*special, *dict.fromkeys([*merged, *single]), "<|begin|>", "<|end|>", "<think>", "</think>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 263)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [*types, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def variants() -> dict[str, Metadata]:
    """Changes of each vocabulary to the first one of its kind, so that the file stays small."""
    found: dict[str, Metadata] = {f"bpe {name}": {"tokenizer.ggml.pre": name} for name in FAMILIES}
    found |= {f"raw {name}": {"tokenizer.ggml.pre": name} for name in MORE_FAMILIES}
    found["bpe add both"] = {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    found["bpe no bos"] = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    found["bpe ends"] = misnamed_ends()
    found["spm"] = {}
    found["spm no prefix"] = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    found["spm add both"] = {"tokenizer.ggml.add_eos_token": True}
    rng = random.Random(11)
    size = len(sentencepiece()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]  # a list
    found["spm shuffled scores"] = {"tokenizer.ggml.scores": [0.0] * 259 + rng.sample(range(-size, 0), size - 259)}
    return found


def misnamed_ends() -> Metadata:
    """Tokens whose spelling contradicts their type: ends of messages that are ordinary or user-defined."""
    base = byte_level()
    names = (
        "<|im_end|>",
        "<|eot_id|>",
        "[EOT]",
        "<|fim_middle|>",
        "<|file_sep|>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
    )
    ordinary = {"tokens": list(names), "token_type": [(NORMAL, USER_DEFINED)[rank % 2] for rank in range(len(names))]}
    joined = {f"tokenizer.ggml.{key}": [*base[f"tokenizer.ggml.{key}"], *new] for key, new in ordinary.items()}  # type: ignore[misc]  # lists
    return {"tokenizer.ggml.pre": "qwen2", **joined}


def write_vocabulary(path: Path, metadata: Metadata) -> None:
    """Write a GGUF file without tensors, which llama.cpp opens with `vocab_only`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            assert isinstance(value, list)
            values = [float(item) for item in value] if key.endswith("scores") else value
            writer.add_array(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def tokenise(metadata: Metadata, strings: list[str]) -> dict[str, list[list[int]] | list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path, metadata)
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    return {
        "special": [model.tokenize(text.encode(), add_bos=True, special=True) for text in strings],
        "plain": [model.tokenize(text.encode(), add_bos=True, special=False) for text in strings],
        "ends": [index for index in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, index)],
    }


def main() -> None:
    strings = tricky_strings()
    bases = {"bpe": byte_level(), "raw": byte_level(whole_lines=True), "spm": sentencepiece()}
    cases = {}
    for name, changes in variants().items():
        base = name.split(" ")[0]
        cases[name] = {"base": base, "changes": changes, **tokenise(bases[base] | changes, strings)}
    content = json.dumps({"strings": strings, "bases": bases, "cases": cases}, separators=(",", ":"), sort_keys=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(gzip.compress(content.encode(), mtime=0))
    print(f"{OUT.name}: {len(strings)} strings, {len(cases)} vocabularies, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
