"""HTTP requests made up from our own OpenAPI document: whatever is sent, the answer is one that it describes."""

import json
import socket
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.besieged import LONGEST_REFUSAL, TOKEN, Besieged
from tests.support.examples import examples
from tests.support.server import RunningService

pytestmark = pytest.mark.usefixtures("unharmed")

_CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
_EXAMPLES = examples() // 4  # For each route.


@pytest.mark.nightly
def test_every_answer_is_documented(service: Besieged) -> None:
    schema = schemathesis.openapi.from_url(service.http + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 10
    for operation in operations:
        _try(operation)


def _try(operation: Any) -> None:
    """Send requests of one route: as they should be, and as they should not."""
    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @settings(
        max_examples=_EXAMPLES,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=st.one_of(modes))
    def send(case: Any) -> None:
        response = case.call(headers={"authorization": f"Bearer {TOKEN}"}, timeout=20)
        # A backup to object storage that is not there is refused with 507, and a service that is ending with 503.
        checks = _CHECKS if response.status_code in (503, 507) else [not_a_server_error, *_CHECKS]
        case.validate_response(response, checks=checks)
        if response.status_code >= 400:
            check_error(response.headers["content-type"][0], response.content)

    send()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/consumers/nobody", 404),
        ("GET", "/consumers/" + "x" * 9000, 404),
        ("GET", "/consumers/%0aforged", 404),
        ("POST", "/livez", 405),
        ("TRACE", "/metrics", 405),
        ("PUT", "/consumers/a%00b", 400),
        ("DELETE", "/consumers/nobody", 404),
    ],
)
def test_errors_have_one_shape(service: Besieged, method: str, path: str, status: int) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.request(method, service.http + path, headers=headers, timeout=20)
    assert answer.status_code == status
    check_error(answer.headers["content-type"], answer.content)


@pytest.mark.parametrize("method", ["PATCH", "PUT", "DELETE"])
def test_without_a_token_nothing_is_changed(service: Besieged, method: str) -> None:
    """Whatever the body is, nobody reads it."""
    answer = httpx.request(method, service.http + "/consumers/predictors", content=b"{" * 10_000, timeout=20)
    assert answer.status_code == 403
    check_error(answer.headers["content-type"], answer.content)


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"5\r\nabcdefgh\r\n", b"-1\r\n"])
@pytest.mark.parametrize("call", [b"POST /drain", b"PUT /consumers/a", b"GET /livez"])
def test_a_broken_body_costs_one_line_in_the_log(
    running: RunningService, caplog: pytest.LogCaptureFixture, call: bytes, chunk: bytes
) -> None:
    host, _, port = running.http.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as peer:
        peer.sendall(call + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
        assert peer.recv(1000).startswith(b"HTTP/1.1 400 ")
        while peer.recv(1000):  # Until the service has closed the connection.
            pass
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("call", [b"POST /drain", b"PUT /consumers/a"])
def test_a_body_that_breaks_after_its_answer_ends_the_connection(
    running: RunningService, caplog: pytest.LogCaptureFixture, call: bytes
) -> None:
    host, _, port = running.http.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as peer:
        peer.sendall(call + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert peer.recv(1000).startswith(b"HTTP/1.1 403 ")
        peer.sendall(b"zz\r\n")
        while peer.recv(1000):
            pass
    assert not [record for record in caplog.records if record.exc_info]


def check_error(content_type: str, content: bytes) -> None:
    """Check that an error is one of ours, and short."""
    assert content_type == "application/json"
    assert len(content) < LONGEST_REFUSAL
    said = json.loads(content)
    assert said.keys() == {"error", "message"}
    assert said["message"]
