"""Each format: a call, several calls, a call cut short and nonsense; and texts cut at any place."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.server.tools.call_formats import (
    FUNCTION_GEMMA,
    FUNCTOOLS,
    GEMMA4,
    GRANITE3,
    HERMES,
    LFM2,
    LLAMA3_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    OLMO3,
    PHI4_MINI,
    QWEN3_CODER,
    SMOLLM3_CODE,
    CallFormat,
    CallKind,
)
from lockstep.server.tools.parser import CallDelta, ContentDelta, ToolParser
from tests.server.tools.reading import NAMES, SCHEMAS, outcome, read

F = '{"name": "f", "arguments": {"a": 1}}'
P = '{"name": "f", "parameters": {"a": 1}}'
X = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
G = "<start_function_call>call:f{a:1}<end_function_call>"
ONE = [("f", '{"a": 1}')]
CASES: list[tuple[CallFormat, str, str | None, list[tuple[str, str]]]] = [
    (GRANITE3, f"<|tool_call|>[{F}]", "", ONE),
    (GRANITE3, f"<|tool_call|> [{F}, {F}]", "", ONE * 2),
    (GRANITE3, f"<|tool_call|>[{F[:-4]}", None, []),
    (GRANITE3, "<|tool_call|>none", None, []),
    (PHI4_MINI, f"<|tool_call|>[{F}]<|/tool_call|>", "", ONE),
    (PHI4_MINI, f"<|tool_call|>[{F}, {F}]<|/tool_call|>\nSo.", "So.", ONE * 2),
    (PHI4_MINI, f"<|tool_call|>[{F}]<|/tool", "<|/tool", ONE),
    (PHI4_MINI, f"<|tool_call|>[{F}<|/tool_call|>", "", ONE),
    (PHI4_MINI, f"<|tool_call|>[{F[:-5]}", None, []),
    (PHI4_MINI, "<|tool_call|>[f()]<|/tool_call|>", None, []),
    (FUNCTOOLS, f"functools[{F}]", "", ONE),
    (FUNCTOOLS, f"I use functools[{F}, {F}]", "I use", ONE * 2),
    (FUNCTOOLS, f"functools[{F[:-9]}", None, []),
    (FUNCTOOLS, "I know functools.", None, []),
    (OLMO3, "<function_calls>f(a=1)</function_calls>", "", ONE),
    (OLMO3, "So: <function_calls>\nf(a=1)\nf(a=1)\n</function_calls> ok", "So:ok", ONE * 2),
    (
        OLMO3,
        "<function_calls>f(s='it's', b=[True, None, {'k': \"v\"}],)",
        "",
        [("f", '{"s": "it\'s", "b": [true, null, {"k": "v"}]}')],
    ),
    (
        OLMO3,
        r"""<function_calls>f(s="a\"\n\x41\u00e9\d\/")</function_calls>""",
        "",
        [("f", r'{"s": "a\"\nA\u00e9\\d/"}')],
    ),
    (OLMO3, "<function_calls>f(a=007, b=-1_0, c=.5)", "", [("f", '{"a": 7, "b": -10, "c": 0.5}')]),
    (OLMO3, "<function_calls>f(a=1)\nand so on</function_calls>", "and so on</function_calls>", ONE),
    (OLMO3, "<function_calls>g(a=1)</function_calls>", None, []),
    (OLMO3, "<function_calls>f(1)</function_calls>", None, []),
    (OLMO3, "<function_calls>f(a=x)</function_calls>", None, []),
    (OLMO3, "<function_calls>f(a=inf)</function_calls>", None, []),
    (OLMO3, "<function_calls>f(a='cut o", None, []),
    (OLMO3, f"<function_calls>f(a={'[' * 99}", None, []),
    (LFM2, "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "", ONE),
    (LFM2, "<|tool_call_start|>[f(a=1), f(a=1)]<|tool_call_end|>Hm.", "Hm.", ONE * 2),
    (LFM2, "<|tool_call_start|>[f(a=1)<|tool_call_end|>", "", ONE),
    (LFM2, "<|tool_call_start|>f(a=1)<|tool_call_end|>", None, []),
    (LFM2, "<|tool_call_start|>[f(a=", None, []),
    (SMOLLM3_CODE, "<code>\nf(a=1)\nf(a=1)\n</code>", "", ONE * 2),
    (SMOLLM3_CODE, "<code>\nf(s='''it's\n\"x\"''')\n</code>", "", [("f", '{"s": "it\'s\\n\\"x\\""}')]),
    (SMOLLM3_CODE, "<code>\nx = f(a=1)\n</code>", None, []),
    (SMOLLM3_CODE, "<code>\nf(s='''cut", None, []),
    (QWEN3_CODER, f"<tool_call>\n{X}\n</tool_call>", "", ONE),
    (QWEN3_CODER, f"Hm.\n<tool_call>\n{X}\n</tool_call>\n<tool_call>\n{X}\n</tool_call>", "Hm.", ONE * 2),
    (QWEN3_CODER, f"<tool_call>{X}".replace("\n", ""), "", ONE),
    (
        QWEN3_CODER,
        "<tool_call><function=f><parameter=s>\n\n<b>1</b>\n\n</parameter><parameter=t>\n1\n</parameter></function>",
        "",
        [("f", '{"s": "\\n<b>1</b>\\n", "t": "1"}')],
    ),
    (QWEN3_CODER, f"<tool_call>{X.replace('1', 'many')}", "", [("f", '{"a": "many"}')]),
    (QWEN3_CODER, f"<tool_call>{X.replace('1', '1], b=[2')}", "", [("f", '{"a": "1], b=[2"}')]),
    (QWEN3_CODER, f"<tool_call>\n{F}\n</tool_call>", None, []),
    (QWEN3_CODER, f"<tool_call>\n{X[:40]}", None, []),
    (QWEN3_CODER, "<tool_call>\n<function=f>\n<thing>", None, []),
    (FUNCTION_GEMMA, G, "", ONE),
    (FUNCTION_GEMMA, f"Yes.{G}{G}", "Yes.", ONE * 2),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:f{s:<escape>{a}, 'b'\\n<escape>,o:{k:[<escape><escape>,true,null]}}",
        "",
        [("f", '{"s": "{a}, \'b\'\\\\n", "o": {"k": ["", true, null]}}')],
    ),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:f{o:{<escape>k: 1<escape>:{n:-0.5}},a:[1,<escape>x<escape>]}<end_function_call>",
        "",
        [("f", '{"o": {"k: 1": {"n": -0.5}}, "a": [1, "x"]}')],
    ),
    (FUNCTION_GEMMA, "<start_function_call>call:f{s:Tokyo}<end_function_call>", None, []),
    (FUNCTION_GEMMA, "<start_function_call>call:f{s:<escape>Tok", None, []),
    (FUNCTION_GEMMA, "<start_function_call>f{a:1}<end_function_call>", None, []),
    (GEMMA4, "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:f{a:1}<tool_call|>", "", ONE * 2),
    (GEMMA4, '<|tool_call>call:f{s:<|"|>"<|"|>,o:{<|"|>k<|"|>:1}}', "", [("f", '{"s": "\\"", "o": {"k": 1}}')]),
    (GEMMA4, "<|tool_call>call:f{s:", None, []),
    (GEMMA4, "<|tool_call>call f", None, []),
]
"""Format, text, its content (None: all of it), its calls."""


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CASES)
def test_calls_are_read_and_all_else_is_content(
    call_format: CallFormat, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert outcome(call_format, [text]) == expected
    assert outcome(call_format, text) == expected


@pytest.mark.parametrize(
    ("call_format", "text", "fragments"),
    [
        (OLMO3, "<function_calls>f(s='ab\\n", ["{", '"', "s", '": ', '"', "a"]),
        (LFM2, '<|tool_call_start|>[f(a=12, s="b', ['{"a": ', "12", ', "s": ', '"', "b"]),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=s>\nab\n</para", ['{"s": "', "ab"]),
        (FUNCTION_GEMMA, "<start_function_call>call:f{s:<escape>ab<esc", ['{"s": ', '"', "ab"]),
        (PHI4_MINI, '<|tool_call|>[{"name": "f", "arguments": {"s": "ab', ['{"s": "ab']),
    ],
    ids=lambda value: value.name if isinstance(value, CallFormat) else "",
)
def test_a_call_cut_short_has_streamed_its_arguments_so_far(
    call_format: CallFormat, text: str, fragments: list[str]
) -> None:
    parser = ToolParser(call_format, NAMES, lambda: "id", SCHEMAS)
    deltas = [delta for letter in text for delta in parser.append(letter)]
    assert not any(isinstance(delta, ContentDelta) for delta in deltas)
    streamed = "".join(delta.arguments for delta in deltas if isinstance(delta, CallDelta))
    assert streamed.startswith("".join(fragments))
    assert parser.calls == []


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", F, P, F[:-1],
    '{"name": "f"',
    ', "arguments": ', "{}", "{", "}", "[", "]", ",", ";", "f", "g", "get_weather", " ", "\n", '"', "\\", "é", "1",
    '{"name": "g", "arguments": {}}', '{"arguments": {"b": [1, ""]}, "name": "get_weather"}',
)  # fmt: skip
MARKUP = (
    *FRAGMENTS[12:28], "(", ")", "a=", "a:", "'", "'''", "\\'", "\\x4", "\\u12", "1_0", "True", "None", "f(a=1)",
    "f(s='", "get_weather(s='x')", "call:", "call:f{", "call:f{a:1}", "<escape>", "<esc", "<function=f>", "</function>",
    "<parameter=a>", "<parameter=s>", "</parameter>", "</param", "\n1\n", X,
)  # fmt: skip
"""Pieces of calls that are not JSON."""
FORMATS = (
    HERMES, LLAMA3_JSON, MISTRAL_LIST, MISTRAL_NAMED, GRANITE3, PHI4_MINI, FUNCTOOLS, OLMO3, LFM2, SMOLLM3_CODE,
    QWEN3_CODER, FUNCTION_GEMMA, GEMMA4,
)  # fmt: skip


def texts(call_format: CallFormat, most: int) -> st.SearchStrategy[str]:
    """Texts of pieces of calls, half of them after the marker that begins calls."""
    begin = call_format.begin + call_format.open
    own = [text for text in (*call_format.markers, begin, call_format.separator) if text]
    pieces = FRAGMENTS if call_format.kind in (CallKind.JSON, CallKind.NAMED) else MARKUP
    rest = st.lists(st.sampled_from((*pieces, *own)), max_size=most).map("".join)
    return st.tuples(st.sampled_from(("", begin)), rest).map("".join)


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda form: form.name)
@settings(max_examples=80)
@given(data=st.data(), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_cut_gives_the_same_and_nothing_is_lost(
    call_format: CallFormat, data: st.DataObject, cuts: list[int]
) -> None:
    text = data.draw(texts(call_format, 10))
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser, seen = read(call_format, [text[begin:end] for begin, end in pairwise(borders)])
    whole, seen_whole = read(call_format, [text])
    letters, seen_letters = read(call_format, text)
    assert parser.calls == whole.calls == letters.calls
    assert seen == seen_whole == seen_letters, "also what was announced and came to nothing"
    rest = text
    for letter in "".join(seen.content.split()):
        at = rest.find(letter)
        assert at >= 0, "content comes from the text, in order"
        rest = rest[at + 1 :]
    if not parser.calls:
        assert seen.content == text


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda form: form.name)
@settings(max_examples=30)
@given(data=st.data())
def test_shown_content_is_a_prefix_of_the_final_content(call_format: CallFormat, data: st.DataObject) -> None:
    text = data.draw(texts(call_format, 8))
    final = read(call_format, [text])[1].content
    parser = ToolParser(call_format, NAMES, lambda: "id", SCHEMAS)
    content = ""
    for letter in text:
        content += "".join(delta.text for delta in parser.append(letter) if isinstance(delta, ContentDelta))
        assert final.startswith(content)
