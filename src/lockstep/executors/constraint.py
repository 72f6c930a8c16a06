"""Constraint on an answer's text: defines the frozen value that a request carries.

It depends on no grammar engine and no tokenizer; `grammar_compiler.py` compiles it. It is hashable, so that it is the
key of the cache of checked grammars. `schema_text` returns the JSON schema that is enforced in place of the given one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from lockstep.errors import InvalidParameterError

PARAM = "constraint"
MAX_SOURCE_BYTES = 65_536
"""Maximum size in UTF-8 of a schema, pattern or grammar, and of all choices together."""
MAX_CHOICES = 1_000
JsonSchema = Mapping[str, object] | bool | str
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)
"""Encoder without the check for circular references, which would keep an unfinished value until the next full garbage
collection. A circular value exceeds the size limit anyway."""
COMPACT: dict[str, bool] = {"whitespace_flexible": False}
"""Documents on one line. A small model may write white space without end, and fixed text between values can be
forced."""
_COMBINING = frozenset(["allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"])
"""Keywords that apply several schemas to one object."""
_CHOOSING = frozenset(["anyOf", "oneOf", "$ref"])
"""Keywords that do so if the schema also has `properties`."""
_OPENING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "minProperties"])
"""Keywords that define rules for undeclared properties."""
_MAPS, _LISTS, _ONES = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items",)
"""Keywords that contain schemas: by name, in a list, or a single one."""


class ConstraintKind(StrEnum):
    """Language of a constraint."""

    CHOICE = "choice"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    LARK = "lark"


class Constraint(msgspec.Struct, frozen=True):
    """The language of valid answers. Create it with `choice`, `regex`, `json_schema` and the others."""

    kind: ConstraintKind
    source: str | tuple[str, ...] = ""
    """The texts of a choice, or the pattern, schema or grammar; empty for ``json_object``."""

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """Require exactly one of these texts."""
        return cls(ConstraintKind.CHOICE, (texts,) if isinstance(texts, str) else tuple(texts))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Require a text that the whole pattern matches, in Rust's syntax, without look-around and back-references."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def json_schema(cls, schema: JsonSchema) -> Constraint:
        """Require a JSON document that matches a schema (draft 2020-12), on one line and without spaces between its
        parts.

        Properties come in the schema's order. ``{"x-guidance": {"whitespace_flexible": true}}`` in the schema allows
        white space.

        Args:
            schema: a mapping, true, or JSON text.

        Raises:
            InvalidParameterError: the mapping contains a value that is not JSON, or exceeds the maximum size. Encoding
                stops at the maximum.
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
                        f"the json_schema constraint has more than {MAX_SOURCE_BYTES} bytes, the maximum", param=PARAM
                    )
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameterError(f"the JSON schema is not JSON: {error}", param=PARAM) from None
        return cls(ConstraintKind.JSON_SCHEMA, "".join(pieces))

    @classmethod
    def json_object(cls) -> Constraint:
        """Require any JSON object."""
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Require a text of a context-free grammar in llguidance's dialect of Lark, whose start rule is ``start``."""
        return cls(ConstraintKind.LARK, grammar)

    def validate(self) -> None:
        """Check the type and size. The grammar itself is checked when it is built for a model.

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
            raise InvalidParameterError(f"the {self.kind} constraint is empty", param=PARAM)
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
    """The schema of a JSON constraint, with closed objects."""
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return '{"type":"object"}'
    assert isinstance(source, str), "validation allows several texts only in a choice"
    try:
        return json.dumps(closed(json.loads(source)), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):  # the compiler reports the error
        return source


def closed(schema: object) -> object:
    """Narrow a schema: an object that declares properties may have no others.

    With open objects a model may add properties without end. The grammars of vLLM and llama.cpp close them as well.
    OpenAI's strict schemas must close them explicitly, but some clients remove that for other servers. A schema with a
    rule for undeclared properties keeps it, and one that applies several schemas to one object is not changed.
    """
    return _closed(schema) if not _combines_schemas(schema) else schema


def _combines_schemas(schema: object) -> bool:
    """True if several schemas may apply to one object."""
    if not isinstance(schema, dict):
        return False
    keys = schema.keys()
    if not keys.isdisjoint(_COMBINING) or ("properties" in keys and not keys.isdisjoint(_CHOOSING)):
        return True
    return any(_combines_schemas(part) for part in _parts(schema))


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
    """True if every required property is declared. Otherwise the closed object could not have the others."""
    declared, required = schema.get("properties"), schema.get("required")
    return not (isinstance(declared, dict) and isinstance(required, list)) or all(
        name in [*declared] for name in required
    )
