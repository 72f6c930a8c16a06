"""What a real `lockstep serve` takes and shows."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.cli.flag_groups import ENVIRONMENT_PREFIX
from lockstep.cli.main import command_of
from tests.server.process import serve


@pytest.fixture(scope="session")
def flag_variables() -> set[str]:
    """The environment variables that are flags of `lockstep serve`."""
    flags = command_of("serve").params
    return {f"{ENVIRONMENT_PREFIX}_{flag.name.upper()}" for flag in flags}


@pytest.fixture(scope="session")
def metric_names() -> set[str]:
    """Names of the samples on the page of a server that has answered once."""
    with serve("stub://alpha", "--worker", "thread") as server, server.client() as client:
        _answer(client)
        page = client.get("/metrics").text
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def _answer(client: httpx2.Client) -> None:
    body = {"model": "stub://alpha", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    client.post("/v1/chat/completions", json=body).raise_for_status()
