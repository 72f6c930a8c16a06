"""Reasoning and content are separated by the text alone, for any chunking, and tags are never emitted in part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from lockstep import LLM, AsyncEngine, EngineOptions, FinishReason, LoadOptions, SamplingParams
from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.output_rules import (
    MAX_HELD_BLANKS,
    THINK_TAGS,
    Reasoning,
    ReasoningSplitter,
    ThinkTags,
    tags_of_template,
)
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from tests.engine.chat_templates import CHATML, QWEN3
from tests.engine.text_models import byte_level, parts

TAGS = ThinkTags("<think>", "</think>")
HELLO: list[dict[str, object]] = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content.split('</think>')[-1] }}{% endfor %}<|assistant|>"
    "{% if open_thoughts %}<think>\n{% endif %}"
)


def split(pieces: Iterable[str], is_open: bool = False, tags: ThinkTags = TAGS) -> tuple[str, str]:
    splitter = ReasoningSplitter(Reasoning(tags, is_open))
    shown = [*map(splitter.append, pieces), splitter.flush()]
    return "".join(thoughts for thoughts, _ in shown), "".join(content for _, content in shown)


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "content"),
    [
        ("Hello", False, "", "Hello"),
        ("<think>\nwhy\n</think>\n\nHello\n", False, "why", "Hello\n"),
        ("\n <think>why</think>Hello", False, "why", "Hello"),
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("why\n</think>\n\nHello", True, "why", "Hello"),
        ("<think>\nwhy</think>Hello", True, "why", "Hello"),
        ("Hello <think>why</think>", False, "", "Hello <think>why</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>it ends inside \n", False, "it ends inside \n", ""),
        ("it ends inside </thi", True, "it ends inside </thi", ""),
        ("<think>a < b, </thin b </think>c", False, "a < b, </thin b", "c"),
        ("<thi", False, "", "<thi"),
        (" <thi", True, "<thi", ""),
        (" \n", False, "", " \n"),
        ("", True, "", ""),
        ("<<think>a</think>", False, "", "<<think>a</think>"),
        ("<think>a<</think>b", False, "a<", "b"),
    ],
)
def test_reasoning_is_split_from_content(text: str, is_open: bool, thoughts: str, content: str) -> None:
    assert split([text], is_open) == (thoughts, content)
    assert split(text, is_open) == (thoughts, content)


FRAGMENTS = ["<think>", "</think>", "<", "</", "</thi", "<th", "ink>", "think", "\n", " ", "a", "é"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@settings(max_examples=600)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8), is_open=st.booleans())
def test_any_chunking_gives_the_same_split_without_losses(text: str, cuts: list[int], is_open: bool) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(borders)]
    thoughts, content = split(pieces, is_open)
    assert (thoughts, content) == split([text], is_open)
    opening = r"\s*(?:<think>)?\s*" if is_open else r"\s*<think>\s*|"
    whole = rf"(?:{opening}){re.escape(thoughts)}(?:\s*</think>\s*)?{re.escape(content)}"
    assert re.fullmatch(whole, text), "white space and one pair of tags aside, the parts are the whole"


@settings(max_examples=300)
@given(text=TEXTS, is_open=st.booleans())
def test_emitted_text_is_never_revoked_and_has_no_partial_tag(text: str, is_open: bool) -> None:
    splitter = ReasoningSplitter(Reasoning(TAGS, is_open))
    final = split([text], is_open)
    thoughts = content = ""
    for char in text:
        more_thoughts, more_content = splitter.append(char)
        thoughts, content = thoughts + more_thoughts, content + more_content
        assert final[0].startswith(thoughts)
        assert final[1].startswith(content)


def test_withheld_text_is_bounded() -> None:
    splitter = ReasoningSplitter(Reasoning(TAGS, True))
    shown = sum(len(splitter.append(text)[0]) for text in ["a", *["\n" * 100] * 50])
    assert shown == 1 + 5000 - MAX_HELD_BLANKS
    assert split(["a", *["\n" * 100] * 50, "</think>"], True)[0] == "a" + "\n" * (5000 - MAX_HELD_BLANKS)


@pytest.mark.parametrize("tags", THINK_TAGS, ids=lambda tags: tags.begin)
def test_every_family_is_detected_by_its_template(tags: ThinkTags) -> None:
    assert tags_of_template(f"{{{{ content.split('{tags.end}') }}}}") == tags
    assert split(f"{tags.begin}a{tags.end}b", tags=tags) == ("a", "b")


def test_a_mark_of_a_special_token_and_a_word_is_found_where_special_tokens_have_no_text() -> None:
    """Gemma 4's: the detokenizer leaves out its two special tokens, and the word between them stays."""
    tags = tags_of_template("<|channel>thought\n<channel|>")
    assert tags is not None
    splitter = ReasoningSplitter(Reasoning(tags))
    pieces = [
        splitter.tag("<|channel>"),
        "thought",
        "\nwhy\n",
        splitter.tag("<channel|>"),
        splitter.tag("<turn|>"),
        "Hello",
    ]
    shown = [splitter.append(piece) for piece in pieces]
    assert ("".join(thoughts for thoughts, _ in shown), "".join(content for _, content in shown)) == ("why", "Hello")
    assert split(["thought", " through"], tags=tags) == ("", "thought through")


