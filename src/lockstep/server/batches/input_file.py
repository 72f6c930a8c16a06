"""Input files of batches: lines to requests, and every fault with its line; pure but for the reading."""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from lockstep.server.body import JSON_TYPE, body_fault
from lockstep.server.fields import MAX_LABEL_VALUE_CHARS

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Endpoints that the requests of a batch may name."""
MAX_FILE_BYTES = 200 << 20
"""Of one input file, as with OpenAI; so is the next."""
MAX_REQUESTS = 50_000
MAX_FAULTS = 100
"""Faults of one file that are reported; the rest of the file is then not read."""
MAX_CUSTOM_ID_CHARS = MAX_LABEL_VALUE_CHARS
_SHOWN_CHARS = 80
_MEMBERS = ("custom_id", "method", "url", "body")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
MAX_WINDOW_S = 30 * 86_400
"""Of a batch's time to complete."""

Line = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Fault(msgspec.Struct, frozen=True):
    """A fault of an input file, in OpenAI's shape."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """From 1; None: the whole file's."""


class BatchRequest(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes
    """JSON, as it stood in the file."""
    model: str | None


@dataclass(slots=True)
class CheckedInput:
    """An input file that was read to its end, or to its faults."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    """Byte in the file at which each request's line begins."""
    faults: list[Fault] = field(default_factory=list)
    models: dict[str | None, int] = field(default_factory=dict)
    """Requested names of models, each with its first line."""


def window_s(text: str) -> int | None:
    """Seconds of a ``completion_window``: a number and s, m, h or d, such as ``24h``; None: it is none, or too long."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    return seconds if 0 < seconds <= MAX_WINDOW_S else None


def checked_input(
    file: IO[bytes], endpoint: str | None, max_line_bytes: int, max_requests: int = MAX_REQUESTS
) -> CheckedInput:
    """Read a whole input file.

    Args:
        endpoint: the only one that the requests may name; None: any that is known.
        max_line_bytes: of one line, without its end.
    """
    checked, seen = CheckedInput(), dict[str, int]()
    for number, offset, line in numbered_lines(file, max_line_bytes):
        if line is None:
            fault = Fault("line_too_long", f"the line has more than {max_line_bytes} bytes; send less at once")
            found: BatchRequest | Fault = fault
        else:
            found = read_request(line, endpoint)
        if isinstance(found, BatchRequest):
            found = _accepted(found, number, offset, checked, seen, max_requests)
        if isinstance(found, Fault):
            checked.faults.append(msgspec.structs.replace(found, line=number))
            if len(checked.faults) >= MAX_FAULTS or found.code == "too_many_requests":
                return checked
    if not checked.offsets and not checked.faults:
        checked.faults.append(Fault("empty_file", "the file holds no request; it needs one JSON object a line"))
    return checked


def _accepted(
    request: BatchRequest, number: int, offset: int, checked: CheckedInput, seen: dict[str, int], max_requests: int
) -> BatchRequest | Fault:
    first = seen.setdefault(request.custom_id, number)
    if first != number:
        shown = request.custom_id[:_SHOWN_CHARS]
        return Fault("duplicate_custom_id", f"custom_id {shown!r} is that of line {first}, too", "custom_id")
    if len(checked.offsets) == max_requests:
        return Fault("too_many_requests", f"the file has more than {max_requests} requests; make several of it")
    checked.offsets.append(offset)
    checked.models.setdefault(request.model, number)
    return request


def numbered_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Each line that is not blank with its number and its offset; None in the place of one that is too long."""
    number, offset, most = 0, file.tell(), max_line_bytes + 2
    while piece := file.readline(most):
        number, begin, line = number + 1, offset, piece.strip()
        offset += len(piece)
        is_cut = len(piece) == most and not piece.endswith(b"\n")
        if is_cut or len(line) > max_line_bytes:
            while not piece.endswith(b"\n") and (piece := file.readline(most)):
                offset += len(piece)
            yield number, begin, None
        elif line:
            yield number, begin, line


def read_request(line: bytes, endpoint: str | None) -> BatchRequest | Fault:
    """The request of one line, or the first of its faults."""
    line = line.removeprefix(codecs.BOM_UTF8)  # with which some editors begin a file
    refused = body_fault(line, JSON_TYPE)
    if refused is not None:
        return Fault("invalid_json_line", refused.message)
    try:
        members = Line.decode(line)
    except msgspec.ValidationError:
        return Fault(
            "invalid_json_line", "the line is no JSON object; it must be one with custom_id, method, url, body"
        )
    except (msgspec.DecodeError, RecursionError) as error:
        return Fault("invalid_json_line", f"the line is not valid JSON: {error}")
    for name in _MEMBERS:
        if name not in members:
            return Fault("missing_required_parameter", f"{name} is missing", name)
    for name in members:
        if name not in _MEMBERS:
            shown = name[:_SHOWN_CHARS]
            return Fault("unknown_parameter", f"{shown!r} is not known here; known are {', '.join(_MEMBERS)}", shown)
    return _request_of(members, endpoint)


def _request_of(members: Mapping[str, msgspec.Raw], endpoint: str | None) -> BatchRequest | Fault:
    custom_id, method, url = (_text(members[name]) for name in ("custom_id", "method", "url"))
    if custom_id is None or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return Fault(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if method != "POST":
        return Fault("invalid_method", f'method is {_shown(members["method"])}; it must be "POST"', "method")
    if url not in ENDPOINTS or (endpoint is not None and url != endpoint):
        right = f"the batch's endpoint {endpoint}" if endpoint else f"one of {', '.join(ENDPOINTS)}"
        return Fault("invalid_url", f"url is {_shown(members['url'])}; it must be {right}", "url")
    try:
        body: dict[str, msgspec.Raw] = Line.decode(members["body"])
    except msgspec.DecodeError:  # of which a ValidationError is one
        return Fault("invalid_body", "body must be a JSON object: the request's parameters", "body")
    if bytes(body.get("stream", msgspec.Raw(b"null"))) == b"true":
        return Fault("invalid_body", "body.stream is true, but the answers of a batch are not streamed", "body.stream")
    return BatchRequest(custom_id, url, bytes(members["body"]), _text(body.get("model", msgspec.Raw(b"null"))))


def _text(raw: msgspec.Raw) -> str | None:
    try:
        value: Any = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, str) else None


def _shown(raw: msgspec.Raw) -> str:
    return bytes(raw)[:_SHOWN_CHARS].decode(errors="replace")
