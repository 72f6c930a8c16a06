"""Conversation in a terminal with any backend: messages, answers with their stats, and the chat's commands.

A terminal shows the reasoning dimmed and separate from the answer. A pipe gets only the answer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from lockstep.cli.terminal import AnswerWriter, CtrlC, Piece, Pipe, Reader, Terminal, unquoted
from lockstep.errors import LockstepError, UsageError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.option_fields import option_types
from lockstep.shown import aligned
from lockstep.spelling import nearest

GREETING = "Chat with {}. Type a message. /help lists the commands, Ctrl-C stops an answer, /bye or Ctrl-D exits."
MAX_LOADED_BYTES = 1 << 24
"""Maximum size of a conversation's file."""
ANY_VOCABULARY = 1 << 31
"""Size of a vocabulary that contains every token id, for checks of parameters without a model."""
_UNSET = "default"

Message = dict[str, str]


@dataclass(slots=True)
class ChatAnswer:
    """Answer so far. The answerer sets the fields that it can measure; the others stay None."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None if they cannot be computed."""
        if self.output_tokens is None or self.output_tokens < 2 or self.ttft_s is None or self.total_s is None:
            return None
        return (self.output_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def stats(self) -> str:
        """Token counts, rate, time to first token and finish reason, as one line."""
        rate = self.tokens_per_s
        cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
        return (
            f"{_counted(self.prompt_tokens)} prompt tokens{cached}, {_counted(self.output_tokens)} new, "
            f"{'unknown' if rate is None else f'{rate:.1f}'} tokens/s, "
            f"first after {(self.ttft_s or 0.0) * 1e3:.0f} ms, ended by {self.finish_reason or 'nothing'}"
        )


def _counted(count: int | None) -> str:
    return "unknown" if count is None else str(count)


class Answerer(Protocol):
    """Model in this process or behind a server. It stores no conversation."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def has_roles(self) -> bool:
        """True if the model has a chat template; without one, only the last message is completed."""
        ...

    @property
    def defaults(self) -> Mapping[str, object]:
        """The model's default sampling parameters by name, as far as they are known."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Facts about the model by name, for `/show`."""
        ...

    def generate(self, messages: Sequence[Message], params: SamplingParams, answer: ChatAnswer) -> Generator[Piece]:
        """Generate the answer to a conversation in pieces. Closing the generator, or an interrupt, ends it."""
        ...


def write_answer(
    answerer: Answerer,
    messages: Sequence[Message],
    params: SamplingParams,
    answer: ChatAnswer,
    writer: AnswerWriter | None,
) -> None:
    """Generate an answer and write its pieces. If it is interrupted or fails, ``answer`` has all pieces so far."""
    started_s = time.perf_counter()
    try:
        with closing(answerer.generate(messages, params, answer)) as pieces:
            for piece in pieces:
                if answer.ttft_s is None and any(piece):
                    answer.ttft_s = time.perf_counter() - started_s
                answer.text += piece.text
                if writer is not None:
                    writer.write(piece)
    finally:
        if answer.total_s is None:
            answer.total_s = time.perf_counter() - started_s
        if writer is not None:
            writer.end()


def prompt_of(given: str) -> str:
    """Prompt of ``-p``; ``-`` reads standard input. UsageError if it is not UTF-8."""
    return whole_text(sys.stdin.read() if given == "-" else given, "the prompt")


def system_of(given: str | None) -> str | None:
    """System message of ``--system``; UsageError if it is not UTF-8."""
    return None if given is None else whole_text(given, "--system")


def whole_text(text: str, what: str) -> str:
    """Return a text; UsageError if a byte of it could not be decoded in the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[error.start : error.end])
        raise UsageError(f"{what} is not UTF-8 at character {error.start} ({shown}); write it in UTF-8") from None
    return text


class Conversation:
    """Messages of a conversation so far, and parameters of the next answer."""

    def __init__(self, answerer: Answerer, params: SamplingParams, system: str | None, *, is_verbose: bool) -> None:
        self._answerer = answerer
        self.params = params
        self.is_verbose = is_verbose
        self.messages: list[Message] = []
        """Messages without the system message."""
        self._system: str | None = None
        self.system = system

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._answerer.model

    @property
    def has_roles(self) -> bool:
        """True if the model has a chat template; without one, each message is completed alone."""
        return self._answerer.has_roles

    def facts(self) -> dict[str, str]:
        """Values of `/show` by name: the model, the conversation and the effective sampling parameters."""
        facts = {"model": self.model, **self._answerer.facts()}
        facts["system message"] = "none" if self._system is None else _shown(self._system)
        facts["messages"] = str(len(self.messages))
        defaults = self._answerer.defaults
        for name in SETTINGS:
            value = getattr(self.params, name)
            is_default = value == getattr(SamplingParams(), name)
            shown = _shown(defaults.get(name, value) if is_default else value)
            facts[name] = f"{shown} ({_UNSET})" if is_default and shown != _UNSET else shown
        return facts

    @property
    def system(self) -> str | None:
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not self.has_roles:
            raise UsageError("a system message requires a chat template: the model has none, or --raw disables it")
        self._system = text

    def transcript(self) -> list[Message]:
        """All messages in the form of a chat completion's request."""
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return first + self.messages

    def generate(self, text: str, writer: AnswerWriter | None, answer: ChatAnswer) -> None:
        """Generate and write the answer to a message. The message is not added to the conversation."""
        message = {"role": "user", "content": whole_text(text, "the message")}
        messages = [*self.transcript(), message] if self.has_roles else [message]
        write_answer(self._answerer, messages, self.params, answer, writer)

    def append(self, text: str, answer: ChatAnswer) -> None:
        """Append a message and its answer to the conversation; without a chat template, do nothing."""
        if self.has_roles:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]


