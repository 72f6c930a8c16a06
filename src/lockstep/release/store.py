"""Store of observations: holds them in an in-memory DuckDB database, with a folder for larger data.

DuckDB never downloads extensions and reads nothing from the user's home directory. Its errors become one-line messages
that name the input files.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import EvidenceError
from lockstep.owned_folders import temporary_folder
from lockstep.release.observation import Side

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TEMPORARY = "lockstep-owned-gate-"
"""Prefix of the names of temporary folders."""
MEMORY_LIMIT = "500MB"
"""Memory limit of DuckDB. Larger data is spilled to the folder."""
ROWS_AT_ONCE = 20_480
"""Rows of a file that each thread has in memory at a time. More rows would be spilled to disk and read again."""
MAX_SPILLED = "64GB"
MAX_MESSAGE_CHARS = 400
_ADVICE = ("LINE ", "Try ", "Possible ", "Column ", "See ", "This type", "*")
"""Prefixes of the lines that follow the message in DuckDB's errors."""


_INTERRUPTED = "Query interrupted"
"""DuckDB's whole error message after Ctrl-C."""


@dataclass(slots=True)
class Store:
    """DuckDB database with a folder for data that is too large for memory.

    After both sides were read, it has the views ``baseline`` and ``candidate``. Their columns are the fields of
    observations, ``row`` (the number of the observation), and ``pair`` (equal on both sides if the file itself pairs
    observations).
    """

    connection: DuckDBPyConnection
    folder: Path
    paths: dict[Side, Path] = field(default_factory=dict)
    """Input files of the sides, for messages."""

    def run(self, query: str) -> None:
        """Run one or more queries."""
        with self._as_evidence_error():
            self.connection.execute(query)

    def save(self, query: str, name: str) -> str:
        """Write the rows of a query to a Parquet file in the folder.

        Returns:
            SQL of the file's table.
        """
        path = quoted(str(self.folder / f"{name}.parquet"))
        self.run(f"COPY ({query}) TO {path} (FORMAT parquet, ROW_GROUP_SIZE {ROWS_AT_ONCE})")
        return f"read_parquet({path}, file_row_number = true)"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._as_evidence_error():
            return self.connection.execute(query).fetchall()

    def number(self, query: str) -> int:
        """Result of a query that returns one integer."""
        return int(self.rows(query)[0][0])

    def columns(self, query: str) -> Mapping[str, Any]:
        """Columns of a query as NumPy arrays, masked where values are NULL."""
        with self._as_evidence_error():
            return self.connection.execute(query).fetchnumpy()

    def insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Append a few rows to a table."""
        if not rows:
            return
        marks = ", ".join("?" * len(rows[0]))
        with self._as_evidence_error():
            self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [list(row) for row in rows])

    def chunks(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of a query in chunks of `size`. No other query may run during the iteration."""
        with self._as_evidence_error():
            result = self.connection.execute(query)
            while chunk := result.fetchmany(size):
                yield chunk

    def fault(self, query: str) -> str:
        """DuckDB's error message for a query, in one line; empty if the query succeeds."""
        try:
            self.run(query)
        except EvidenceError as error:
            return sentence_of(error.__cause__ or error)
        return ""

    @contextmanager
    def _as_evidence_error(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            names = " and ".join(dict.fromkeys(str(path) for path in self.paths.values()))
            raise EvidenceError(f"{names or 'input'}: {sentence_of(error)}") from error
        except RuntimeError as error:
            if str(error) == _INTERRUPTED:
                raise KeyboardInterrupt from None
            raise


def sentence_of(error: BaseException, names: Mapping[Path, Path] | None = None) -> str:
    """DuckDB's error message in one line, without the kind of error, advice about DuckDB, and the query.

    Args:
        names: replacements for paths in the message.
    """
    lines = itertools.takewhile(lambda line: not line.startswith(_ADVICE), str(error).splitlines())
    first, *others = [line.strip() for line in lines if line.strip()] or [""]
    message = f"{first}; {others[-1]}" if others else first  # the lines between them may quote the file
    message = re.sub(r"^([A-Z][A-Za-z-]* ){1,3}Error: ", "", message)
    for path, name in (names or {}).items():
        message = message.replace(str(path), str(name))
    return message[:MAX_MESSAGE_CHARS]


@contextmanager
def open_store() -> Iterator[Store]:
    """Open an empty store. Its files are deleted when it is closed."""
    import duckdb

    with temporary_folder(TEMPORARY) as folder:
        connection = duckdb.connect(
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": str(folder),
                "max_temp_directory_size": MAX_SPILLED,
                "allow_community_extensions": "false",
                "allow_persistent_secrets": "false",
                "preserve_insertion_order": "false",
                "threads": str(os.cpu_count() or 1),
            }
        )
        try:
            connection.execute("SET TimeZone = 'UTC'; SET lock_configuration = true")
            yield Store(connection, folder)
        finally:
            connection.close()


def floats(column: Any) -> NDArray[np.float64]:
    """Column as numbers; NULL becomes NaN."""
    return np.ma.filled(np.ma.asarray(column).astype(np.float64), math.nan)


def bools(column: Any) -> NDArray[np.bool_]:
    """Column as booleans; NULL becomes False."""
    return np.ma.filled(np.ma.asarray(column).astype(np.bool_), False)


def quoted(text: str) -> str:
    """Text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"