def test_a_model_without_reasoning_has_no_tags() -> None:
    tokenizer = Tokenizer(parts(byte_level(), CHATML))
    assert tokenizer.reasoning_after(tokenizer.encode_chat(HELLO)) is None
    assert Tokenizer(parts(byte_level(), None)).reasoning_after([1]) is None


def test_a_prompt_that_ends_inside_the_tags_opens_them() -> None:
    for template, is_open in ((QWEN3, False), (QWEN3 + "{{ '<think>\\n' }}", True)):
        tokenizer = Tokenizer(parts(byte_level(), template))
        assert tokenizer.reasoning_after(tokenizer.encode_chat(HELLO)) == Reasoning(TAGS, is_open)
    tokenizer = Tokenizer(parts(byte_level(), QWEN3))
    closed = tokenizer.encode_chat(HELLO, template_kwargs={"enable_thinking": False})
    assert tokenizer.reasoning_after(closed) == Reasoning(TAGS)


def options(template: str = TEMPLATE) -> LoadOptions:
    return LoadOptions(engine=EngineOptions(num_blocks=256), chat_template=template)


THINKING = "stub://a?field=%3Cthink%3E%0Awhy%20because%0A%3C/think%3E%0A%0Aroute"
LONG = SamplingParams(max_tokens=200)


def test_an_answer_has_separate_reasoning() -> None:
    with LLM(THINKING, options()) as llm:
        [output] = llm.chat(HELLO, LONG)
        assert (output.reasoning, output.text) == ("why because", "route=none")
        [whole] = llm.chat(HELLO, LONG, reasoning="off")
        assert (whole.reasoning, whole.text) == ("", "<think>\nwhy because\n</think>\n\nroute=none")
        assert llm.generate("hello", LONG)[0].text == whole.text, "a completion is the text as it is"
        with pytest.raises(InvalidParameterError, match="reasoning is 'on'; it must be one of auto, off"):
            llm.chat(HELLO, reasoning="on")


def test_stop_strings_look_at_content_only() -> None:
    with LLM(THINKING, options()) as llm:
        [output] = llm.chat(HELLO, SamplingParams(max_tokens=200, stop=("because", "=")))
    assert (output.reasoning, output.text) == ("why because", "route")
    assert (output.completions[0].finish_reason, output.completions[0].stop_reason) == (FinishReason.STOP, "=")


def test_an_answer_that_ends_inside_its_reasoning_has_no_content() -> None:
    with LLM(THINKING, options()) as llm:
        [output] = llm.chat(HELLO, SamplingParams(max_tokens=14))
    assert (output.reasoning, output.text) == ("why be", "")
    assert output.completions[0].finish_reason is FinishReason.LENGTH


async def test_a_stream_has_reasoning_and_content_in_separate_fields() -> None:
    async with AsyncEngine("stub://a?field=why%3C/think%3Eroute", options()) as engine:
        stream = engine.stream_chat(HELLO, LONG, template_kwargs={"open_thoughts": True})
        outputs = [output async for output in stream]
        answer = await engine.chat(HELLO, LONG, template_kwargs={"open_thoughts": True})
    assert "".join(output.reasoning for output in outputs) == "why" == answer.reasoning
    assert "".join(output.text for output in outputs) == "route=none" == answer.text
    assert not any(output.reasoning and output.text for output in outputs)


def test_tags_may_be_special_tokens_that_decoding_skips() -> None:
    library = Library.from_str(byte_level().to_str())
    library.add_special_tokens([AddedToken(text, special=True) for text in ("[THINK]", "[/THINK]")])
    tokenizer = Tokenizer(parts(library, "{{ messages[0].content }}[THINK][/THINK]"))
    detokenizer = Detokenizer(tokenizer)
    reasoning = tokenizer.reasoning_after([])
    assert reasoning is not None
    splitter = ReasoningSplitter(reasoning)
    shown = []
    for token in library.encode("[THINK]why[/THINK]an<|im_end|>swer").ids:
        text = detokenizer.append(token)
        shown.append(splitter.append(text or splitter.tag(detokenizer.special_text(token))))
    assert "".join(thoughts for thoughts, _ in shown) == "why"
    assert "".join(content for _, content in shown) == "answer"
