"""A conversation at the terminal with any backend: messages, answers and their figures, and the commands of a chat.

On a terminal thoughts are dimmed and apart; a pipe gets content only.
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

GREETING = "Chat with {}. Type a message. /help lists the commands, Ctrl-C stops an answer, /bye or Ctrl-D leaves."
MAX_LOADED_BYTES = 1 << 24
"""Of a conversation that is read from a file."""
ANY_VOCABULARY = 1 << 31
"""For checks that need no model."""
_UNSET = "default"

Message = dict[str, str]


@dataclass(slots=True)
class ChatAnswer:
    """An answer as far as it came; who gives it fills in what is known of it."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None where that cannot be known."""
        if self.output_tokens is None or self.output_tokens < 2 or self.ttft_s is None or self.total_s is None:
            return None
        return (self.output_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def figures(self) -> str:
        """A line of them."""
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
    """A model, here or elsewhere. It remembers no conversation."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def has_roles(self) -> bool:
        """False: the last message is completed as it is."""
        ...

    @property
    def defaults(self) -> Mapping[str, object]:
        """Sampling parameters in force where none is set, as far as they are known here."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Facts of the model that `/show` lists, by name."""
        ...

    def ask(self, messages: Sequence[Message], params: SamplingParams, answer: ChatAnswer) -> Generator[Piece]:
        """Give the answer to a conversation in pieces; closing it, or an interrupt in it, ends the generation."""
        ...


def write_answer(
    answerer: Answerer,
    messages: Sequence[Message],
    params: SamplingParams,
    answer: ChatAnswer,
    writer: AnswerWriter | None,
) -> None:
    """Ask, and write what comes; also of an answer that is interrupted or fails, all that was written is in it."""
    started_s = time.perf_counter()
    try:
        with closing(answerer.ask(messages, params, answer)) as pieces:
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
    """The prompt that ``-p`` means; ``-`` is standard input. UsageError: it is not in UTF-8."""
    return whole_text(sys.stdin.read() if given == "-" else given, "the prompt")


def system_of(given: str | None) -> str | None:
    """The system message that ``--system`` means; UsageError: it is not in UTF-8."""
    return None if given is None else whole_text(given, "--system")


def whole_text(text: str, what: str) -> str:
    """The text; UsageError where a byte of it was none of the terminal's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = ascii(text[error.start : error.end])
        raise UsageError(f"{what} is not UTF-8 at character {error.start} ({shown}); write it in UTF-8") from None
    return text


class Conversation:
    """Messages so far, and the parameters of the next answer."""

    def __init__(self, answerer: Answerer, params: SamplingParams, system: str | None, *, is_verbose: bool) -> None:
        self._answerer = answerer
        self.params = params
        self.is_verbose = is_verbose
        self.messages: list[Message] = []
        """Without the system message."""
        self._system: str | None = None
        self.system = system

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._answerer.model

    @property
    def has_roles(self) -> bool:
        """False: each message is completed on its own."""
        return self._answerer.has_roles

    def facts(self) -> dict[str, str]:
        """Lines of `/show`, by name: the model, the conversation and every parameter in force."""
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
            raise UsageError("/system or --system needs a chat template: the model has none, or --raw turned it off")
        self._system = text

    def transcript(self) -> list[Message]:
        """All messages, as a chat completion's request has them."""
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return first + self.messages

    def ask(self, text: str, writer: AnswerWriter | None, answer: ChatAnswer) -> None:
        """Have a message answered. It is not yet remembered."""
        message = {"role": "user", "content": whole_text(text, "the message")}
        messages = [*self.transcript(), message] if self.has_roles else [message]
        write_answer(self._answerer, messages, self.params, answer, writer)

    def remember(self, text: str, answer: ChatAnswer) -> None:
        """A message and its answer, as far as it came."""
        if self.has_roles:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]


def answer_one(conversation: Conversation, prompt: str) -> None:
    """Answer the prompt of ``-p``; an interrupt ends the program."""
    answer = ChatAnswer()
    conversation.ask(prompt_of(prompt), AnswerWriter(), answer)
    print(flush=True)
    if conversation.is_verbose:
        _print_note(answer.figures)


def converse(conversation: Conversation) -> None:
    """Talk until the end of input.

    Raises:
        LockstepError: a message was refused, and standard input is not a terminal.
    """
    with _reader() as reader:
        if reader.is_terminal:
            _print_note(GREETING.format(conversation.model))
            if not conversation.has_roles:
                _print_note("There is no chat template: each message is completed on its own.")
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
                    _say(conversation, reader, unquoted(line[1:] if line.startswith("//") else line))
            except LockstepError as error:
                if not reader.is_terminal:
                    raise
                _print_note(f"error: {error}")


