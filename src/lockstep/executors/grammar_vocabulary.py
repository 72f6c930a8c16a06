"""A model's tokens as llguidance wants them: bytes per token, and a way to make tokens of text.

Given by us and not read by it from a ``tokenizer.json``, so that the bytes are those of the answer's text, and so that
text that spells a special token stays text: read from there, it becomes that token, which no grammar accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SENTINEL = "\x02"
"""A character that no merge crosses, before texts whose tokenizer puts a space in front."""


@dataclass(frozen=True)
class Vocabulary:
    """What `LLTokenizer` takes in place of a tokenizer; it asks for these names."""

    tokens: Sequence[bytes]
    """The bytes of each token, the spelling of a special one."""
    special_token_ids: Sequence[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    """Tokens of a text in which a special token is only its characters."""
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def padded(self, vocab_size: int) -> Vocabulary:
        """With a token of no bytes for each row of the model that has no text: such a token never comes.

        Raises:
            ValueError: the model has fewer rows than there are tokens.
        """
        surplus = vocab_size - len(self.tokens)
        if surplus < 0:
            raise ValueError(f"it has {len(self.tokens)} tokens, the model only {vocab_size} rows")
        return replace(self, tokens=[*self.tokens, *([b""] * surplus)])

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly the text's; none where the tokenizer cannot write it."""
        text = text if isinstance(text, str) else text.decode()
        ids = self.encode(text)
        if self._spelled(ids) == text.encode():
            return ids
        prefix, ids = self.encode(SENTINEL), self.encode(SENTINEL + text)
        ids = ids[len(prefix) :]
        return ids if self._spelled(ids) == text.encode() else []

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.tokens[token] for token in ids])
