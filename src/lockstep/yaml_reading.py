"""YAML reader: parses manifests, flag files and gate policies into nodes, and reports every problem with its line.

The size of a text is checked before it is parsed, and no tag creates an object. Scalars follow YAML 1.2's core schema,
so ``no`` and ``1:30`` are strings. `YamlNode` is a node with its path. Readers are functions from a node to a value;
they raise `ConfigError` with the predicate of a sentence whose subject is the path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from lockstep.errors import ConfigError, InvalidTextError, ManifestError, Problem, UsageError
from lockstep.spelling import did_you_mean, listed, odd_character

MAX_BYTES = 1 << 18
"""Maximum size of a text: a manifest of some thousand models. YAML is read at about 100 kB/s."""
MAX_DEPTH = 16
"""Maximum depth of nested lists and maps."""
MAX_NODES = 50_000
"""Maximum number of nodes. An alias counts as all nodes that it refers to, so nested aliases are limited, too."""
MAX_INTEGER_DIGITS = 18
MAX_SHOWN_CHARS = 60
"""Maximum characters of a value or key that a message repeats."""
MAX_PROBLEMS = 200
"""Maximum number of problems that are reported for one text."""
_CORE = (
    ("null", re.compile(r"~|null|Null|NULL|"), "~nN"),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile(r"[-+]?[0-9]+"), "-+0123456789"),
    (
        "float",
        re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"),
        "-+0123456789.",
    ),
)
_TAG = "tag:yaml.org,2002:"
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]
_SCALARS = ("str", *(kind for kind, _, _ in _CORE))
_RIGHT = "a YAML file in UTF-8 is expected"
INVALID: Final = object()
"""Value of a node with a fault; `Reading.problems` has the fault."""

Reader = Callable[["YamlNode"], Any]


def _core_resolvers(others: _Resolvers | None = None) -> _Resolvers:
    """Resolvers of YAML 1.2's core schema by first character, in PyYAML's form; ``others`` are tried before them."""
    resolvers: _Resolvers = {character: list(those) for character, those in (others or {}).items()}
    for kind, pattern, first in _CORE:
        whole = re.compile(rf"(?:{pattern.pattern})\Z")
        for character in (*first, *([""] if kind == "null" else [])):
            resolvers.setdefault(character, []).append((_TAG + kind, whole))
    return resolvers


class BoundedLoader(yaml.SafeLoader):
    """YAML loader that composes nodes within limits. `PlainDumper` resolves scalars in the same way."""

    yaml_implicit_resolvers = _core_resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0
        self._sizes: dict[str, int | None] = {}
        """Number of nodes below each anchor; None while they are being composed."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]  # the library has no types
        anchor = getattr(event, "anchor", None)
        before = self._num_nodes
        if isinstance(event, yaml.AliasEvent):
            size = self._sizes.get(anchor or "", 0)
            if size is None:
                raise _limit(event, f"contains itself through the alias *{anchor}; write its values out")
            self._num_nodes += size
        elif anchor is not None:
            self._sizes[anchor] = None
        self._num_nodes += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _limit(event, f"is nested more than {MAX_DEPTH} deep")
        if self._num_nodes > MAX_NODES:
            raise _limit(event, f"has more than {MAX_NODES} values once its aliases are written out")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._sizes[anchor] = self._num_nodes - before
        return node


class PlainDumper(yaml.SafeDumper):
    """YAML dumper whose strings are read as strings by `BoundedLoader` and by readers of YAML 1.1."""

    yaml_implicit_resolvers = _core_resolvers(yaml.SafeDumper.yaml_implicit_resolvers)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _limit(event: yaml.Event, message: str) -> ManifestError:
    return ManifestError([Problem(1 if event.start_mark is None else event.start_mark.line + 1, "", message)])


