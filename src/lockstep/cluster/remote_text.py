"""The text side of a model that another server answers: its tokens are not known here, its conversations go as they
are."""

from __future__ import annotations

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.tokenizer import Tokenizer

TEMPLATE = "{{ messages }}{{ tools }}{{ reasoning_effort }}"
"""Never rendered: it says which variables are passed on."""


def remote_tokenizer() -> Tokenizer:
    """One without a vocabulary, whose template reads `tools` and `reasoning_effort`. It takes no grammars, so that
    promises which only a constraint keeps (`tool_choice` other than auto and none) are refused by those who plan."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    return Tokenizer(TokenizerParts(Library(models.BPE()), TEMPLATE, None, None, ()))
