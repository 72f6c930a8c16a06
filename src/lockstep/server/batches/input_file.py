"""Batch input files: parse lines to requests and report every problem with its line. Only reading has side effects."""

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

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
"""Endpoints that batch requests can use."""
MAX_FILE_BYTES = 200 << 20
"""Maximum size of an input file, as in OpenAI's API. So is the maximum number of requests below."""
MAX_REQUESTS = 50_000
MAX_FAULTS = 100
"""Maximum number of problems reported per file. Reading stops there."""
MAX_CUSTOM_ID_CHARS = MAX_LABEL_VALUE_CHARS
_SHOWN_CHARS = 80
_MEMBERS = ("custom_id", "method", "url", "body")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
MAX_WINDOW_S = 30 * 86_400
"""Maximum completion window of a batch."""

Line = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Fault(msgspec.Struct, frozen=True):
    """A problem of an input file, in OpenAI's form."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Line number from 1; None for a problem of the whole file."""


class BatchRequest(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes
    """JSON, as written in the file."""
    model: str | None


@dataclass(slots=True)
class CheckedInput:
    """An input file that was read to its end or to the maximum number of problems."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    """Byte offset of each request's line in the file."""
    faults: list[Fault] = field(default_factory=list)
    models: dict[str | None, int] = field(default_factory=dict)
    """Requested model names, each with its first line."""


def window_s(text: str) -> int | None:
    """Parse a ``completion_window`` (a number and s, m, h or d, such as ``24h``) to seconds. None: invalid."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0
    return seconds if 0 < seconds <= MAX_WINDOW_S else None


def checked_input(
    file: IO[bytes], endpoint: str | None, max_line_bytes: int, max_requests: int = MAX_REQUESTS
) -> CheckedInput:
    """Read and check a whole input file.

    Args:
        endpoint: the only endpoint that the requests can use; None: any supported one.
        max_line_bytes: maximum length of a line, without its line break.
    """
    checked, seen = CheckedInput(), dict[str, int]()
    for number, offset, line in numbered_lines(file, max_line_bytes):
        if line is None:
            fault = Fault("line_too_long", f"the line has more than {max_line_bytes} bytes; split the request")
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
        checked.faults.append(Fault("empty_file", "the file has no requests; it must have one JSON object per line"))
    return checked


def _accepted(
    request: BatchRequest, number: int, offset: int, checked: CheckedInput, seen: dict[str, int], max_requests: int
) -> BatchRequest | Fault:
    first = seen.setdefault(request.custom_id, number)
    if first != number:
        shown = request.custom_id[:_SHOWN_CHARS]
        return Fault("duplicate_custom_id", f"custom_id {shown!r} is also used in line {first}", "custom_id")
    if len(checked.offsets) == max_requests:
        return Fault("too_many_requests", f"the file has more than {max_requests} requests; split the file")
    checked.offsets.append(offset)
    checked.models.setdefault(request.model, number)
    return request


def numbered_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield each non-blank line with its number and offset; None in place of a line that is too long."""
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
    """Parse one line. Return its request or its first problem."""
    line = line.removeprefix(codecs.BOM_UTF8)  # some editors write it at the start of a file
    refused = body_fault(line, JSON_TYPE)
    if refused is not None:
        return Fault("invalid_json_line", refused.message)
    try:
        members = Line.decode(line)
    except msgspec.ValidationError:
        return Fault("invalid_json_line", "the line is not a JSON object; it must have custom_id, method, url and body")
    except (msgspec.DecodeError, RecursionError) as error:
        return Fault("invalid_json_line", f"the line is not valid JSON: {error}")
    for name in _MEMBERS:
        if name not in members:
            return Fault("missing_required_parameter", f"{name} is missing", name)
    for name in members:
        if name not in _MEMBERS:
            shown = name[:_SHOWN_CHARS]
            return Fault(
                "unknown_parameter", f"{shown!r} is not supported; the members are {', '.join(_MEMBERS)}", shown
            )
    return _request_of(members, endpoint)


def _request_of(members: Mapping[str, msgspec.Raw], endpoint: str | None) -> BatchRequest | Fault:
    custom_id, method, url = (_text(members[name]) for name in ("custom_id", "method", "url"))
    if custom_id is None or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return Fault(
            "invalid_custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if method != "POST":
        return Fault("invalid_method", f'method is {_shown(members["method"])}; it must be "POST"', "method")
    if url not in ENDPOINTS or (endpoint is not None and url != endpoint):
        right = f"the batch's endpoint {endpoint}" if endpoint else f"one of {', '.join(ENDPOINTS)}"
        return Fault("invalid_url", f"url is {_shown(members['url'])}; it must be {right}", "url")
    try:
        body: dict[str, msgspec.Raw] = Line.decode(members["body"])
    except msgspec.DecodeError:  # includes ValidationError
        return Fault("invalid_body", "body must be a JSON object with the request's parameters", "body")
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