@dataclass(slots=True)
class Reading:
    """State of reading one text: its faults so far, and the line of each path."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    """Accepted values that should be written in another way."""
    lines: dict[str, int] = field(default_factory=dict)

    def fault(self, where: str, message: str, line: int | None = None) -> None:
        """Record a fault of a path. The default line is that of the path, or of the nearest enclosing path with one."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(self.line(where) if line is None else line, where, message))

    def unknown_key(self, where: str, key: str, known: Sequence[str], otherwise: str) -> None:
        """Record the fault of an unknown key; ``otherwise`` is the advice if no known key is similar."""
        hint = did_you_mean(key, known) or otherwise
        self.fault(where, f"is an unknown key; {'; '.join(filter(None, (odd_character(key), hint)))}")

    def warn(self, where: str, message: str) -> None:
        """Record a warning about a value that is accepted but should be written in another way."""
        self.warnings.append(Problem(self.line(where), where, message))

    def line(self, where: str) -> int:
        while where and where not in self.lines:
            where = where[: max(where.rfind("."), where.rfind("["), 0)]
        return self.lines.get(where, 1)

    def compose(self, text: str) -> YamlNode | None:
        """The text's only document; None if it is empty, or has a fault, which is recorded."""
        if len(text.encode(errors="surrogatepass")) > MAX_BYTES:
            self.fault("", f"is larger than {MAX_BYTES} bytes", 1)
            return None
        loader = None
        try:
            loader = BoundedLoader(text)
            root = loader.get_single_node()
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self.fault("", f"has the character U+{error.character:04X}, which YAML does not allow", line)
            return None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = 0 if mark is None else mark.line
            message = ": ".join(filter(None, ("is not YAML", error.context, error.problem)))
            odd = odd_character("".join(text.splitlines()[line : line + 1]), only_unseen=True)
            self.fault("", f"{message}; the line {odd}" if odd else message, line + 1)
            return None
        except ManifestError as error:
            self.problems += error.problems
            return None
        except (ValueError, yaml.YAMLError) as error:
            self.fault("", f"is not YAML: {error}", 1)
            return None
        finally:
            if loader is not None:
                loader.dispose()
        if root is None:
            return None
        self.lines[""] = root.start_mark.line + 1
        return YamlNode(root, "", self)


