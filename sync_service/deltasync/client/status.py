"""What the service says of itself over HTTP."""

import urllib.parse
from typing import Any

from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route

__all__ = ["fetch_lag"]


def fetch_lag(service: Endpoint | str, consumer: str) -> dict[str, Any]:
    """The service's answer to GET /consumers/<consumer>/lag.

    Raises:
        InvalidInput: `service` is not where HTTP is answered.
        NotFound: no such consumer.
        ServiceUnavailable: the service does not answer, or not with a lag.
    """
    path = f"/consumers/{urllib.parse.quote(consumer, safe='')}/lag"
    answer: dict[str, Any] = Route(Endpoint.of_http(service)).get_json(path)
    return answer
