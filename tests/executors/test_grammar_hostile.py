"""A hostile constraint ends in words: it neither hangs nor ends the process, and its message says what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import pytest

from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, RequestFailedError
from lockstep.executors.constraint import Constraint
from lockstep.executors.grammar_compiler import GrammarCompiler
from tests.engine import text_models


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(text_models.parts(text_models.byte_level()))
    return GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.end_token_ids)


def nested(levels: int) -> str:
    return '{"items":' * levels + "true" + "}" * levels


def chain(length: int, link: Mapping[str, object] | None = None) -> Mapping[str, object]:
    """Definitions that refer to the next one, the last to the first."""
    at = [{"$ref": f"#/$defs/{index % length}"} for index in range(length + 1)]
    return {
        **at[0],
        "$defs": {
            str(index): at[index + 1] if link is None else {"properties": {"x": at[index + 1]}}
            for index in range(length)
        },
    }


def submit(compiler: GrammarCompiler, constraint: Constraint) -> None:
    constraint.validate()
    compiler.build(constraint)


_regex, _schema, _lark = Constraint.regex, Constraint.json_schema, Constraint.lark
HOSTILE: Mapping[str, tuple[Constraint, str]] = {
    "repetition of a repetition": (_regex("(a{1000}){1000}"), "too many expressions"),
    "nine to the fortieth": (_regex("(" * 40 + "a" + "{9})" * 40), "too many expressions"),
    "alternatives": (_regex("|".join(f"a{index}" for index in range(100_000))), "at most 65536"),
    "groups": (_regex("(" * 30_000 + "a" + ")" * 30_000), "nest"),
    "look-ahead": (_regex("(?=a)b"), "look-around"),
    "back-reference": (_regex(r"(a)\1"), "backreferences are not supported"),
    "nothing fits": (_regex(r"[^\x00-\U0010FFFF]"), "this model's tokens cannot satisfy it"),
    "not JSON": (_schema('{"type":'), "EOF while parsing"),
    "unknown type": (_schema({"type": "text"}), "Invalid type: text"),
    "unsupported keyword": (_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "always false": (_schema("false"), "Unsatisfiable"),
    "deep nesting": (_schema(nested(5_000)), "recursion limit"),
    "10 MB": (_schema('{"enum": ["' + "x" * 10_000_000 + '"]}'), "at most 65536"),
    "cycle": (_schema(chain(2)), "this model's tokens cannot satisfy it"),
    "long cycle": (_schema(chain(1_800)), "this model's tokens cannot satisfy it"),
    "remote reference": (_schema({"$ref": "https://example.com/x"}), "example.com"),
    "alternatives to the twentieth": (
        _schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(20)]}),
        "too large",
    ),
    "pattern in a schema": (_schema({"type": "string", "pattern": "^((a{100}){100}){100}$"}), "too many expressions"),
    "unknown rule": (_lark("start: foo"), "unknown name"),
    "no grammar": (_lark("start = %%"), "lexer error"),
    "itself": (_lark("start: start"), "this model's tokens cannot satisfy it"),
    "brackets": (_lark("start: " + "(" * 30_000 + '"a"' + ")" * 30_000), "too deeply nested"),
    "import of a file": (_lark("%import ../../etc/passwd.INT\nstart: INT"), "cannot be used"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_ends_in_a_clear_error(compiler: GrammarCompiler, name: str) -> None:
    constraint, words = HOSTILE[name]
    with pytest.raises(InvalidParameterError, match=words) as caught:
        submit(compiler, constraint)
    assert caught.value.param == "constraint"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4_500)) + '\nr4500: "x"'),
        Constraint.lark("start: R0\n" + "\n".join(f'R{i}: R{i + 1} "x"|"y"' for i in range(2_500)) + '\nR2500: "x"'),
        Constraint.lark("start: r0\n" + "\n".join(f'r{i}: r{i + 1} "x"|"y"' for i in range(2_500)) + '\nr2500: "x"'),
        Constraint.json_schema(chain(1_290, {})),
        Constraint.lark("start: " + " ".join(['("x"|"y")?'] * 4_000)),
    ],
    ids=["rules", "terminals", "left recursion", "objects", "options"],
)
def test_as_deep_as_the_size_allows_does_not_end_the_process(compiler: GrammarCompiler, constraint: Constraint) -> None:
    """On the usual stack of 8 MB each of these is a segmentation fault, whether it is refused in the end or not."""
    constraint.validate()
    with contextlib.suppress(InvalidParameterError, RequestFailedError):
        (grammar,) = compiler.build(constraint)
        for _ in range(3):
            if grammar.is_complete:
                break
            grammar.accept(int(np.flatnonzero(np.unpackbits(grammar.allowed(), bitorder="little"))[0]), 15)