@dataclass(frozen=True, slots=True)
class YamlNode:
    """YAML node with its path."""

    source: yaml.Node
    where: str
    reading: Reading

    def read(self, reader: Reader) -> Any:
        """Read this node; INVALID if the reader rejects it, which is recorded as a fault."""
        try:
            return reader(self)
        except ConfigError as error:
            value = self.source.value if isinstance(self.source, yaml.ScalarNode) else ""
            odd = odd_character(value) if len(value) <= MAX_SHOWN_CHARS else ""
            is_new = odd and odd not in str(error)
            self.reading.fault(self.where, f"{error}; it {odd}" if is_new else str(error))
            return INVALID

    def scalar(self) -> object:
        """The value of a scalar; ConfigError for a list, a map, or a tag of another schema."""
        node, kind = self.source, self.source.tag.removeprefix(_TAG)
        self._refuse_tag("write a plain string, number, true or false")
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"is {self.kind}, where one value is expected")
        if kind == "str":
            return whole_characters(node.value)
        if kind == "null" and node.value in ("", "~", "null", "Null", "NULL"):
            return None
        try:
            if kind == "bool" and node.value.lower() in ("true", "false"):
                return bool(node.value.lower() == "true")
            if kind == "int" and len(node.value.lstrip("+-")) <= MAX_INTEGER_DIGITS:
                return int(node.value)
            if kind == "float" and math.isfinite(number := float(node.value)):
                return number
        except ValueError:
            pass
        if kind in ("int", "float"):
            raise ConfigError(f"is {shown(node.value)}, which is not a finite number of the supported size")
        raise ConfigError(f"is {shown(node.value)}, which is not a value of its tag !!{kind}; leave the tag out")

    def _refuse_tag(self, right: str = "leave it out") -> None:
        kinds = ("map",) if self.is_map else ("seq",) if self.is_list else _SCALARS
        if self.source.tag.removeprefix(_TAG) not in kinds:
            raise ConfigError(f"{_tagged(self.source.tag)}; {right}")

    @property
    def kind(self) -> str:
        """Kind of the node in words: a map, a list, a value or empty."""
        if isinstance(self.source, yaml.MappingNode):
            return "a map"
        if isinstance(self.source, yaml.SequenceNode):
            return "a list"
        return f"the value {shown(self.source.value)}" if self.source.value else "empty"

    @property
    def is_map(self) -> bool:
        return isinstance(self.source, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        return isinstance(self.source, yaml.SequenceNode)

    def items(self) -> list[YamlNode]:
        """The nodes of a list; ConfigError for anything else."""
        self._refuse_tag()
        if not isinstance(self.source, yaml.SequenceNode):
            raise ConfigError(f"is {self.kind}, where a list is expected")
        nodes = [YamlNode(node, f"{self.where}[{i}]", self.reading) for i, node in enumerate(self.source.value)]
        for node in nodes:
            self.reading.lines[node.where] = node.source.start_mark.line + 1
        return nodes

    def entries(self) -> dict[str, YamlNode]:
        """The nodes of a map by key; repeated keys are recorded as faults. ConfigError for anything else."""
        self._refuse_tag()
        if not isinstance(self.source, yaml.MappingNode):
            raise ConfigError(f"is {self.kind}, where a map (`key: value` lines) is expected")
        nodes: dict[str, YamlNode] = {}
        for key_node, node in self.source.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                self.reading.fault(self.where, "has a key that is not a name", line)
                continue
            try:
                key = whole_characters(key_node.value)
            except ConfigError as error:
                self.reading.fault(self.where, f"has a key that {error}", line)
                continue
            where = f"{self.where}.{key[:MAX_SHOWN_CHARS]}" if self.where else key[:MAX_SHOWN_CHARS]
            if key == "<<":
                self.reading.fault(where, "is a merge of maps; write the keys out", line)
            elif key_node.tag.removeprefix(_TAG) not in _SCALARS:
                self.reading.fault(where, f"is a key that {_tagged(key_node.tag)}; leave it out", line)
            elif key in nodes:
                first = self.reading.line(where)
                self.reading.fault(where, f"is given twice, first on line {first}; keep one of them", line)
            else:
                self.reading.lines[where] = line
                nodes[key] = YamlNode(node, where, self.reading)
        return nodes

    def known_entries(self, known: Iterable[str], required: Sequence[str] = ()) -> dict[str, YamlNode]:
        """The nodes of a map by known key; unknown keys and missing required ones are recorded as faults."""
        names = list(known)
        nodes = self.entries()
        for key in [key for key in nodes if key not in names]:
            self.reading.unknown_key(nodes.pop(key).where, key, names, f"known keys are {listed(names)}")
        for key in required:
            if key not in nodes:
                self.reading.fault(self.where, f"has no `{key}:`; it is required")
        return nodes

    def plain(self) -> object:
        """The whole node as dicts, lists and scalars; records the lines of all its paths."""
        if self.is_map:
            return {key: node.plain() for key, node in self.entries().items()}
        return [node.plain() for node in self.items()] if self.is_list else self.scalar()


def read_plain(text: str, name: str) -> tuple[Any, Mapping[str, int]]:
    """A text as dicts, lists and scalars (None if it is empty), and the line of each path in it.

    Raises:
        InvalidTextError: the text has faults.
    """
    reading = Reading()
    root = reading.compose(text)
    value = None if root is None else root.read(YamlNode.plain)
    if reading.problems:
        raise InvalidTextError(reading.problems, name)
    return value, reading.lines


def whole_characters(text: str) -> str:
    r"""Join the surrogate pairs that JSON writes for one character (``\ud83d\ude00``).

    Raises:
        ConfigError: one half of a pair stands alone. UTF-8 cannot encode it, so a prompt, reply or log line cannot.
    """
    if text.isascii() or not any(_is_surrogate(character) for character in text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    for index, character in enumerate(joined):
        if _is_surrogate(character):
            raise ConfigError(
                f"is {shown(text)}, with half of a surrogate pair (\\u{ord(character):04x}) at character {index + 1}; "
                "write the whole character"
            )
    return joined


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"


def shown(value: object) -> str:
    """A value in YAML's notation, shortened for messages."""
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def _tagged(tag: str) -> str:
    """A predicate that rejects a node's tag, in the notation of the file. A tag never creates an object."""
    written = f"!!{tag.removeprefix(_TAG)}" if tag.startswith(_TAG) else tag
    return f"has the tag {shown(written)}, but only plain data is supported"


def read_text(path: Path, what: str) -> str:
    """The text of a file, at most one byte more than `MAX_BYTES`, so that a reader can reject its size.

    Args:
        what: kind of the file, for the message.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with path.expanduser().open("rb") as file:
            return text_of(file.read(MAX_BYTES + 1), f"{what} {path}")
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read ({error.strerror or error}); {_RIGHT}") from error


def text_of(data: bytes, name: str) -> str:
    """Decode the content of a file; UsageError, with the file's ``name``, if it is not UTF-8."""
    errors = "replace" if len(data) > MAX_BYTES else "strict"  # cut within a character, and rejected for its size
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} cannot be read ({error}); {_RIGHT}") from error
