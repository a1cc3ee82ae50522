"""`deltasync events`."""

import contextlib
import json
import time
from typing import Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import http_options
from deltasync.cli.watching import as_json_text, json_option
from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.words import utc

_MOST, _SECONDS = 1000, 1.0


@click.command(context_settings=CONTEXT)
@click.option("--last", type=click.IntRange(0, 1000), default=20, help="How many of those before.")
@click.option("--follow", "-f", is_flag=True, help="Go on with those that come, until Ctrl-C.")
@json_option
@http_options
def events(last: int, follow: bool, http: Endpoint, as_json: bool) -> None:
    """Show what has happened: joins, refusals, repairs, takeovers.

    A line has the time (UTC), the level, the event, whom it concerns, and why. With --json and --follow, one JSON
    a line. Of several processes, those of the one that answers.
    """
    if not follow:
        found = Route(http).get_json(f"/events?last={last}")
        click.echo(as_json_text(found) if as_json else "\n".join(map(event_line, found)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _follow(http, last, as_json=as_json)


def _follow(http: Endpoint, last: int, *, as_json: bool) -> None:
    seen, away = 0, False
    while True:
        try:
            found = Route(http).get_json(f"/events?last={last if not seen else _MOST}")
        except ServiceUnavailable as error:
            if not away:
                click.echo(f"The service does not answer, which is tried again: {error}", err=True)
            away = True
        else:
            away = False
            if found and found[-1]["number"] < seen:  # It has started anew since, and so have its numbers.
                seen = 0
            for each in found:
                if each["number"] > seen:
                    seen = each["number"]
                    click.echo(json.dumps(each) if as_json else event_line(each))
            seen = seen or 1
        time.sleep(_SECONDS)


def event_line(event: dict[str, Any]) -> str:
    """An event on one line."""
    subject = " ".join(f"{name}={value}" for name, value in event["subject"].items())
    said = " ".join(filter(None, [subject, event["text"]]))
    return f"{utc(event['unix_ns'])}  {event['level']:7}  {event['event'].replace('_', ' ')}: {said}"
