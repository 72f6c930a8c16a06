"""Vocabulary of a GGUF file: its tokens with their types and scores, and the tokens that have a role.

Source: llama.cpp's `llama-vocab.cpp` (token types and keys).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from lockstep.artifacts.generation_config import END_TEXTS, MARKER_TEXTS
from lockstep.artifacts.metadata import Metadata

_MAX_TOKEN_CHARS = 4096
"""Maximum token length. The time to find the merges of an SPM token is quadratic in its length."""


class GgufTokenType(IntEnum):
    """Kinds of tokens, as numbered by ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens in order of id; unique and not empty."""

    metadata: Metadata
    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Metadata, vocab_size: int) -> GgufVocabulary:
        tokens = metadata.strings("tokenizer.ggml.tokens")
        if not 1 <= len(tokens) <= vocab_size:
            raise metadata.corrupt(
                f"{len(tokens)} tokens and an embedding of {vocab_size} rows; 1 to {vocab_size} are expected"
            )
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise metadata.corrupt(f"token {twice!r} appears twice in the vocabulary")
        longest = max(tokens, key=len)
        if len(longest) > _MAX_TOKEN_CHARS:
            raise metadata.corrupt(f"a token of {len(longest)} characters; at most {_MAX_TOKEN_CHARS} are expected")
        types = [int(GgufTokenType.NORMAL)] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata.values:
            types = metadata.numbers("tokenizer.ggml.token_type").tolist()
        if len(types) != len(tokens):
            raise metadata.corrupt(f"{len(types)} token types for {len(tokens)} tokens")
        for text in (*END_TEXTS, *MARKER_TEXTS):
            if text in ids:  # converters often mark these as normal or user-defined
                types[ids[text]] = GgufTokenType.CONTROL
        if all(text in ids for text in ("<|tool_response>", "</s>")):
            types[ids["</s>"]] = GgufTokenType.NORMAL  # an HTML tag in Gemma 4's vocabulary
        return cls(metadata, tokens, ids, types)

    def scores(self) -> list[float]:
        """Return the finite score of each token."""
        scores: list[float] = self.metadata.numbers("tokenizer.ggml.scores").tolist()
        if len(scores) != len(self.tokens):
            raise self.metadata.corrupt(f"{len(scores)} scores for {len(self.tokens)} tokens")
        if not all(math.isfinite(score) for score in scores):
            raise self.metadata.corrupt("'tokenizer.ggml.scores' has scores that are not finite")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that BPE joins, first one first."""
        merges = []
        for merge in self.metadata.strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.metadata.corrupt(f"merge {merge!r} is not of two tokens that make a third")
            merges.append((left, right))
        return merges

    def of_type(self, *types: GgufTokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]

    def special(self, name: str) -> int | None:
        """The id under `tokenizer.ggml.{name}_token_id`, or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata.values:
            return None
        index = self.metadata.integer(key)
        if not 0 <= index < len(self.tokens):
            raise self.metadata.corrupt(f"{key!r} is {index}; the vocabulary has {len(self.tokens)} tokens")
        return index

    def required(self, name: str, text: str) -> int:
        """The id under `tokenizer.ggml.{name}_token_id`, otherwise that of the token with this text."""
        index = self.special(name)
        index = self.ids.get(text) if index is None else index
        if index is None:
            raise self.metadata.corrupt(f"has no {name} token: neither a {name}_token_id nor a token {text!r}")
        return index

    def added(self, name: str, by_default: bool) -> int | None:
        """The id if the token is added to every text, otherwise None. Raises an error if a required token has no id."""
        key = f"tokenizer.ggml.add_{name}_token"
        if not self.metadata.flag(key, by_default):
            return None
        index = self.special(name)
        if index is None and key in self.metadata.values:
            raise self.metadata.corrupt(f"{key!r} is set, but the file has no {name} token")
        return index
