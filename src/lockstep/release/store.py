"""Store of observations: a DuckDB in memory, and a folder for what is larger than it.

Extensions of DuckDB are never fetched, and nothing of the user's home is read. Whatever it cannot do with what it was
given becomes one sentence that names the files.
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
"""Beginning of the names of temporary folders."""
MEMORY_LIMIT = "500MB"
"""Of DuckDB; what needs more goes to its folder."""
ROWS_AT_ONCE = 20_480
"""Rows of a file that are in memory together, for each thread: more of them would be moved to disk and back."""
MAX_SPILLED = "64GB"
MAX_MESSAGE_CHARS = 400
_ADVICE = ("LINE ", "Try ", "Possible ", "Column ", "See ", "This type", "*")
"""Beginnings of the lines that DuckDB has below its message."""


_INTERRUPTED = "Query interrupted"
"""DuckDB's whole error message after Ctrl-C."""


@dataclass(slots=True)
class Store:
    """A DuckDB database, and the folder for data that is too large for memory.

    Once both sides are read, it has the views ``baseline`` and ``candidate``: the fields of observations, ``row`` with
    their number, and ``pair``, which is equal on both sides where the file itself pairs observations.
    """

    connection: DuckDBPyConnection
    folder: Path
    paths: dict[Side, Path] = field(default_factory=dict)
    """Files that the sides were read from, as messages name them."""

    def run(self, query: str) -> None:
        """Run a query, or several."""
        with self._telling():
            self.connection.execute(query)

    def save(self, query: str, name: str) -> str:
        """Write the rows of a query to a file of the folder, column by column; SQL of the table that it is."""
        place = quoted(str(self.folder / f"{name}.parquet"))
        self.run(f"COPY ({query}) TO {place} (FORMAT parquet, ROW_GROUP_SIZE {ROWS_AT_ONCE})")
        return f"read_parquet({place}, file_row_number = true)"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._telling():
            return self.connection.execute(query).fetchall()

    def number(self, query: str) -> int:
        """The whole number that a query gives."""
        return int(self.rows(query)[0][0])

    def columns(self, query: str) -> Mapping[str, Any]:
        """The columns of a query, NumPy's, masked where there are nulls."""
        with self._telling():
            return self.connection.execute(query).fetchnumpy()

    def insert(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """Append a few rows to a table."""
        if not rows:
            return
        marks = ", ".join("?" * len(rows[0]))
        with self._telling():
            self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", [list(row) for row in rows])

    def chunks(self, query: str, size: int) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query, so many at a time; no other query may run meanwhile."""
        with self._telling():
            result = self.connection.execute(query)
            while chunk := result.fetchmany(size):
                yield chunk

    def fault(self, query: str) -> str:
        """DuckDB's message on a query, in one line; empty: it can be run."""
        try:
            self.run(query)
        except EvidenceError as error:
            return sentence_of(error.__cause__ or error)
        return ""

    @contextmanager
    def _telling(self) -> Iterator[None]:
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
    """DuckDB's message in one line, without its kind, its advice about DuckDB and the query.

    Args:
        names: paths that it shall name instead of those that it read.
    """
    lines = itertools.takewhile(lambda line: not line.startswith(_ADVICE), str(error).splitlines())
    first, *others = [line.strip() for line in lines if line.strip()] or [""]
    told = f"{first}; {others[-1]}" if others else first  # between them a line of the file may stand
    told = re.sub(r"^([A-Z][A-Za-z-]* ){1,3}Error: ", "", told)
    for path, name in (names or {}).items():
        told = told.replace(str(path), str(name))
    return told[:MAX_MESSAGE_CHARS]


@contextmanager
def open_store() -> Iterator[Store]:
    """An empty store; what it keeps on disk goes with it."""
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
    """A column as numbers, NaN where there is none."""
    return np.ma.filled(np.ma.asarray(column).astype(np.float64), math.nan)


def bools(column: Any) -> NDArray[np.bool_]:
    """A column as truth values, False where there is none."""
    return np.ma.filled(np.ma.asarray(column).astype(np.bool_), False)


def quoted(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"
