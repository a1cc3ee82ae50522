"""Tools ask with HEAD."""

import http.client
import urllib.parse
from collections.abc import Mapping

import pytest
from tests.support.server import RunningService

ROUTES = ["/livez", "/readyz", "/status", "/consumers", "/consumers/predictors", "/metrics", "/version", "/"]


def head(
    service: RunningService, path: str, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(service.http).netloc, timeout=20)
    try:
        connection.request("HEAD", path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_head_is_answered_as_get_without_a_body(running: RunningService) -> None:
    for path in ROUTES:
        expected, _ = running.get(path)
        status, headers, body = head(running, path)
        assert (status, body) == (expected, b""), path
        assert "content-type" in headers, path
    assert head(running, "/consumers/nobody")[0] == 404
    assert head(running, "/no/such/route")[0] == running.get("/no/such/route")[0]


@pytest.mark.parametrize("path", ["/events", "/status"])
def test_head_of_a_stream_of_events_ends(running: RunningService, path: str) -> None:
    status, _, body = head(running, path, {"Accept": "text/event-stream"})
    assert (status, body) == (200, b"")
