"""Compilers for every kind of tokenizer, and what is looked at in their grammars."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.grammar import AnyGrammar
from lockstep.executors.grammar_compiler import GrammarCompiler
from lockstep.executors.stub import stub_tokenizer_parts
from tests.engine import text_models


def two_ends(tokenizer: Any) -> TokenizerParts:
    parts = text_models.parts(tokenizer)
    ends = tuple(sorted(tokenizer.token_to_id(text) for text in ("</s>", "<|im_end|>", "<|eot_id|>")))
    return TokenizerParts(tokenizer, None, parts.bos_token, parts.eos_token, ends)


FAMILIES = {
    "byte level": lambda: two_ends(text_models.byte_level()),
    "sentencepiece": lambda: two_ends(text_models.sentencepiece()),
    "sentencepiece, no legacy": lambda: two_ends(text_models.sentencepiece(legacy=False)),
    "stub": lambda: stub_tokenizer_parts(),
}


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(FAMILIES[family]())


@cache
def compiler_of(family: str, surplus: int = 0) -> GrammarCompiler:
    tokenizer = tokenizer_of(family)
    return GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size + surplus, tokenizer.end_token_ids)


class CountedTexts(tuple[str, ...]):
    """Texts of a choice that count how often they are read: each compilation reads them."""

    num_reads = 0

    def __iter__(self) -> Iterator[str]:
        self.num_reads += 1
        return super().__iter__()


def ids_of(bits: np.ndarray[Any, Any]) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    assert tokenizer.token_bytes is not None
    return b"".join(tokenizer.token_bytes.of(token) for token in tokens).decode()


def pick(grammar: AnyGrammar, text: str) -> None:
    for token in text.encode():
        assert token in ids_of(grammar.allowed())
        grammar.accept(token, 0)
