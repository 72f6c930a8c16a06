"""The way of one streamed chat request through the code, from its first byte to its last.

A server runs in this process as a user starts it, on a stub and with its worker in a thread. The interpreter's
profiling hook notes the functions that are entered while some requests are answered: several, since which tokens
share a wake-up is the clock's.

- A *step* is a function of ours that is entered by one in another file, through whatever libraries lie between, or by
  an event loop or a thread. Each counts once, however many tokens the answer has. What is entered just the same while
  no request is there is background, and does not count.
- A *station* is a step that holds the request or its answer, or a part: an argument or the result has the prompt's
  text or tokens, one of the request's parameters, or text or tokens of the answer.
- A *hop* is a station that hands what it holds on to another file: from it, other stations are entered. Those that
  are only asked about a request, or keep it, are the ends of the way. Who follows a value through the code opens a
  file at each hop.
- A *climb* is a way from one file to another that imports it: the value goes against the imports, by a callback, and a
  reader finds no name that leads on.
- A *representation* is a type of ours whose instances are handed to or by stations and hold a part of the request or
  the answer. Objects that were there for an earlier request are servants, and represent none.

Contents are recognised by rare values: a word in the prompt, a seed, a temperature, and a model whose name, which it
answers with, is of one letter that is nowhere else.
"""

from __future__ import annotations

import array
import ast
import collections
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORD, SEED, TEMPERATURE = "zqxjkvbw", 918273645, 0.73519
LETTER = "\u00a7"
LETTER_BYTES = frozenset(LETTER.encode())
MAX_DEPTH = 4
MAX_MEMBERS = 12
"""Of a container, so many are looked at."""
QUIET_S, GRACE_S = 1.5, 0.1
REQUESTS = 5
NO_FUNCTIONS = frozenset(["<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"])

Function = tuple[str, str]
"""File and qualified name."""


@dataclass(frozen=True, slots=True)
class Way:
    """What a traced request went through, in the order in which it came there."""

    steps: Sequence[Function]
    stations: Sequence[Function]
    hops: Sequence[Function]
    climbs: Sequence[tuple[str, str]]
    """Files, from and to."""
    representations: Sequence[str]
    num_modules: int
    """Modules of ours that the server had imported in the end."""

    @property
    def figures(self) -> dict[str, float]:
        return {
            "hops of a chat request": len(self.hops),
            "files that a chat request goes through": len({file for file, _ in self.stations}),
            "climbs of a chat request": len(self.climbs),
            "representations of a chat request": len(self.representations),
            "modules of ours that a server imports": self.num_modules,
        }

    def lines(self) -> Iterator[str]:
        """The figures, each station and each type."""
        yield from (f"{name}: {value:g}" for name, value in self.figures.items())
        yield f"steps over a border: {len(self.steps)} in {len({file for file, _ in self.steps})} files"
        for file, name in self.stations:
            yield f"  {'hop    ' if (file, name) in self.hops else 'station'} {file} {name}"
        yield from (f"  climb from {lower} to {upper}" for lower, upper in self.climbs)
        yield from (f"  representation {name}" for name in self.representations)


def way_of(root: Path) -> Way:
    """Trace requests in a process of its own, on the package under a root."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    steps, stations, hops = ([(file, name) for file, name in told[kind]] for kind in ("steps", "stations", "hops"))
    climbs = [(lower, upper) for lower, upper in told["climbs"]]
    return Way(steps, stations, hops, climbs, told["representations"], told["modules"])


class Tracer:
    """The profiling hook, and what it noted."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}{os.sep}"
        self.phase = "off"
        """``off``, ``idle``, ``before`` (earlier requests) or ``request``."""
        self.background: set[Function] = set()
        self.steps: dict[Function, bool] = {}
        """In the order of their first entry; whether each is a station."""
        self.hops: set[Function] = set()
        self.handed: set[tuple[Function, Function]] = set()
        """Who handed what it holds to whom."""
        self.representations: set[str] = set()
        self._servants: dict[int, object] = {}
        """Objects that were there for an earlier request, by id; kept, so that no other gets it."""

    def hook(self, frame: types.FrameType, event: str, value: object) -> None:
        if self.phase == "off" or event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._prefix) or code.co_name in NO_FUNCTIONS:
            return
        caller = self._caller(frame)
        if caller is not None and caller.f_code.co_filename == code.co_filename:
            return
        handed: Sequence[object] = (value,) if event == "return" else _arguments(frame)
        if self.phase == "idle":
            self.background.add(self._function(frame))
        elif self.phase == "before":
            for each in handed:
                self._remember(each, MAX_DEPTH)
        else:
            self._note(frame, caller, [each for each in handed if self._holds(each, MAX_DEPTH)])

    def _note(self, frame: types.FrameType, caller: types.FrameType | None, held: Sequence[object]) -> None:
        function = self._function(frame)
        self.steps[function] = self.steps.get(function, False) or bool(held)
        if held and caller is not None:
            giver = self._function(self._entry(caller))
            self.hops.add(giver)
            self.handed.add((giver, function))
        for value in held:
            for each in value if isinstance(value, list | tuple) else (value,):
                if _is_ours(each) and self._holds(each, MAX_DEPTH):
                    self.representations.add(f"{type(each).__module__}.{type(each).__qualname__}")

    def _function(self, frame: types.FrameType) -> Function:
        return (frame.f_code.co_filename.removeprefix(self._prefix), frame.f_code.co_qualname)

    def _entry(self, frame: types.FrameType) -> types.FrameType:
        """The frame by which its file was entered."""
        while (caller := self._caller(frame)) is not None and caller.f_code.co_filename == frame.f_code.co_filename:
            frame = caller
        return frame

    def _caller(self, frame: types.FrameType) -> types.FrameType | None:
        """The nearest frame of ours, through whatever libraries lie between; None: a loop or a thread."""
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self._prefix):
            caller = caller.f_back
        return caller

    def _holds(self, value: object, depth: int) -> bool:
        if isinstance(value, str):
            return WORD in value or (LETTER in value and "://" not in value)
        if isinstance(value, bytes | bytearray | memoryview):
            return WORD.encode() in bytes(value) or LETTER.encode() in bytes(value)
        if isinstance(value, float):
            return value == TEMPERATURE
        if isinstance(value, int):
            return value == SEED
        if _are_tokens(value):
            return True
        if depth == 0 or id(value) in self._servants:
            return False
        return any(self._holds(each, depth - 1) for each in _members(value))

    def _remember(self, value: object, depth: int) -> None:
        if depth > 0 and id(value) not in self._servants:
            if _is_ours(value):
                self._servants[id(value)] = value
            for each in _members(value):
                self._remember(each, depth - 1)