def answer_one(conversation: Conversation, prompt: str) -> None:
    """Answer the prompt of ``-p``; an interrupt ends the program."""
    answer = ChatAnswer()
    conversation.generate(prompt_of(prompt), AnswerWriter(), answer)
    print(flush=True)
    if conversation.is_verbose:
        _print_note(answer.stats)


def converse(conversation: Conversation) -> None:
    """Read and answer messages until the end of input.

    Raises:
        LockstepError: a message was rejected, and standard input is not a terminal.
    """
    with _reader() as reader:
        if reader.is_terminal:
            _print_note(GREETING.format(conversation.model))
            if not conversation.has_roles:
                _print_note("There is no chat template: each message is completed alone, without earlier ones.")
        while True:
            try:
                line = reader.read().strip()
            except EOFError:
                return
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if _run_command(conversation, line):
                        return
                elif line:
                    _answer(conversation, reader, unquoted(line[1:] if line.startswith("//") else line))
            except LockstepError as error:
                if not reader.is_terminal:
                    raise
                _print_note(f"error: {error}")


@contextmanager
def _reader() -> Iterator[Reader]:
    """Reader for a terminal if input and some output are one, and otherwise for a pipe."""
    has_output = sys.stdout.isatty() or sys.stderr.isatty()
    if not (sys.stdin.isatty() and has_output and threading.current_thread() is threading.main_thread()):
        yield Pipe()
        return
    ctrl_c = CtrlC()
    with ctrl_c.caught():
        yield Terminal(list(COMMANDS), ctrl_c)


def _answer(conversation: Conversation, reader: Reader, text: str) -> None:
    """Answer a message. An answer that Ctrl-C stopped is retained unless it is empty, which templates reject."""
    answer, is_stopped = ChatAnswer(), False
    try:
        with reader.stoppable():
            conversation.generate(text, AnswerWriter(), answer)
    except KeyboardInterrupt:
        if not reader.is_terminal:
            raise
        is_stopped = True
    print(flush=True)
    is_retained = bool(answer.text.strip()) or not is_stopped
    if is_retained:
        conversation.append(text, answer)
    if is_stopped:
        _print_note("(stopped)" if is_retained else "(stopped before the first word; the message is discarded)")
    elif conversation.is_verbose:
        _print_note(answer.stats)


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """Command of a chat: a line that begins with a slash."""

    usage: str
    help: str
    run: Callable[[Conversation, str], None] | None
    """Function of the conversation and the rest of the line; None: the command ends the chat."""


def _run_command(conversation: Conversation, line: str) -> bool:
    """Run the command of a line; True if the chat ends. UsageError if there is no such command."""
    word, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(word)
    if command is None:
        near = nearest(word, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else "/help lists all commands."
        raise UsageError(f"there is no command {word}. {hint} To send a message that begins with it, type /{word}")
    if command.run is not None:
        command.run(conversation, "".join(rest))
    return command.run is None


def _help(conversation: Conversation, rest: str) -> None:
    shown = {command.usage: command.help for command in COMMANDS.values()} | {
        '"""': 'Begin a message of several lines; """ at the end of a line ends it.',
        "//TEXT": "Send /TEXT as a message.",
        "Ctrl-C": "Stop an answer, whose text so far is retained; twice at the prompt: exit.",
    }
    _print_note(aligned(shown.items(), "  "))
    _print_note(f"Parameters of /set: {', '.join(SETTINGS)}.")


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.messages.clear()


def _system(conversation: Conversation, rest: str) -> None:
    if not rest:
        _print_note("there is no system message" if conversation.system is None else conversation.system)
        return
    conversation.system = None if rest == _UNSET else whole_text(unquoted(rest), "the system message")


def _texts(text: str) -> tuple[str, ...]:
    """Stop strings of a setting: plain text, a JSON string or a JSON list of strings."""
    try:
        value = json.loads(text)
    except ValueError:
        return (text,)
    return tuple(value) if isinstance(value, list) else (value if isinstance(value, str) else text,)


SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "min_tokens", "stop", "ignore_eos"),
)
"""Fields of SamplingParams that ``/set`` changes."""


