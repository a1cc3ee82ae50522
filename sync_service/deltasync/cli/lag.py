"""`deltasync lag`."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.lag_text import lag_text
from deltasync.core.errors import DeltasyncError, NotFound, ServiceUnavailable

# Inside the trusted network there is no proxy; one meant for the package index must not be asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--http", default="http://127.0.0.1:8080", help="Where the service answers operators.")
@click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")
def lag(consumer: str, http: str, as_json: bool) -> None:
    """Show how far CONSUMER is behind its model.

    \b
    versions      sealed versions not applied yet
    rows          rows that are not held as the model has them
    bytes         bytes of these rows' ids and values
    seconds       for how long the oldest of these rows, or versions, is lacking
    unsent norm   of a consumer with a policy: L2 norm of what the model has less what is held
    unsent share  the same as a share of the norm of the tables
    """
    answer = fetch_lag(http, consumer)
    click.echo(json.dumps(answer, indent=2) if as_json else lag_text(answer))


def fetch_lag(service: str, consumer: str, timeout_seconds: float = 10.0) -> dict[str, Any]:
    """The service's answer to GET /consumers/<consumer>/lag.

    Raises:
        NotFound: no such consumer.
        ServiceUnavailable: the service does not answer, or not with a lag.
    """
    if not service.startswith(("http://", "https://")):
        raise click.BadParameter(f"{service!r}: expected http://HOST:PORT", param_hint="--http")
    url = f"{service}/consumers/{urllib.parse.quote(consumer, safe='')}/lag"
    try:
        with _OPENER.open(url, timeout=timeout_seconds) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ServiceUnavailable(
            f"{url}: {_printable(error)}: is the service running, and --http right?"
        ) from error


def _printable(error: Exception) -> str:
    """An error's text; that of an answer which is no HTTP holds the answer's raw bytes."""
    text = str(error).strip()
    return text if text.isprintable() else f"{type(error).__name__}: no HTTP answer"


def _refused(error: urllib.error.HTTPError, url: str) -> DeltasyncError:
    body = error.read().decode(errors="replace")
    if error.code == 404 and body.startswith("{"):
        return NotFound(json.loads(body).get("message", body))
    return ServiceUnavailable(f"{url}: HTTP {error.code}: {body}")
