"""HTTP requests to a service, like an operator's."""

import json
import time
import urllib.error
import urllib.request
from typing import Any
from unittest.mock import Mock

_DEADLINE_SECONDS = 30.0


class HttpStatus:
    """Common methods of services under test."""

    http: str

    def request(self, method: str, path: str, token: str = "", body: bytes | None = None) -> tuple[int, str]:
        """Send a request, with a token if given; returns HTTP status and body."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            request = urllib.request.Request(self.http + path, body, headers, method=method)  # noqa: S310
            with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get(self, path: str, token: str = "") -> tuple[int, str]:
        return self.request("GET", path, token)

    def wait_for_status(self, path: str, wanted: int) -> str:
        """Repeat a GET request until it has this status; returns the body."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while (answer := self.get(path))[0] != wanted:
            assert time.monotonic() < deadline, answer
            time.sleep(0.01)
        return answer[1]

    def get_json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)


def routes() -> set[tuple[str, str]]:
    """Method and path of each route of a service."""
    from starlette.routing import Route

    from deltasync.api.application import create_app

    app = create_app(Mock(), Mock(), Mock())  # Its routes are not called.
    documented = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    return documented | {("GET", each.path) for each in app.routes if type(each) is Route}