def _show(conversation: Conversation, rest: str) -> None:
    _print_note(aligned(conversation.facts().items(), "  "))


def _set(conversation: Conversation, rest: str) -> None:
    name, _, value = rest.removeprefix("parameter ").partition(" ")
    if name == "system":
        _system(conversation, value.strip())
        return
    name, value = name.replace("-", "_"), value.strip()
    if name and name not in SETTINGS:
        near = nearest(name, SETTINGS)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no parameter {name}. {hint}The parameters are {', '.join(SETTINGS)}")
    if not value:
        for each in [name] if name else SETTINGS:
            _print_note(f"  {each:18}  {_shown(getattr(conversation.params, each))}")
        return
    changed = replace(conversation.params, **{name: _setting(name, value)})
    changed.validate(ANY_VOCABULARY)
    conversation.params = changed


def _setting(name: str, text: str) -> Any:
    """Value of a sampling parameter; UsageError, with the valid values, if the text is invalid."""
    if text == _UNSET:
        return getattr(SamplingParams(), name)
    if name == "stop":
        return _texts(text)
    type_ = option_types(SamplingParams)[name]
    try:
        return type_.parse(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; it must be {type_.right()}, or {_UNSET}") from None


def _shown(value: object) -> str:
    return _UNSET if value is None or value == () else json.dumps(value, ensure_ascii=False)


def _save(conversation: Conversation, rest: str) -> None:
    """Write the transcript, readable by the user alone. Only --force replaces an existing file."""
    is_forced = rest.startswith("--force ")
    path = _path_of(rest.removeprefix("--force "), "/save")
    if not conversation.has_roles:
        raise UsageError("/save requires a chat template: without one there is no conversation")
    data = json.dumps(conversation.transcript(), ensure_ascii=False, indent=1).encode() + b"\n"
    beside = path.with_name(f"{path.name}.{os.getpid()}") if is_forced else path
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if is_forced:
            os.replace(beside, path)
    except FileExistsError:
        raise UsageError(f"{path} exists; /save --force {path} replaces it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    _print_note(f"saved {len(conversation.transcript())} messages to {path}")


def _load(conversation: Conversation, rest: str) -> None:
    """Continue a conversation of a file that /save wrote."""
    path = _path_of(rest, "/load")
    if not conversation.has_roles:
        raise UsageError("/load requires a chat template: without one there is no conversation")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LOADED_BYTES + 1)
        messages = json.loads(data) if len(data) <= MAX_LOADED_BYTES else None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        messages = None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UsageError(
            f'{path} is not a conversation; it must be a JSON list of {{"role": "user" or "assistant", '
            f'"content": "..."}}, with "system" permitted for the first one, of at most {MAX_LOADED_BYTES >> 20} MiB'
        )
    has_system = bool(messages) and messages[0]["role"] == "system"
    if any(message["role"] == "system" for message in messages[has_system:]):
        raise UsageError(f"{path} has a system message after the first message; only the first may be one")
    conversation.system = messages[0]["content"] if has_system else None
    conversation.messages = messages[has_system:]
    _print_note(f"loaded {len(messages)} messages from {path}")


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ("system", "user", "assistant")
        and isinstance(value["content"], str)
    )


def _path_of(text: str, command: str) -> Path:
    name = text.strip().strip("'\"")
    if not name:
        raise UsageError(f"{command} requires a file: {command} FILE")
    return Path(name).expanduser()


_EXIT = Command("/bye, /exit, /quit", "Exit.", None)
_HELP = Command("/help, /?", "Show this help.", _help)
COMMANDS: dict[str, Command] = {
    "/help": _HELP,
    "/?": _HELP,
    "/clear": Command("/clear", "Delete the conversation's messages, except the system message.", _clear),
    "/system": Command("/system [TEXT]", f"Set the system message, or show it; {_UNSET} removes it.", _system),
    "/set": Command("/set [NAME [VALUE]]", f"Set a parameter, or show all; {_UNSET} restores the default.", _set),
    "/show": Command("/show", "Show the model, its context, its template and the effective parameters.", _show),
    "/save": Command("/save [--force] FILE", "Save the conversation as JSON: a request's messages.", _save),
    "/load": Command("/load FILE", "Continue a saved conversation.", _load),
    "/bye": _EXIT,
    "/exit": _EXIT,
    "/quit": _EXIT,
}