@contextmanager
def _reader() -> Iterator[Reader]:
    """A person, if one sits there and sees something; else a pipe."""
    is_seen = sys.stdout.isatty() or sys.stderr.isatty()
    if not (sys.stdin.isatty() and is_seen and threading.current_thread() is threading.main_thread()):
        yield Pipe()
        return
    ctrl_c = CtrlC()
    with ctrl_c.caught():
        yield Terminal(list(COMMANDS), ctrl_c)


def _say(conversation: Conversation, reader: Reader, text: str) -> None:
    """Answer a message. An answer that Ctrl-C stopped is remembered if it has words: templates expect some."""
    answer, is_stopped = ChatAnswer(), False
    try:
        with reader.stoppable():
            conversation.ask(text, AnswerWriter(), answer)
    except KeyboardInterrupt:
        if not reader.is_terminal:
            raise
        is_stopped = True
    print(flush=True)
    is_kept = bool(answer.text.strip()) or not is_stopped
    if is_kept:
        conversation.remember(text, answer)
    if is_stopped:
        _print_note("(stopped)" if is_kept else "(stopped before the first word: the message is not remembered)")
    elif conversation.is_verbose:
        _print_note(answer.figures)


def _print_note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """Meaning of a line that begins with a slash."""

    usage: str
    help: str
    run: Callable[[Conversation, str], None] | None
    """With what follows the word. None: leave."""


def _run_command(conversation: Conversation, line: str) -> bool:
    """Do what a line commands; True: leave. UsageError: it commands nothing that is known."""
    word, *rest = line.split(maxsplit=1)
    command = COMMANDS.get(word)
    if command is None:
        near = nearest(word, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else "/help lists them all."
        raise UsageError(f"there is no command {word}. {hint} To send a message that begins so, type /{word}")
    if command.run is not None:
        command.run(conversation, "".join(rest))
    return command.run is None


def _help(conversation: Conversation, rest: str) -> None:
    shown = {command.usage: command.help for command in COMMANDS.values()} | {
        '"""': 'Begins a message of several lines; """ at a line\'s end ends it.',
        "//TEXT": "Sends /TEXT as a message.",
        "Ctrl-C": "Stops an answer, whose words so far are kept; at the prompt, twice, leaves.",
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
    """A text, or a JSON string or list of strings."""
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
        raise UsageError(f"there is no parameter {name}. {hint}There are {', '.join(SETTINGS)}")
    if not value:
        for each in [name] if name else SETTINGS:
            _print_note(f"  {each:18}  {_shown(getattr(conversation.params, each))}")
        return
    changed = replace(conversation.params, **{name: _setting(name, value)})
    changed.validate(ANY_VOCABULARY)
    conversation.params = changed


def _setting(name: str, text: str) -> Any:
    """The value of a parameter; UsageError states what it must be."""
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
    """Write the transcript, for its owner's eyes; a file that exists is replaced only by --force."""
    is_forced = rest.startswith("--force ")
    path = _path_of(rest.removeprefix("--force "), "/save")
    if not conversation.has_roles:
        raise UsageError("there is no conversation to save: each message is completed on its own")
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
    _print_note(f"{len(conversation.transcript())} messages are in {path}")


def _load(conversation: Conversation, rest: str) -> None:
    """Go on with a conversation as /save writes it."""
    path = _path_of(rest, "/load")
    if not conversation.has_roles:
        raise UsageError("no conversation can be loaded: each message is completed on its own")
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
            f'{path} is no conversation; it must be a list of {{"role": "user" or "assistant", "content": "..."}}, the '
            f"first of which may be of the system, of at most {MAX_LOADED_BYTES >> 20} MiB"
        )
    has_system = bool(messages) and messages[0]["role"] == "system"
    if any(message["role"] == "system" for message in messages[has_system:]):
        raise UsageError(f"{path} has a system message behind the first message")
    conversation.system = messages[0]["content"] if has_system else None
    conversation.messages = messages[has_system:]
    _print_note(f"{len(messages)} messages were read from {path}")


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
        raise UsageError(f"{command} needs a file: {command} FILE")
    return Path(name).expanduser()


_LEAVE = Command("/bye, /exit, /quit", "Leave.", None)
_HELP = Command("/help, /?", "Show this.", _help)
COMMANDS: dict[str, Command] = {
    "/help": _HELP,
    "/?": _HELP,
    "/clear": Command("/clear", "Forget the conversation, but not the system message.", _clear),
    "/system": Command("/system [TEXT]", f"Set the system message, or show it; {_UNSET} takes it away.", _system),
    "/set": Command("/set [NAME [VALUE]]", f"Set a parameter, or show all; {_UNSET} takes it back.", _set),
    "/show": Command("/show", "Show the model, its context, its template and the parameters in force.", _show),
    "/save": Command("/save [--force] FILE", "Write the conversation as JSON: a request's messages.", _save),
    "/load": Command("/load FILE", "Go on with a conversation that was saved.", _load),
    "/bye": _LEAVE,
    "/exit": _LEAVE,
    "/quit": _LEAVE,
}
