"""A constraint on an answer's text: a frozen value that a request carries.

It depends on no grammar engine and no tokenizer; `grammar_compiler.py` compiles it. It is hashable, and so the key of
the cache of checked grammars. `schema_text` returns the JSON schema that is enforced in place of the given one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from lockstep.errors import InvalidParameterError

PARAM = "constraint"
MAX_SOURCE_BYTES = 65_536
"""Bound of a schema, pattern or grammar, and of all choices together, in UTF-8."""
MAX_CHOICES = 1_000
JsonSchema = Mapping[str, object] | bool | str
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)
"""What it has not finished it would keep, to the next full collection, for that check; a circle is deep as well."""
COMPACT: dict[str, bool] = {"whitespace_flexible": False}
"""Documents on one line: a small model loses itself in white space, and what is fixed between values can be forced."""
_JOINING = frozenset(["allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"])
"""Keywords by which one object obeys several schemas."""
_CHOOSING = frozenset(["anyOf", "oneOf", "$ref"])
"""Also these, beside `properties`."""
_OPENING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "minProperties"])
"""Keywords that say something of properties which are not declared."""
_MAPS, _LISTS, _ONES = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items",)
"""Keywords under which schemas stand in a schema: by name, in a list, alone."""


class ConstraintKind(StrEnum):
    """In which language the constraint is written."""

    CHOICE = "choice"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    LARK = "lark"


class Constraint(msgspec.Struct, frozen=True):
    """The language that an answer is a word of. Make one with `choice`, `regex`, `json_schema` and the others."""

    kind: ConstraintKind
    source: str | tuple[str, ...] = ""
    """The texts of a choice; the pattern, schema or grammar; empty for ``json_object``."""

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Exactly one of these texts."""
        return cls(ConstraintKind.CHOICE, (texts,) if isinstance(texts, str) else tuple(texts))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that the whole pattern matches; Rust's syntax, without look-around and back-references."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def json_schema(cls, schema: JsonSchema) -> Constraint:
        """A JSON document that a schema (draft 2020-12) accepts, on one line and without spaces between its parts.

        Properties come in the schema's order. ``{"x-guidance": {"whitespace_flexible": true}}`` in the schema lets the
        model lay it out.

        Args:
            schema: a mapping, true, or JSON text.

        Raises:
            InvalidParameterError: the mapping holds what JSON cannot say, or more than a constraint may have; what is
                beyond that is not written.
        """
        if isinstance(schema, str):
            return cls(ConstraintKind.JSON_SCHEMA, schema)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in _JSON.iterencode(schema):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_SOURCE_BYTES:
                    raise InvalidParameterError(
                        f"the json_schema constraint has more than {MAX_SOURCE_BYTES} bytes, and may not", param=PARAM
                    )
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(f"the JSON schema is not JSON: {error}", param=PARAM) from None
        return cls(ConstraintKind.JSON_SCHEMA, "".join(pieces))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A word of a context-free grammar in llguidance's dialect of Lark; its rule ``start`` begins."""
        return cls(ConstraintKind.LARK, grammar)

    def validate(self) -> None:
        """Check the shape and size; the grammar itself is checked when it is built for a model.

        Raises:
            InvalidParameterError: ``param`` is ``constraint``.
        """
        kind: object = self.kind
        if not isinstance(kind, ConstraintKind):
            known = ", ".join(ConstraintKind)
            raise InvalidParameterError(f"the constraint's kind is {kind!r}; it must be one of {known}", param=PARAM)
        if self.kind is ConstraintKind.CHOICE:
            self._validate_choices()
        elif not isinstance(self.source, str):
            raise InvalidParameterError(
                f"the source of a {self.kind} constraint is of type {type(self.source).__name__}; it must be text",
                param=PARAM,
            )
        elif not self.source and self.kind is not ConstraintKind.JSON_OBJECT:
            raise InvalidParameterError(f"the {self.kind} constraint is empty; it must say something", param=PARAM)
        texts = (self.source,) if isinstance(self.source, str) else self.source
        try:
            num_bytes = len("".join(texts).encode())
        except UnicodeEncodeError as error:
            raise InvalidParameterError(
                f"the {self.kind} constraint is not Unicode text: {error}", param=PARAM
            ) from None
        if num_bytes > MAX_SOURCE_BYTES:
            raise InvalidParameterError(
                f"the {self.kind} constraint has {num_bytes} bytes; it must have at most {MAX_SOURCE_BYTES}",
                param=PARAM,
            )

    def _validate_choices(self) -> None:
        texts = self.source
        if not isinstance(texts, tuple) or not 1 <= len(texts) <= MAX_CHOICES:
            count = len(texts) if isinstance(texts, tuple) else 0
            raise InvalidParameterError(
                f"the choice has {count} texts; it must be a list of 1..{MAX_CHOICES} texts", param=PARAM
            )
        wrong = [index for index, text in enumerate(texts) if not isinstance(text, str) or not text]
        if wrong:
            raise InvalidParameterError(
                f"text {wrong[0]} of the choice is {texts[wrong[0]]!r}; it must be a string that is not empty",
                param=PARAM,
            )


def schema_text(constraint: Constraint) -> str:
    """The schema of a JSON constraint, its objects closed."""
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return '{"type":"object"}'
    assert isinstance(source, str), "validation lets only a choice have several texts"
    try:
        return json.dumps(closed(json.loads(source)), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):  # the compiler reports what is wrong
        return source


def closed(schema: object) -> object:
    """A narrower schema: an object that declares its properties has no others.

    With open objects a model may add properties without end. The grammars of vLLM and llama.cpp close them as well.
    OpenAI's strict schemas have to close them explicitly, but some clients remove that for other servers. A schema with
    a rule for undeclared properties keeps it, and one that joins schemas to one object stays as it is.
    """
    return _closed(schema) if not _joins(schema) else schema


def _joins(schema: object) -> bool:
    """True if an object may have to obey several schemas at once."""
    if not isinstance(schema, dict):
        return False
    keys = schema.keys()
    if not keys.isdisjoint(_JOINING) or ("properties" in keys and not keys.isdisjoint(_CHOOSING)):
        return True
    return any(_joins(part) for part in _parts(schema))


def _parts(schema: dict[str, object]) -> Iterator[object]:
    for key in _MAPS:
        if isinstance(named := schema.get(key), dict):
            yield from named.values()
    for key in _LISTS:
        if isinstance(several := schema.get(key), list):
            yield from several
    for key in _ONES:
        yield schema.get(key)


def _closed(schema: object) -> object:
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in _MAPS:
        if isinstance(named := copy.get(key), dict):
            copy[key] = {name: _closed(part) for name, part in named.items()}
    for key in _LISTS:
        if isinstance(several := copy.get(key), list):
            copy[key] = [_closed(part) for part in several]
    for key in _ONES:
        if key in copy:
            copy[key] = _closed(copy[key])
    if "properties" in copy and _OPENING.isdisjoint(copy) and _declares_required(copy):
        copy["additionalProperties"] = False
    return copy


def _declares_required(schema: dict[str, object]) -> bool:
    """True if every required property is declared; closed, the object could not have the others."""
    declared, required = schema.get("properties"), schema.get("required")
    return not (isinstance(declared, dict) and isinstance(required, list)) or all(
        name in [*declared] for name in required
    )
