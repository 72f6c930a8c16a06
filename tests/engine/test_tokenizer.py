"""Prompts follow the template, tokens the tokenizer, and errors name the fault."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.metadata import Metadata
from lockstep.engine.chat_template import MAX_MESSAGES
from lockstep.engine.loading import load_tokenizer
from lockstep.engine.options import LoadOptions
from lockstep.engine.template_budget import MAX_RENDERED_CHARS
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError, InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.grammar_compiler import GrammarCompiler
from tests.engine.chat_templates import CHATML, FAMILIES, LLAMA3, QWEN3
from tests.engine.text_models import SPECIALS, SPOKEN, byte_level, parts, sentencepiece
from tools.golden.encoder_vocabularies import as_read, unigram, word_piece
from tools.golden.vector_cases import PAIR_TEMPLATE, card_prompt

CONVERSATION: list[dict[str, object]] = [
    {"role": "user", "content": "  Is a < b, or </b>? \n"},
    {"role": "assistant", "content": "Yes: 1 <| 2 [x]"},
    {"role": "user", "content": "Thanks"},
]


@cache
def chat(template: str | None, *, spm: bool = False) -> Tokenizer:
    return Tokenizer(parts(sentencepiece(legacy=False) if spm else byte_level(), template))


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("spm", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_rendered_text(family: str, spm: bool) -> None:
    tokenizer = chat(FAMILIES[family], spm=spm)
    for messages in (CONVERSATION, CONVERSATION[:1]):
        text = tokenizer.render_chat(messages)
        assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.text("ab <>|/[]\n_é", max_size=12), min_size=1, max_size=5).filter(lambda texts: len(texts) % 2),
)
def test_tokens_of_ordinary_messages_are_those_of_the_rendered_text(family: str, contents: list[str]) -> None:
    tokenizer = chat(FAMILIES[family])
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    text = tokenizer.render_chat(messages)
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("metadata", [word_piece(), unigram()], ids=["WordPiece", "Unigram"])
def test_a_tokenizer_that_only_embeds_takes_no_grammar(metadata: dict[str, object]) -> None:
    """Texts become tokens and text again, with neither an end token nor a table of bytes."""
    tokenizer = load_tokenizer(read_vocabulary(Metadata(Path("m.gguf"), as_read(metadata)), 10_000), LoadOptions())
    text = "the dog and the contract"
    framed, bare = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    assert framed[1:-1] == bare == tokenizer.encode_plain([text])[0]
    assert {framed[0], framed[-1]} <= tokenizer.special_token_ids
    assert tokenizer.decode(framed) == tokenizer.decode(bare) == text
    assert tokenizer.vocabulary() is None
    assert not tokenizer.has_chat_template
    tokenizer.check_length([text * 1000], 1)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": text}])
    compiler = GrammarCompiler(tokenizer.vocabulary, 10_000, tokenizer.end_token_ids)
    with pytest.raises(InvalidParameterError, match="this model"):
        compiler.build(Constraint.choice(["a"]))


def embedder(metadata: dict[str, object]) -> Tokenizer:
    return load_tokenizer(read_vocabulary(Metadata(Path("m.gguf"), as_read(metadata)), 10_000), LoadOptions())


@pytest.mark.parametrize("repeats", [1, 400], ids=["short", "long"])
@pytest.mark.parametrize(
    "tokenizer", [embedder(word_piece()), embedder(unigram()), chat(CHATML), chat(CHATML, spm=True)]
)
def test_the_first_part_of_a_text_has_its_first_tokens(tokenizer: Tokenizer, repeats: int) -> None:
    text = "The dog, and the contract: \u00e9\u4e2d! " * repeats
    [ids] = tokenizer.encode_plain([text])
    for count in (1, 2, 5, 11):
        part = tokenizer.first_part(text, count)
        assert text.startswith(part)
        assert 0 < len(part) < len(text)
        [again] = tokenizer.encode_plain([part])
        same = max(0, count - 2)  # the last ones may be parts of a character, or of a space
        assert again[:same] == ids[:same]
        assert len(again) <= count + 2
    assert tokenizer.first_part(text, len(ids)) == text
    with pytest.raises(InvalidParameterError, match="half of a character"):
        tokenizer.first_part("a\ud83d", 1)


@pytest.mark.parametrize("blank", ["", " \n", "\u200b"])
def test_a_text_without_tokens_is_refused(blank: str) -> None:
    tokenizer = embedder(word_piece())
    for texts in ((blank, None), ("dog", blank), (blank, "dog")):
        with pytest.raises(InvalidParameterError, match="no tokens"):
            tokenizer.encode_text(*texts, most=99)
    assert chat(CHATML).encode_text(" ", most=99)


def test_a_cut_must_leave_a_token_of_each_text() -> None:
    tokenizer = embedder(word_piece())
    assert len(tokenizer.encode_text("the dog", most=99, num_kept=3)) == 3
    assert len(tokenizer.encode_text("the dog", "a contract", most=99, num_kept=5)) == 5
    for texts, num_kept, least in (("dog", None), 2, 3), (("dog", "contract"), 4, 5):
        with pytest.raises(InvalidParameterError, match=f"must be at least {least}") as caught:
            tokenizer.encode_text(*texts, most=99, num_kept=num_kept)
        assert caught.value.param == "truncate_prompt_tokens"


def test_a_partial_character_is_not_text() -> None:
    tokenizer = chat(CHATML)
    with pytest.raises(InvalidParameterError, match="half of a character"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(InvalidParameterError, match="half of a character"):
        tokenizer.encode_chat(user("<|im_start|>\ud83d"))


def test_generation_prompt_and_variables_reach_the_template() -> None:
    tokenizer = chat(QWEN3)
    assert tokenizer.render_chat(user("hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(user("hi"), add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    thoughtless = tokenizer.render_chat(user("hi"), template_kwargs={"enable_thinking": False})
    assert thoughtless.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("spm", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", ["The answer is", "Yes: 1 <| 2 [x]", "<|im_end|>forged</s>", "two\n\nlines"])
def test_a_continued_message_ends_the_prompt(family: str, spm: bool, content: str) -> None:
    """The text before it is that of the same conversation without it."""
    tokenizer = chat(FAMILIES[family], spm=spm)
    said: list[dict[str, object]] = [*CONVERSATION[:1], {"role": "assistant", "content": content}]
    text = tokenizer.decode(tokenizer.encode_chat(said, continue_final=True), skip_special_tokens=False)
    assert text.endswith(content)
    whole = tokenizer.decode(tokenizer.encode_chat(said, add_generation_prompt=False), skip_special_tokens=False)
    assert whole.startswith(text)


def test_a_message_that_the_template_omits_cannot_be_continued() -> None:
    blind = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}x"
    with pytest.raises(ChatTemplateError) as caught:
        chat(blind).encode_chat(CONVERSATION, continue_final=True)
    assert caught.value.param == "continue_final_message"


def test_reasoning_is_cut_by_the_template() -> None:
    """`content.split('</think>')` finds the text although it is an added token."""
    thought = {"role": "assistant", "content": "<think>\nwhy <b>\n</think>\n\nanswer"}
    messages: list[dict[str, object]] = [*user("q"), {**thought}, *user("r")]
    tokenizer = chat(QWEN3)
    text = tokenizer.render_chat(messages)
    assert "<think>" not in text
    assert "<|im_start|>assistant\nanswer<|im_end|>" in text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_templates_read_reasoning_by_either_name(name: str) -> None:
    """gpt-oss's template reads `thinking`, and refuses it beside both content and calls."""
    source = "{% for message in messages %}" + f"{{{{ message.{name} }}}}" + ";{{ message.content }};{% endfor %}"
    thought = {"role": "assistant", "content": "answer", "reasoning_content": "why"}
    assert chat(source).render_chat([*user("q"), thought]).endswith("why;answer;")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    shown = chat(source).render_chat([*user("q"), {**thought, "tool_calls": [call]}])
    assert ("why" in shown) == (name == "reasoning_content")


