"""The convention of the pages: which blocks there are, what marks mean, and what a page can say wrongly."""

from __future__ import annotations

import re

import pytest

from tests.documents.pages import ROOT, PageError, blocks_of
from tests.documents.walking import CommandFailedError, compare, needs_shell, programs_of

FENCE = "```"


def page(*lines: str) -> str:
    return "\n".join(lines)


def test_a_shell_block_is_its_commands_without_comments_and_with_their_continuations() -> None:
    [block] = blocks_of("p", page(FENCE, "# a comment", "lockstep ps", "", "curl \\", "  -s", FENCE))
    assert [(command.text, command.line) for command in block.commands()] == [("lockstep ps", 3), ("curl \\\n  -s", 5)]


def test_after_a_prompt_the_other_lines_are_what_is_printed() -> None:
    [block] = blocks_of("p", page(FENCE, "$ lockstep ps", "a", "b", "$ lockstep top --once", FENCE))
    assert [(command.text, command.shown) for command in block.commands()] == [
        ("lockstep ps", ("a", "b")),
        ("lockstep top --once", ()),
    ]


def test_a_text_that_a_command_reads_is_part_of_it() -> None:
    [block] = blocks_of("p", page(FENCE, "cat > x <<'END'", "lockstep ps", "END", "lockstep ps", FENCE))
    assert [command.text for command in block.commands()] == ["cat > x <<'END'\nlockstep ps\nEND", "lockstep ps"]


def test_a_mark_means_the_block_below_it_or_the_commands_that_it_names() -> None:
    marks = ("<!-- run: slow: `bench` -->", "<!-- run: by hand: `drain`, because it needs two machines -->")
    [block, other] = blocks_of("p", page(*marks, FENCE, "lockstep bench", "ps --drain x", "ps", FENCE, FENCE, FENCE))
    assert (block.marked("slow", "lockstep bench"), block.marked("slow", "ps")) == (True, False)
    assert (block.marked("by hand", "ps --drain x"), block.marked("by hand", "ps")) == (True, False)
    assert other.marks == ()
    [whole] = blocks_of("p", page("<!-- run: by hand, because docker builds it -->", FENCE, "docker", FENCE))
    assert whole.marked("by hand", "docker")
    assert whole.marks[0].reason == "docker builds it"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("<!-- run: by hand -->", FENCE, "docker", FENCE), "p:1: what is run by hand says why"),
        (("<!-- run: never -->", FENCE, "docker", FENCE), "p:1: `run: never` is no mark"),
        (("<!-- run: slow -->", "a text", FENCE, FENCE), "p:2: a mark `run:` stands above no block"),
        (("<!-- run: slow: `gone` -->", FENCE, "lockstep ps", FENCE), "p:3: a mark `slow` means 'gone'"),
        ((f"{FENCE}klingon", FENCE), "p:2: nobody knows how to run 'klingon'"),
    ],
)
def test_blocks_that_cannot_be_run_are_rejected_with_their_line(lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(PageError, match=re.escape(message)):
        blocks_of("p", page(*lines))


def test_what_is_shown_is_what_is_printed() -> None:
    compare(["- three of 4", "", "it took ... s"], "first\n  three of 4\nit took 3.1 s\nlast")
    with pytest.raises(CommandFailedError, match="the page shows 'b'"):
        compare(["a", "b"], "b\na\n")


def test_programs_and_shell_operators_are_distinguished_from_arguments() -> None:
    assert programs_of("curl -s 'localhost:9000/v1/events?a&b' | jq -c '.x'  # and && more") == ["curl", "jq"]
    assert programs_of("openssl rand > secret && chmod 600 secret") == ["openssl", "chmod"]
    assert programs_of('lockstep bench peers --peers "" --no-grid') == ["lockstep"]
    assert needs_shell("curl x > y")
    assert not needs_shell("lockstep serve 'a?b&c'   # a && b")


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions.md"])
def test_files_that_are_named_exist(name: str) -> None:
    """By their path from the repository, from the package, or from the folder of either's rooms."""
    named = set(re.findall(r"`([\w/]+/[\w/]*\.py)`", (ROOT / name).read_text()))
    assert [
        path for path in sorted(named) if not any((base / path).exists() for base in (ROOT, ROOT / "src" / "lockstep"))
    ] == []


def test_documented_counts_and_commands_of_engines_exist() -> None:
    """Each name of the table of counts and commands."""
    from lockstep import Engine

    table = (ROOT / "docs" / "python.md").read_text().split("## Counts and commands")[1].split("## ")[0]
    names = re.findall(r"`(\w+)(?:\([^)`]*\))?`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))
    assert len(names) >= 15
    assert [name for name in names if not hasattr(Engine, name)] == []
