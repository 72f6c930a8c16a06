"""The byte-level BPE vocabulary, and the rendering of conversations into token ids.

Text is pre-tokenised by GPT-2's expression, so that any GGUF reader with `gpt2` / `gpt-2` splits it alike. Contents are
encoded separately from the template, so no message can forge a role border.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lockstep.pocket import INTENTS
from tools.pocket.conversations import Part

SPECIALS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """A byte-level BPE tokenizer with fixed ids and merges; special tokens are never split."""
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A vocabulary of exactly `size` ids, specials first; every intent is one token."""
    tokenizer = byte_level({}, [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == size, tokenizer.get_vocab_size()
    for intent in INTENTS:
        assert len(tokenizer.encode(intent).ids) == 1, intent
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a saved vocabulary."""
    return Tokenizer.from_file(str(path))


class Renderer:
    """Converts conversations to ids and loss weights, by the rules of the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: dict[str, int] = {name: tokenizer.get_vocab()[name] for name in SPECIALS}
        (self.newline,) = tokenizer.encode("\n").ids
        self.labels = [tokenizer.encode(intent).ids[0] for intent in INTENTS]

    def render(self, parts: list[Part]) -> tuple[list[int], list[float], list[int]]:
        """Ids of a conversation; for each the loss weight, and at a request's end its intent, otherwise -1."""
        ids: list[int] = []
        weights: list[float] = []
        intents: list[int] = []
        for part in parts:
            content = [*self.tokenizer.encode(part.text, add_special_tokens=False).ids, self.ids["<|end|>"]]
            ids += [self.ids[f"<|{part.role}|>"], self.newline, *content, self.newline]
            weights += [0.0, 0.0, *[part.weight] * len(content), 0.0]
            intent = INTENTS.index(part.intent) if part.intent else -1
            intents += [-1] * (len(content) + 1) + [intent, -1]
        return ids, weights, intents

    def prompt(self, parts: list[Part]) -> list[int]:
        """Ids of a conversation up to the assistant's turn."""
        return [*self.render(parts)[0], self.ids["<|assistant|>"], self.newline]
