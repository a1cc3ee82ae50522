"""`deltasync lag`."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import click

from sync_service.cli.config import CONTEXT
from sync_service.errors import DeltasyncError, NotFound, ServiceUnavailable

# Inside the trusted network there is no proxy; one meant for the package index must not be asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--http", default="http://127.0.0.1:8080", help="Where the service answers operators.")
@click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")
def lag(consumer: str, http: str, as_json: bool) -> None:
    """Show how far CONSUMER is behind its model.

    \b
    versions  sealed versions not applied yet
    rows      rows that changed in them
    bytes     bytes of these rows' ids and values
    seconds   age of the oldest of these versions
    """
    answer = fetch_lag(http, consumer)
    click.echo(json.dumps(answer, indent=2) if as_json else _table(answer))


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


def _table(answer: dict[str, Any]) -> str:
    head = f"consumer {answer['consumer']}  model {answer['model']}  head {answer['head']}  {answer['state']}"
    titles = ("", "offset", "versions", "rows", "bytes", "seconds")
    lines = [("all replicas", answer["offset"], *_numbers(answer["lag"]))]
    for replica in answer["replicas"]:
        name = replica["replica"] if replica["connected"] else f"{replica['replica']} (away)"
        lines.append((name, replica["offset"], *_numbers(replica["lag"])))
    for table in answer["tables"]:
        lines.append((table["table"], "", "", table["rows"], table["bytes"], ""))
    width = max(len(str(line[0])) for line in lines)
    rows = [f"{line[0]!s:<{width}}" + "".join(f"{cell!s:>14}" for cell in line[1:]) for line in (titles, *lines)]
    return "\n".join([head, answer["reason"], "", *rows])


def _numbers(lag: dict[str, Any]) -> tuple[Any, ...]:
    return lag["versions"], lag["rows"], lag["bytes"], lag["seconds"]
