"""The OpenAPI document against the server: whatever fits it is served or refused as it says, and nothing is a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi.checks import positive_data_acceptance

from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from tests.cluster.support import one_model
from tests.server.process import ServerProcess
from tests.server.support import NAME

MAX_EXAMPLES = {False: 6, True: 12}
"""Drawn requests of each operation, without and with edge cases."""


def check_operation(case: schemathesis.Case[Any], server: ServerProcess, session: requests.Session) -> None:
    """All of schemathesis' checks but one: a body may fit its schema and still ask for what no model can do.

    Events are a stream without an end, which schemathesis would read for as long as it waits: its head is checked.
    """
    if case.operation.path != "/v1/events":
        case.call_and_validate(server.base_url, session=session, excluded_checks=[positive_data_acceptance], timeout=30)
        return
    with session.request(**case.as_transport_kwargs(server.base_url), timeout=30, stream=True) as response:
        if response.ok:
            assert response.headers["content-type"].startswith("text/event-stream")
        else:
            case.validate_response(response, excluded_checks=[positive_data_acceptance])


@pytest.mark.parametrize("has_edge_cases", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_operation_conforms_to_the_openapi_document(
    server: ServerProcess, subtests: pytest.Subtests, has_edge_cases: bool
) -> None:
    """Drawn requests, and the edge cases of every field: some thousand requests, which take a minute.

    Cases are generated here: as tests of their own, every collection of tests would generate them.
    """
    app = create_app(one_model("stub://alpha", (NAME,)), ServerOptions(enable_debug_endpoints=True))
    schema = schemathesis.openapi.from_dict(app.openapi())  # of an application like the server's; it needs no model
    # A deadline that the request itself sets may pass.
    schema.config.checks.not_a_server_error.expected_statuses = ["2xx", "3xx", "4xx", "504"]
    schema.config.phases.coverage.enabled = has_edge_cases
    load_all_checks()

    @settings(
        max_examples=MAX_EXAMPLES[has_edge_cases],
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case[Any], server: ServerProcess, session: requests.Session) -> None:
        check_operation(case, server, session)

    num_operations = 0
    for result in get_all_tests(schema=schema, test_func=check, settings=None, given_kwargs=None):
        assert isinstance(result, Ok), result
        operation, test = result.ok()
        num_operations += 1
        with subtests.test(operation.label), requests.Session() as session:
            session.trust_env = False  # no proxies, which would be looked up for each of some thousand requests
            test(server=server, session=session)
    assert num_operations == sum(len(methods) for methods in app.openapi()["paths"].values())


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
