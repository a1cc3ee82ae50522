"""Asking a service over HTTP, as an operator would."""

import json
import urllib.error
import urllib.request
from typing import Any


class HttpStatus:
    """What services under test have in common.

    Attributes:
        http: where the service answers operators.
    """

    http: str

    def get(self, path: str) -> tuple[int, str]:
        """HTTP status and body of a GET request."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=10) as response:  # noqa: S310
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def get_json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)
