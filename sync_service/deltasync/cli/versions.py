"""`deltasync versions`."""

from typing import Any
from urllib.parse import quote

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, seconds, show, size, text_table, watch_option
from deltasync.client.admin import EachProcess
from deltasync.client.endpoint import Endpoint

_PARTS = ("gather", "send", "seal", "log", "apply", "release", "ack")


@click.command(context_settings=CONTEXT)
@click.argument("model", default="")
@click.option("--last", type=click.IntRange(1, 200), default=20, help="How many of each model.")
@watch_option
@json_option
@operator_options()
def versions(model: str, last: int, service: Endpoint, watch: bool, as_json: bool) -> None:
    """Show the last versions of MODEL, or of each, and where their time went.

    \b
    gather   from the end of the step until the slowest rank had its changed rows
    send     until the service had the last rank's part, by two machines' clocks
    seal     checks, and waiting for the version before
    log      until it was durable
    apply    until the model's tables had it
    release  until a replica was sent it whole, of the slowest consumer
    ack      until that replica said that it holds it
    """

    def shown(processes: EachProcess) -> list[str]:
        query = f"&model={quote(model, safe='')}" if model else ""
        lines = processes.lines(f"/versions?last={last}{query}", "model")
        return json_lines(lines) if as_json else cut_lines(lines)

    show(shown, service, watch=watch)


def cut_lines(lines: list[dict[str, Any]]) -> list[str]:
    """Versions, a line each."""
    if not lines:
        return ["no version was sealed since the service started"]
    titles = ("model", "version", "step", "rows", "bytes", "ago", *_PARTS)
    rows = (
        (
            *(line[name] for name in ("model", "version", "step", "rows")),
            size(line["bytes"]),
            seconds(line["seconds_ago"]),
            *(seconds(line["seconds"][part]) for part in _PARTS),
        )
        for line in lines
    )
    return text_table(titles, rows)
