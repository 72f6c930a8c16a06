"""What the programs have in common: scenarios by name, told one a line as JSON, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Literal

ASK = "I was charged twice for my subscription"
SEED = 7
MAX_TOKENS = 160
"""Of answers whose end is the model's own affair; what a grammar forces is shorter."""
QUEUES = ("billing", "technical", "legal")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"queue": {"type": "string", "enum": list(QUEUES)}, "urgent": {"type": "boolean"}},
    "required": ["queue", "urgent"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "open_ticket", "description": "Open a ticket in a queue.", "parameters": PARAMETERS},
}


def open_ticket(queue: Literal["billing", "technical", "legal"], urgent: bool) -> str:
    """Open a ticket in a queue."""
    return json.dumps({"ticket": 7, "queue": queue, "urgent": urgent})


def check(is_true: object, what: str) -> None:
    """End the scenario where something does not hold."""
    if not is_true:
        raise AssertionError(what)


def run(package: str, scenarios: Mapping[str, Callable[[str, str], Any]], number: str = "") -> int:
    """Play all scenarios against the server that the command line names, and tell of each.

    Args:
        package: whose version is told.
        number: the version; empty: that of the Python package.
        scenarios: each is called with a base URL (with ``/v1``) and a model's name; may be asynchronous.

    Returns:
        The exit code.
    """
    base_url, model = sys.argv[1:3]
    is_ok = True
    for name, scenario in scenarios.items():
        failure = ""
        try:
            result = scenario(base_url, model)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as error:  # whatever it is, the others are played
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
            is_ok = False
        told = {"client": package, "version": number or version(package), "scenario": name, "failure": failure}
        print(json.dumps(told), flush=True)
    return 0 if is_ok else 1
