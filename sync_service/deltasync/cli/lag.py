"""`deltasync lag`."""

import json

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import http_options
from deltasync.cli.lag_text import lag_text
from deltasync.client.endpoint import Endpoint
from deltasync.client.status import fetch_lag


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@http_options
@click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")
def lag(consumer: str, http: Endpoint, as_json: bool) -> None:
    """Show how far CONSUMER is behind its model.

    \b
    versions      sealed versions not applied yet
    rows          rows that are not held as the model has them, at most
    bytes         bytes of these rows' ids and values
    seconds       for how long the oldest of these rows, or versions, is lacking
    unsent norm   of a consumer with a policy: L2 norm of what the model has less what is held
    unsent share  the same as a share of the norm of the tables
    """
    answer = fetch_lag(http, consumer)
    click.echo(json.dumps(answer, indent=2) if as_json else lag_text(answer))
