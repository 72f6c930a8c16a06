"""Writer of gate inputs: writes the paired observations of any input files to one file that gives the same verdict.

A pair is written as a pair only if the reader joins it again by the same key. Pairs that were joined only by prompt,
and unpaired observations, are written individually.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import EvidenceError
from lockstep.release.content import ContentLimits
from lockstep.release.observation import NAMES, SIDES
from lockstep.release.store import Store

CHUNK = 1024
"""Number of lines in memory at a time."""
LINES_SUFFIX = ".jsonl"


def write_gate_input(store: Store, path: Path, policy: Mapping[str, Any] | None = None) -> None:
    """Write the pairs and the unpaired observations of a store.

    Args:
        path: target file. With the suffix .jsonl it has one pair or observation per line, else it is one document.

    Raises:
        EvidenceError: the document would be too large to be read again, or the file cannot be written.
    """
    is_lines = path.suffix == LINES_SUFFIX
    head = [] if policy is None else [b'"policy": ' + msgspec.json.encode(policy)]
    begin, between, end = (b"", b"\n", b"\n") if is_lines else (b"", b",\n", b"\n]}\n")
    if is_lines:
        begin = b"".join(b"{%s}\n" % each for each in head)
    else:
        begin = b"{" + b"".join(each + b",\n " for each in head) + b'"pairs": [\n'
    num_bytes, max_bytes = 0, ContentLimits().max_document_bytes
    try:
        with path.open("wb") as file:
            for number, line in enumerate(_lines(store)):
                num_bytes += file.write((between if number else begin) + line.encode())
                if not is_lines and num_bytes > max_bytes - len(end):
                    raise EvidenceError(
                        f"{path}: more than {max_bytes >> 20} MiB, the maximum size of one document; "
                        f"use a file name that ends in {LINES_SUFFIX}"
                    )
            file.write(end)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot write the gate's input: {error.strerror}") from None


def _lines(store: Store) -> Iterator[str]:
    """Pairs in order, then unpaired observations of the baseline, then those of the candidate."""
    for pairs in store.chunks(
        f"SELECT x.text, y.text FROM ordered o JOIN {_texts('baseline')} x ON o.b = x.row"
        f" JOIN {_texts('candidate')} y ON o.c = y.row WHERE key_name <> 'prompt' ORDER BY place",
        CHUNK,
    ):
        yield from (f'{{"baseline": {baseline}, "candidate": {candidate}}}' for baseline, candidate in pairs)
    for side in SIDES:
        alone = f"row NOT IN (SELECT {side[0]} FROM pairs WHERE key_name <> 'prompt')"
        for rows in store.chunks(f"SELECT text FROM {_texts(side)} WHERE {alone} ORDER BY text", CHUNK):
            yield from (f'{{"{side}": {text}}}' for (text,) in rows)


def _texts(side: str) -> str:
    """SQL of observations as JSON, without NULL fields."""
    fields = ", ".join(f"'{name}', \"{name}\"" for name in NAMES if name != "side")
    return f"(SELECT row, json_merge_patch('{{}}', json_object({fields}))::VARCHAR AS text FROM {side})"
