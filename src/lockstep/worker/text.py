"""A model's text side as a message: all that a `Tokenizer` is made of."""

from __future__ import annotations

import msgspec

from lockstep.artifacts.model import TokenizerParts


class TextSide(msgspec.Struct, frozen=True, array_like=True):
    """What an artifact says of its text side, with its tokenizer written out."""

    tokenizer_json: str
    """As ``tokenizers`` writes it; large vocabularies take megabytes."""
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    end_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, parts: TokenizerParts) -> TextSide:
        return cls(parts.tokenizer.to_str(), parts.chat_template, parts.bos_token, parts.eos_token, parts.end_token_ids)

    def parts(self) -> TokenizerParts:
        """What it was made of; a large vocabulary takes a second to read."""
        from tokenizers import Tokenizer

        return TokenizerParts(
            Tokenizer.from_str(self.tokenizer_json),
            self.chat_template,
            self.bos_token,
            self.eos_token,
            self.end_token_ids,
        )
