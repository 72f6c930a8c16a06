"""A tokenizer made of a message does what the artifact's own does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.artifacts.model import TokenizerParts
from lockstep.artifacts.source import open_artifact
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.stub import stub_tokenizer_parts
from lockstep.worker.messages import Event, Loaded, TokenizerPayload
from lockstep.worker.wire import event_decoder, event_encoder
from tests.engine import text_models

TEXTS = [
    *text_models.TEXTS[:5],
    "",
    " ",
    "  two  spaces ",
    "\n\t\r\n",
    "a\x00b\x7f",
    "<|im_end|> <s> </s> <think>",
    "I was charged twice. \u200d\ufeff\U0001f469",
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n</think>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be <|im_end|> brief."},
    {"role": "user", "content": "日本 </s> crème brûlée"},
]


def pocket() -> TokenizerParts:
    return open_artifact("pocket://").load_tokenizer()


def made(tokenizer: Callable[[], object]) -> Callable[[], TokenizerParts]:
    return lambda: text_models.parts(tokenizer(), CHATML)  # type: ignore[arg-type]  # cached functions without types


FAMILIES: dict[str, Callable[[], TokenizerParts]] = {
    "pocket": pocket,
    "stub": stub_tokenizer_parts,
    "byte level": made(text_models.byte_level),
    "sentencepiece": made(text_models.sentencepiece),
    "sentencepiece without prefix": made(lambda: text_models.sentencepiece(legacy=False)),
    "metaspace": made(text_models.metaspace),
}


def sent(parts: TokenizerParts) -> Tokenizer:
    """Through the bytes of a message, as a server gets it."""
    side = TokenizerPayload.of(parts)
    received = event_decoder().decode(event_encoder().encode(_loaded(side)))
    assert isinstance(received, Loaded)
    return Tokenizer(received.text.parts())


def _loaded(side: TokenizerPayload) -> Event:
    from lockstep.engine.loading import load_model
    from lockstep.engine.options import LoadOptions

    model, config = load_model("stub://x", LoadOptions())
    return Loaded("model", "x", "f", config, model.executor.geometry, {}, {}, {}, False, 0.0, side)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    parts = FAMILIES[request.param]()
    return Tokenizer(parts), sent(parts)


def test_texts_have_the_same_tokens(pair: tuple[Tokenizer, Tokenizer]) -> None:
    own, received = pair
    for text in TEXTS:
        assert received.encode(text) == own.encode(text)
        assert received.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)
    assert received.encode_plain(TEXTS) == own.encode_plain(TEXTS)
    assert received.vocab_size == own.vocab_size


def test_tokens_have_the_same_bytes_and_text(pair: tuple[Tokenizer, Tokenizer]) -> None:
    own, received = pair
    ids = list(range(own.vocab_size))
    assert own.token_bytes is not None
    assert received.token_bytes is not None
    assert [received.token_bytes.of(i) for i in ids] == [own.token_bytes.of(i) for i in ids]
    assert received.token_bytes.rules == own.token_bytes.rules
    for skip in (True, False):
        assert received.decode(ids, skip) == own.decode(ids, skip)
    assert received.special_token_ids == own.special_token_ids
    assert received.end_token_ids == own.end_token_ids
    assert [received.special_text(i) for i in ids] == [own.special_text(i) for i in ids]


def test_conversations_have_the_same_prompts_and_thoughts(pair: tuple[Tokenizer, Tokenizer]) -> None:
    own, received = pair
    assert received.has_chat_template == own.has_chat_template
    prompt = own.encode_chat(MESSAGES)
    assert received.encode_chat(MESSAGES) == prompt
    assert received.render_chat(MESSAGES) == own.render_chat(MESSAGES)
    assert received.reasoning_after(prompt) == own.reasoning_after(prompt)


def test_grammars_see_the_same_vocabulary(pair: tuple[Tokenizer, Tokenizer]) -> None:
    own, received = pair[0].vocabulary(), pair[1].vocabulary()
    if own is None:
        assert received is None
        return
    assert received is not None
    assert received.tokens == own.tokens
    assert received.special_token_ids == own.special_token_ids
    assert received.eos_token_id == own.eos_token_id


def test_how_a_reranker_scores_reaches_the_server() -> None:
    parts = replace(pocket(), answer_ids=(5,), has_raw_scores=True)
    received = sent(parts).parts
    assert (received.answer_ids, received.has_raw_scores) == ((5,), True)
