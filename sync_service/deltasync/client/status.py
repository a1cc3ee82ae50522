"""What the service says of itself over HTTP."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from deltasync.core.errors import DeltasyncError, InvalidInput, NotFound, ServiceUnavailable

__all__ = ["fetch_lag"]

# Inside the trusted network there is no proxy; one meant for the package index must not be asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch_lag(service: str, consumer: str, timeout_seconds: float = 10.0) -> dict[str, Any]:
    """The service's answer to GET /consumers/<consumer>/lag.

    Raises:
        InvalidInput: `service` is not where HTTP is answered.
        NotFound: no such consumer.
        ServiceUnavailable: the service does not answer, or not with a lag.
    """
    if not service.startswith(("http://", "https://")):
        raise InvalidInput(f"{service!r}: expected http://HOST:PORT")
    url = f"{service}/consumers/{urllib.parse.quote(consumer, safe='')}/lag"
    try:
        with _OPENER.open(url, timeout=timeout_seconds) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ServiceUnavailable(
            f"{url}: {_printable(error)}: is the service running, and is this its HTTP address?"
        ) from error


def _printable(error: Exception) -> str:
    """An error's text, unless that holds the raw bytes of an answer that is no HTTP."""
    text = str(error).strip()
    return text if text.isprintable() else f"{type(error).__name__}: no HTTP answer"


def _refused(error: urllib.error.HTTPError, url: str) -> DeltasyncError:
    body = error.read().decode(errors="replace")
    if error.code == 404 and body.startswith("{"):
        return NotFound(json.loads(body).get("message", body))
    return ServiceUnavailable(f"{url}: HTTP {error.code}: {body}")
