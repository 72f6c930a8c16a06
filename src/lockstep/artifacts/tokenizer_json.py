"""The text side of a Hugging Face directory: tokenizer.json, tokenizer_config.json and the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.end_tokens import end_token_ids
from lockstep.artifacts.json_file import read_bytes, read_optional_json
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import TokenizerParts
from lockstep.errors import CorruptArtifactError, MissingTokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def read_tokenizer(directory: Path, vocab_size: int, declared: Sequence[Metadata]) -> TokenizerParts:
    """Read a directory's tokenizer; whether it adds BOS is what tokenizer.json's post-processor does.

    Args:
        directory: where tokenizer.json lies.
        vocab_size: rows of the embedding; no token may lie beyond.
        declared: config.json and generation_config.json, for their ``eos_token_id``.

    Raises:
        MissingTokenizerError: no tokenizer.json.
        CorruptArtifactError: it cannot be parsed or does not fit the weights.
    """
    tokenizer = _load(directory, vocab_size)
    settings = read_optional_json(directory / "tokenizer_config.json")
    bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    named = [index for source in declared for index in _end_ids(source) if 0 <= index < vocab_size]
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: index for index, token in added.items() if token.special}
    return TokenizerParts(
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, settings),
        bos_token=bos,
        eos_token=eos,
        end_token_ids=end_token_ids(named if eos_id is None else [*named, eos_id], special),
    )


def _load(directory: Path, vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in _OTHER_VOCABULARIES if (directory / name).is_file()]
        hint = f"; {others[0]} alone is not enough, save it with a fast tokenizer of transformers" if others else ""
        raise MissingTokenizerError(f"holds no tokenizer.json{hint}", path=directory)
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path))
    except Exception as error:  # the library raises nothing more specific
        raise CorruptArtifactError(f"is not a tokenizer ({error})", path=path) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise CorruptArtifactError(
            f"the largest token id is {largest} and the embedding has {vocab_size} rows", path=path
        )
    return tokenizer


def _token_text(settings: Metadata, key: str) -> str | None:
    """A string, or an object with its content."""
    if isinstance(settings.values.get(key), dict):
        return settings.section(key).text("content")
    return settings.text(key, "") or None


def _end_ids(source: Metadata) -> Iterator[int]:
    value = source.values.get("eos_token_id", [])
    for index in value if isinstance(value, list) else [value]:
        if type(index) is not int:
            raise CorruptArtifactError(f"'eos_token_id' holds {index!r}; token ids are expected", path=source.path)
        yield index


def _chat_template(directory: Path, settings: Metadata) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json: a string, or a list of which `default` is taken."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise CorruptArtifactError("is not UTF-8", path=path) from error
    listed = settings.values.get("chat_template")
    if isinstance(listed, list):
        for entry in listed:
            match entry:
                case {"name": "default", "template": str(template)}:
                    return template
        return None
    return settings.text("chat_template", "") or None