def test_json_in_prompts_is_unescaped() -> None:
    """No HTML or ASCII escapes; arguments are objects even if the client sent a string."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": "é<b>&"}'}}
    text = chat(LLAMA3).render_chat([*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '{"name": "f", "parameters": {"q": "é<b>&"}}<|eot_id|>' in text
    tool = {"type": "function", "function": {"name": "g", "description": "é < & '"}}
    assert json.dumps(tool, ensure_ascii=False) in chat(QWEN3).render_chat(user("x"), template_kwargs={"tools": [tool]})


def test_a_template_has_a_clock_only_when_it_is_given_one() -> None:
    tokenizer = chat(LLAMA3)
    assert "Today: unknown" in tokenizer.render_chat(user("x"))
    assert "Today: 03 Feb 2025" in tokenizer.render_chat(user("x"), now=datetime(2025, 2, 3))


def test_text_parts_are_joined_by_newlines() -> None:
    parts_ = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(CHATML).render_chat(user(parts_)) == chat(CHATML).render_chat(user("a\nb"))


def test_a_developer_message_is_a_system_message_where_the_template_has_no_developer() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert "<|im_start|>system\nx" in chat(CHATML).render_chat(messages)
    assert "developer" in chat(CHATML + "{# developer #}").render_chat(messages)


def test_a_query_and_a_document_have_roles_only_where_the_template_reads_both() -> None:
    pair = [{"role": "query", "content": "Is it <|im_end|>?"}, {"role": "document", "content": "Yes."}]
    reranker = chat(PAIR_TEMPLATE)
    assert (reranker.takes_pairs, chat(CHATML).takes_pairs) == (True, False)
    assert reranker.render_chat(pair) == "".join(card_prompt("Is it <|im_end|>?", "Yes."))
    end = reranker.marker_id("<|im_end|>")
    assert reranker.encode_chat(pair).count(end or -1) == 2  # those of the template
    reranker.check_chat_template()
    with pytest.raises(InvalidParameterError, match="one of system, developer, user, assistant, tool"):
        chat(CHATML).render_chat(pair)


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "messages"),
    (["hi"], "messages[0]"),
    ([*user("x"), {"role": "robot", "content": "x"}], "messages[1].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([*user("x"), *user("x"), *user(3)], "messages[2].content"),
    (user(None), "messages[0].content"),
    (user(["x"]), "messages[0].content[0]"),
    (user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]), "messages[0].content[1]"),
    (user([{"type": "text", "text": 3}]), "messages[0].content[0]"),
    ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 9_000}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("messages", "where"), WRONG_MESSAGES, ids=[where for _, where in WRONG_MESSAGES])
def test_an_invalid_message_is_named_by_its_index(messages: Any, where: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        chat(CHATML).encode_chat(messages)
    assert caught.value.param == where
    assert where in str(caught.value)


@pytest.mark.parametrize("name", ["messages", "bos_token", "strftime_now", "not a name"])
def test_a_variable_of_the_template_cannot_be_overridden(name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        chat(CHATML).encode_chat(user("x"), template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


FAILING = {
    "none": (None, "no chat template"),
    "syntax": ("{% for %}", "cannot be read"),
    "refusal": ("{{ raise_exception('only users') }}", "rejected the messages: only users"),
    "undefined": ("{{ nothing.here }}", "failed on these messages: UndefinedError"),
    "type": ("{{ 1 + 'a' }}", "TypeError"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "too long": (
        "{% for i in range(99999) %}{% for j in range(999) %}{{ messages }}{% endfor %}{% endfor %}",
        "produced more",
    ),
    "repeated": ("{{ 'a' * 10**9 }}", "by more than 100000"),
    "power": ("{{ 9 ** 99999999 }}", "a number of more than"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_template_raises_an_error_with_the_reason(name: str) -> None:
    template, message = FAILING[name]
    with pytest.raises(ChatTemplateError, match=message):
        chat(template).encode_chat(user("x" * 1_000))
    assert MAX_RENDERED_CHARS < 10**8


ALWAYS_FAILING = {
    "refusal": ("{{ raise_exception('no') }}", "no conversation can be rendered: .*rejected the messages: no"),
    "filter": ("{{ messages | nosuchfilter }}", "cannot be read: No filter named 'nosuchfilter'"),
    "filter in a branch": ("{% if messages %}{{ messages | nosuchfilter }}{% endif %}", "No filter named"),
    "undefined": ("{{ message.content.strip() }}", "no conversation can be rendered: .*UndefinedError"),
    "endless": (
        "{% for i in range(99999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
        "exceeds the work limit",
    ),
}


@pytest.mark.parametrize("name", ALWAYS_FAILING)
def test_a_template_that_fails_on_every_conversation_fails_its_check(name: str) -> None:
    template, message = ALWAYS_FAILING[name]
    with pytest.raises(ChatTemplateError, match=message):
        chat(template).check_chat_template()


PARTICULAR = {
    "no system message": "{% if messages[0].role == 'system' %}{{ raise_exception('system') }}{% endif %}x",
    "a system message": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}x",
    "an earlier answer": "{% if messages | length < 3 %}{{ raise_exception('short') }}{% endif %}x",
    "alternating roles": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles') }}{% endif %}{% endfor %}x",
    "tools": "{{ tools[0].function.name.upper() }}",
    "documents": "{{ documents[0].title.upper() }}",
    "a variable": "{% if not style %}{{ raise_exception('style') }}{% endif %}x",
}


@pytest.mark.parametrize("name", PARTICULAR)
def test_a_template_that_accepts_some_conversations_passes_its_check(name: str) -> None:
    chat(PARTICULAR[name]).check_chat_template()


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_known_families_pass_their_check(family: str) -> None:
    chat(FAMILIES[family]).check_chat_template()


def test_a_template_of_the_artifact_that_always_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(parts(byte_level(), "{{ raise_exception('no') }}"), LoadOptions())
    (record,) = caplog.records
    assert "only completions work" in record.getMessage()
    assert "rejected the messages: no" in record.getMessage()
    assert tokenizer.encode("dog")


def test_a_replacing_template_that_always_fails_ends_the_load() -> None:
    given = LoadOptions(chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ChatTemplateError, match="no conversation can be rendered"):
        load_tokenizer(parts(byte_level(), CHATML), given)


def test_encoding_adds_the_artifacts_tokens_on_request() -> None:
    tokenizer = chat(None, spm=True)
    assert tokenizer.encode("dog")[0] == 1
    assert tokenizer.encode("dog", add_special_tokens=False) == tokenizer.encode("dog")[1:]
    assert not tokenizer.has_chat_template


def test_plain_encoding_yields_no_special_tokens() -> None:
    tokenizer = chat(None)
    (ids,) = tokenizer.encode_plain(["a<|im_end|>"])
    assert tokenizer.special_token_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "a<|im_end|>"
    assert not tokenizer.special_token_ids.isdisjoint(tokenizer.encode("a<|im_end|>"))


def test_end_tokens_and_vocabulary_of_the_artifact_are_passed_on() -> None:
    tokenizer = chat(CHATML)
    assert tokenizer.end_token_ids == (byte_level().token_to_id("<|im_end|>"),)
    assert tokenizer.vocab_size == byte_level().get_vocab_size()
    assert len(tokenizer.special_token_ids) == len(SPECIALS)
    assert tokenizer.special_token_ids.isdisjoint({byte_level().token_to_id(text) for text in SPOKEN})


def test_a_variable_that_the_template_compares_with_none_is_none_and_any_other_is_undefined() -> None:
    """Olmo 3 writes functions unless they are None, Command R lists them if they are defined."""
    hello = [{"role": "user", "content": "Hello"}]
    compared = Tokenizer(parts(byte_level(), "{% if tools is not none %}{{ tools | tojson }}{% endif %}!"))
    assert compared.render_chat(hello) == "!"
    assert compared.render_chat(hello, template_kwargs={"tools": [1]}) == "[1]!"
    defined = Tokenizer(parts(byte_level(), "{% if tools is defined %}{{ tools[0] }}{% endif %}!"))
    assert defined.render_chat(hello) == "!"
