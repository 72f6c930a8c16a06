"""Small tokenizers of two families, trained on a few sentences, with the special tokens of templates."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lockstep.artifacts.model import TokenizerParts

SPECIALS = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>",
    "<|assistant|>", "<|system|>",
)  # fmt: skip
SPOKEN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not special, as in Qwen3."""

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Ein Bär trägt süße Äpfel; die naïve Señorita isst crème brûlée für 5 €.",
    "日本語のテキストと 😀 emoji 👩‍👩‍👧 und Русский текст, ελληνικά.",
    "def f(x):\n    return x + 1\n\n\nif a < b and b > c:\n\tprint('<|ok|>', [1, 2, 3])",
    "user assistant system user\nassistant\nsystem\n You are a helpful assistant.",
] * 4


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    _add(tokenizer)
    return tokenizer


@cache
def sentencepiece(*, legacy: bool = True) -> Tokenizer:
    """BPE over "▁" with byte fallback, as in Llama 2; `legacy`: a space precedes every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if legacy:
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXTS[:1] * 9, trainers.BpeTrainer(vocab_size=360, special_tokens=reserved))
    rebuilt = Tokenizer.from_str(_without_added(tokenizer.to_str()))
    _add(rebuilt)
    rebuilt.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return rebuilt


@cache
def metaspace() -> Tokenizer:
    """Unigram-like handling of "▁" by the pre-tokenizer, as in T5 and some Llama conversions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400))
    _add(tokenizer)
    return tokenizer


@cache
def wordpiece() -> Tokenizer:
    """A decoder without a byte table."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"]))
    return tokenizer


def parts(tokenizer: Tokenizer, chat_template: str | None = None, end: str = "<|im_end|>") -> TokenizerParts:
    end_id = tokenizer.token_to_id(end)
    return TokenizerParts(tokenizer, chat_template, "<s>", "</s>", () if end_id is None else (end_id,))


def _add(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SPOKEN])


def _without_added(text: str) -> str:
    """The trainer makes its reserved tokens special; bytes must be ordinary ones."""
    import json

    saved = json.loads(text)
    saved["added_tokens"] = []
    return json.dumps(saved)
