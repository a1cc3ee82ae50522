"""Tools ask with HEAD, and with a slash behind the path."""

import http.client
import urllib.parse
from collections.abc import Mapping

import pytest
from tests.support.server import RunningService

ROUTES = ["/livez", "/readyz", "/status", "/consumers", "/consumers/predictors/lag", "/metrics", "/version", "/"]


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
    assert head(running, "/consumers/nobody/lag")[0] == 404
    assert head(running, "/no/such/route")[0] == running.get("/no/such/route")[0]


@pytest.mark.parametrize("path", ["/events", "/status"])
def test_head_of_a_stream_of_events_ends(running: RunningService, path: str) -> None:
    status, headers, body = head(running, path, {"Accept": "text/event-stream"})
    assert (status, body) == (200, b"")
    assert headers["content-type"].startswith("text/event-stream")


def test_a_slash_behind_a_path_changes_nothing(running: RunningService) -> None:
    for path in ROUTES[:-1]:
        assert running.get(f"{path}/")[0] == running.get(path)[0], path
