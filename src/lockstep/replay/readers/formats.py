"""What a file is, by how it begins."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lockstep.errors import TraceError
from lockstep.replay.readers import aiperf, azure, mooncake
from lockstep.replay.workload import WorkloadRequest

_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{1,64})"')
KNOWN = (
    'a recording of lockstep serve --trace, a workload ({"config": ..., "requests": [...]}), a Mooncake trace '
    f"(JSON lines), an Azure trace ({','.join(azure.COLUMNS)}), a detailed result of vllm bench serve, or AIPerf's "
    "profile_export.jsonl"
)


@dataclass(frozen=True, slots=True)
class LineFormat:
    """A format with a request per line, of any size."""

    rows: Callable[[Iterable[tuple[int, str]], str], Iterator[WorkloadRequest]]
    """Numbered lines and the file's name to requests, arrivals in picoseconds."""
    content_size: int = 0
    is_sorted: bool = True
    """Whether lines come in the order of arrivals."""


MOONCAKE = LineFormat(mooncake.rows, mooncake.CONTENT_TOKENS)
AZURE = LineFormat(azure.rows)
AIPERF = LineFormat(aiperf.rows, is_sorted=False)


def detect(head: bytes, name: str) -> LineFormat | None:
    """The format of lines that a file begins with; None: a JSON document.

    Raises:
        TraceError: neither.
    """
    text = _beginning(head).removeprefix("\ufeff").lstrip()
    if not text and head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise TraceError(f"{name} is neither UTF-8 text nor zstd; it may be {KNOWN}")
    if not text:
        raise TraceError(f"{name} is empty; it may be {KNOWN}")
    if text.startswith("{"):
        keys = _first_keys(text)
        if any(key in mooncake.COLUMNS for key in keys):
            return MOONCAKE
        return AIPERF if any(key in aiperf.KEYS for key in keys) else None
    if text.split("\n", 1)[0].casefold().startswith(azure.COLUMNS[0].casefold()):
        return AZURE
    raise TraceError(f"{name}:1: unknown format; it may be {KNOWN}")


def _beginning(head: bytes) -> str:
    """As much as is text; a byte further on that is none is named with its line by whoever reads it."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        return head[: error.start].decode()


def _first_keys(text: str) -> list[str]:
    """The keys of the object in the first line, or its first key if that line is not whole."""
    try:
        first = json.loads(text.split("\n", 1)[0])
    except (ValueError, RecursionError):
        match = _FIRST_KEY.match(text)
        return [match[1]] if match else []
    return list(first) if isinstance(first, dict) else []