def _imported_files(package: Path) -> Mapping[str, Set[str]]:
    """Files of ours that each file of ours imports, by its path."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {node.module for node in imports if node.module and node.module.startswith("lockstep.")}
        found[path.relative_to(package).as_posix()] = {
            f"{name.partition('.')[2].replace('.', '/')}.py" for name in names
        }
    return found


def _climbs(handed: Set[tuple[Function, Function]], imported: Mapping[str, Set[str]]) -> list[tuple[str, str]]:
    """Ways into a file that imports, at whatever distance, the file that they come from."""

    @functools.cache
    def below(file: str) -> Set[str]:
        reached, left = set[str](), [file]
        while left:
            fresh = imported.get(left.pop(), set()) - reached
            reached |= fresh
            left += fresh
        return reached

    ways = {(giver, taker) for (giver, _), (taker, _) in handed}
    return sorted((giver, taker) for giver, taker in ways if giver in below(taker))


def _arguments(frame: types.FrameType) -> list[object]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    own = frame.f_locals
    return [own[name] for name in code.co_varnames[:count] if name in own]


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "lockstep"


def _are_tokens(value: object) -> bool:
    """Whether these are bytes, which the stub's tokens are, with the word among them or of the letter alone."""
    if not isinstance(value, list | tuple | array.array | collections.deque) and type(value).__name__ != "ndarray":
        return False
    numbers = [each for each in list(value)[:4096] if isinstance(each, int)]  # type: ignore[call-overload]  # iterable
    if not numbers or len(numbers) != min(len(value), 4096):  # type: ignore[arg-type]  # sized
        return False
    return set(numbers) <= LETTER_BYTES or WORD.encode() in bytes(each for each in numbers if 0 <= each < 256)


def _members(value: object) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from list(value.values())[:MAX_MEMBERS]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        yield from list(value)[:MAX_MEMBERS]
    elif isinstance(value, functools.partial):
        yield from (*value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
    elif _is_ours(value) and not isinstance(value, type):
        yield from list(getattr(value, "__dict__", {}).values())
        for class_ in type(value).__mro__:
            slots = getattr(class_, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__"):
                    yield getattr(value, name, None)
        for name in getattr(value, "__struct_fields__", ()):
            yield getattr(value, name, None)


def _ask(port: int, body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "m", "stream": True, **body}, ensure_ascii=False).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def _up(port: int) -> None:
    for _ in range(600):
        try:
            if b" 200 " in _ask(port, {"messages": [{"role": "user", "content": "up?"}]})[:20]:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the server did not come up")


def _question(words: str, seed: int, temperature: float) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
    return {"messages": messages, "seed": seed, "temperature": temperature, "max_tokens": 24}


def _drive(tracer: Tracer, port: int, failures: list[BaseException]) -> None:
    """Quiet time, earlier requests, and the request; then the server's end."""
    sys.setprofile(None)
    try:
        _up(port)
        time.sleep(QUIET_S / 3)
        tracer.phase = "idle"
        time.sleep(QUIET_S)
        tracer.phase = "before"
        for number in range(3):
            _ask(port, _question(f"earlier {number}", number, 0.5 + number))
            time.sleep(GRACE_S)
        for _ in range(REQUESTS):
            tracer.phase = "request"
            answer = _ask(port, _question(f"hello {WORD}", SEED, TEMPERATURE))
            assert b"[DONE]" in answer, answer
            assert LETTER.encode() in answer, answer
            time.sleep(GRACE_S)
        tracer.phase = "off"
    except BaseException as error:
        failures.append(error)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve, ask, and print what was noted as JSON."""
    import lockstep
    from lockstep.cli.main import invoke

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tracer, failures = Tracer(Path(lockstep.__file__).parent), list[BaseException]()
    threading.Thread(target=_drive, args=(tracer, port, failures), daemon=True).start()
    threading.setprofile(tracer.hook)
    sys.setprofile(tracer.hook)
    model = f"stub://{LETTER * 40}"
    invoke(["serve", model, "--served-model-name", "m", "--worker", "thread", "--port", str(port)])
    sys.setprofile(None)
    if failures:
        raise failures[0]
    steps = [function for function in tracer.steps if function not in tracer.background]
    stations = [function for function in steps if tracer.steps[function]]
    handed = {(giver, taker) for giver, taker in tracer.handed if {giver, taker} <= set(stations)}
    told = {
        "climbs": _climbs(handed, _imported_files(Path(lockstep.__file__).parent)),
        "steps": steps,
        "stations": stations,
        "hops": [function for function in stations if function in tracer.hops],
        "representations": sorted(tracer.representations),
        "modules": sum(name.partition(".")[0] == "lockstep" for name in sys.modules),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
