"""The OpenAPI document against the server: whatever fits it is served or refused as it says, and nothing is a 500."""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from tests.cluster.support import one_model
from tests.server.process import ServerProcess
from tests.server.support import NAME

MAX_EXAMPLES = 12
"""Of each operation; with the generated edge cases about twenty seconds in all."""


SCHEMA = schemathesis.openapi.from_dict(
    create_app(one_model("stub://alpha", (NAME,)), ServerOptions(enable_debug_endpoints=True)).openapi()
)
"""Of an application like the server's; no model is needed to write it."""
SCHEMA.config.checks.not_a_server_error.expected_statuses = ["2xx", "3xx", "4xx", "504"]
"""A deadline that the request itself sets may pass."""


@SCHEMA.parametrize()
@settings(
    max_examples=MAX_EXAMPLES,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_does_what_the_document_says(case: schemathesis.Case[Any], server: ServerProcess) -> None:
    """All of schemathesis' checks but one: a body may fit its schema and still ask for what no model can do."""
    case.call_and_validate(server.base_url, excluded_checks=[positive_data_acceptance], timeout=30)


def test_every_refusal_is_in_the_document(server: ServerProcess) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            for statuses in ("4XX", "5XX"):
                body = json.dumps(responses[statuses])
                assert "ErrorBody" in body, f"{method} {path}"
            assert "422" not in responses, f"{method} {path}: FastAPI's own shape, which nobody gets"
            assert operation["operationId"], path
