"""Calls and content are told apart by the text alone, wherever it is cut, and nothing of it is lost."""

from __future__ import annotations

import json

import pytest

from lockstep.engine.output_rules import MAX_HELD_BLANKS
from lockstep.server.tools.call_formats import HERMES, LLAMA3_JSON, MISTRAL_LIST, MISTRAL_NAMED, CallFormat
from lockstep.server.tools.parser import CallDelta, ContentDelta, ToolParser
from tests.server.tools.reading import NAMES, outcome, read

F = '{"name": "f", "arguments": {"a": 1}}'
P = '{"name": "f", "parameters": {"a": 1}}'


ONE = [("f", '{"a": 1}')]
CASES: list[tuple[CallFormat, str, str | None, list[tuple[str, str]]]] = [
    (HERMES, "Hello", "Hello", []),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", ONE),
    (HERMES, f"Let me see.\n\n<tool_call>\n{F}\n</tool_call>\n", "Let me see.", ONE),
    (HERMES, f"<tool_call>{F}</tool_call>\n<tool_call>\n{F}\n</tool_call>", "", ONE * 2),
    (HERMES, f"<tool_call>{F}<tool_call>{F}", "", ONE * 2),
    (HERMES, f"a <tool_call>{F}</tool_call> b", "ab", ONE),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ONE),
    (HERMES, '<tool_call>{"type": "function", "id": "x", "name": "f", "arguments": {}}', "", [("f", "{}")]),
    (HERMES, f"<tool_call>{P}</tool_call>", "", ONE),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{"s":"</tool_call> } \\" é"}}',
        "",
        [("f", '{"s":"</tool_call> } \\" é"}')],
    ),
    (HERMES, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', None, []),
    (HERMES, "<tool_call>\n{'name': 'f'}\n</tool_call>", None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f", "name": "f", "arguments": {}}', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}', None, []),
    (HERMES, '<tool_call>{"arguments": {"a": 1}}', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": "x"}', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut o', None, []),
    (HERMES, "<tool_call>", None, []),
    (HERMES, " <tool_call> \n", None, []),
    (HERMES, "a <tool", None, []),
    (HERMES, f"<tool_call>\n<tool_call>{F}", "<tool_call>\n", ONE),
    (HERMES, f"<tool_call>{F}\n</tool_c", "</tool_c", ONE),
    (HERMES, f'<tool_call>{{"name": "g"}}</tool_call>\n<tool_call>{F}', '<tool_call>{"name": "g"}</tool_call>', ONE),
    (HERMES, P, None, []),
    (LLAMA3_JSON, P, "", ONE),
    (LLAMA3_JSON, f" \n{P}; {P}", "", ONE * 2),
    (LLAMA3_JSON, f"{P}\n{P}", "", ONE * 2),
    (LLAMA3_JSON, f"<|python_tag|>{P}; {P}", "", ONE * 2),
    (LLAMA3_JSON, f"I call. <|python_tag|>{P}", "I call.", ONE),
    (LLAMA3_JSON, f"{P}; and so on", "; and so on", ONE),
    (LLAMA3_JSON, f"I would write {P}", None, []),
    (LLAMA3_JSON, '{"answer": 42}', None, []),
    (LLAMA3_JSON, '{"name": "Bob", "age": 3}', None, []),
    (LLAMA3_JSON, f"{' ' * (MAX_HELD_BLANKS + 1)}{P}", None, []),
    (MISTRAL_LIST, f"[TOOL_CALLS] [{F}]", "", ONE),
    (MISTRAL_LIST, f"[TOOL_CALLS][{F}, {F}]", "", ONE * 2),
    (MISTRAL_LIST, f"Well [TOOL_CALLS] [ {F} , {F} ] done", "Welldone", ONE * 2),
    (MISTRAL_LIST, f"[TOOL_CALLS] {F}", None, []),
    (MISTRAL_LIST, f"[TOOL_CALLS] [{F}, oh", ", oh", ONE),
    (MISTRAL_LIST, "see [1] and [TOOL_", None, []),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}', "", ONE),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}', "", [*ONE, ("get_weather", "{}")]),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", ONE),
    (MISTRAL_NAMED, "[TOOL_CALLS]f[CALL_ID]a b[ARGS]{}", None, []),
    (MISTRAL_NAMED, "[TOOL_CALLS]f[CALL_", None, []),
    (MISTRAL_NAMED, "[TOOL_CALLS]g[ARGS]{}", None, []),
    (MISTRAL_NAMED, "[TOOL_CALLS]f[ARGS]1", None, []),
    (MISTRAL_NAMED, '[TOOL_CALLS]f[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]f", ONE),
    (MISTRAL_NAMED, "[TOOL_CALLS]f[AR", None, []),
]
"""Format, text, its content (None: all of it), its calls."""


@pytest.mark.parametrize(("call_format", "text", "content", "calls"), CASES)
def test_calls_and_content_are_separated(
    call_format: CallFormat, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert outcome(call_format, [text]) == expected
    assert outcome(call_format, text) == expected


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(HERMES, NAMES, lambda: "call_x")
    assert parser.append('Hm.\n<tool_call>\n{"name": "f", "argum') == [ContentDelta("Hm.")]
    assert parser.append('ents": {"a"') == [CallDelta(0, '{"a"', "call_x", "f")]
    assert parser.append(": ") == [CallDelta(0, ": ")]
    assert parser.calls == []
    assert parser.append("1}") == [CallDelta(0, "1}")]
    assert parser.append("}") == []
    assert [call.arguments for call in parser.calls] == ['{"a": 1}']
    assert parser.append("\n</tool_call>") == []
    assert parser.flush() == []


def test_a_call_that_breaks_off_is_given_back_whole_as_content() -> None:
    parser, seen = read(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": oops', f"}}}} <tool_call>{F}"])
    assert seen.calls[0] == ["call_0", "f", '{"a": ']
    assert seen.content == '<tool_call>{"name": "f", "arguments": {"a": oops}}'
    assert [(call.index, call.id) for call in parser.calls] == [(1, "call_1")]


