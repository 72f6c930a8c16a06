"""The stand-in server for tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.bench.standin import Behaviour, serving

Start = Callable[..., tuple[str, Behaviour]]


@pytest.fixture
def standin() -> Iterator[Start]:
    """Starts servers that behave as the arguments say; gives the base URL and what the server sees."""
    with ExitStack() as stack:

        def start(**behaviour: Any) -> tuple[str, Behaviour]:
            told = Behaviour(**behaviour)
            return stack.enter_context(serving(told)), told

        yield start