def test_without_functions_everything_is_content() -> None:
    parser = ToolParser(HERMES, (), lambda: "id")
    assert parser.append(" <tool_call>") == [ContentDelta(" <tool_call>")]
    assert parser.flush() == []


def test_held_back_white_space_is_limited() -> None:
    parser = ToolParser(HERMES, NAMES, lambda: "id")
    shown = sum(
        len(delta.text) for _ in range(50) for delta in parser.append("\n" * 100) if isinstance(delta, ContentDelta)
    )
    assert shown == 5000 - MAX_HELD_BLANKS


def test_a_name_may_be_written_in_escapes_but_not_without_end() -> None:
    escaped = "".join(f"\\u{ord(char):04x}" for char in "get_weather")
    assert outcome(HERMES, f'<tool_call>{{"name": "{escaped}"}}')[1] == [("get_weather", "{}")]
    parser = ToolParser(HERMES, NAMES, lambda: "id")
    deltas = parser.append('<tool_call>{"name": "' + "x" * 500)
    assert deltas, "an endless name is no call"


def cut(text: str, *, names: tuple[str, ...] = NAMES, is_forced: bool = False) -> tuple[ToolParser, str]:
    """A parser after an answer in hermes' format that was cut, and its content."""
    parser = ToolParser(HERMES, names, lambda: "call_0", is_forced=is_forced)
    deltas = [delta for piece in text for delta in parser.append(piece)] + parser.flush(is_cut=True)
    return parser, "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


@pytest.mark.parametrize(
    ("text", "arguments", "members"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "cut o', '{"a": "cut o', {"a": "cut o"}),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, {"b": true', '{"a": [1, {"b": ', {"a": [1, {}]}),
        ('<tool_call>{"name": "f", "arguments": {', "{", {}),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}', {"a": 1}),
    ],
)
@pytest.mark.parametrize("is_forced", [True, False])
def test_cut_answer_has_the_arguments_that_came(
    text: str, arguments: str, members: dict[str, object], is_forced: bool
) -> None:
    parser, content = cut(text, is_forced=is_forced)
    [call] = parser.calls
    assert (content, call.name, call.arguments, call.is_cut) == ("", "f", arguments, True)
    assert json.loads(bytes(call.arguments_object)) == members
    assert parser.num_unread == 0


@pytest.mark.parametrize("text", ["", "<tool", "<tool_call>", '<tool_call>\n{"name"', '<tool_call>{"name": "f"'])
def test_cut_answer_of_a_forced_call_shows_no_markup(text: str) -> None:
    parser, content = cut(text, names=("f",), is_forced=True)
    assert (content, [(call.name, call.arguments) for call in parser.calls]) == ("", [("f", "")])
    assert bytes(parser.calls[0].arguments_object) == b"{}"
    parser, content = cut(text, is_forced=True)
    assert (content, parser.calls) == ("", []), "of several functions none is known to be meant"
    assert cut(text)[1] == text, "where calls are free, it is text"


def test_cut_answer_keeps_the_calls_before_the_cut() -> None:
    parser, content = cut(f"<tool_call>{F}</tool_call>\n<tool_call>\n{{", names=("f",), is_forced=True)
    assert (content, [(call.arguments, call.is_cut) for call in parser.calls]) == ("", [('{"a": 1}', False)])


def test_arguments_with_half_a_character_are_passed_on_as_they_are_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d", "n": 123456789012345678901234567890}}</tool_call>'
    parser, seen = read(HERMES, [text])
    assert seen.content == ""
    assert bytes(parser.calls[0].arguments_object) == parser.calls[0].arguments.encode()


@pytest.mark.parametrize("text", ["<tool_call>no JSON</tool_call>", '<tool_call>{"name": "g", "arguments": {}}'])
def test_call_that_cannot_be_read_is_content_and_counted(text: str) -> None:
    parser, seen = read(HERMES, [text])
    assert (seen.content, parser.calls, parser.num_unread) == (text, [], 1)


def test_answer_that_breaks_the_reader_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of a reader costs the call, not the answer that was computed."""

    class Broken:
        def read(self, text: str) -> int:
            raise ZeroDivisionError

    monkeypatch.setattr("lockstep.server.tools.parser.reader_of", lambda *_: Broken())
    text = f"Well. <tool_call>{F}</tool_call> Then more."
    parser, seen = read(HERMES, [text[:30], text[30:]])
    assert (seen.content, parser.calls, parser.num_unread) == (text, [], 1)
