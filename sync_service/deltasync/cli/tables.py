"""`deltasync tables`."""

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint


@click.group()
def tables() -> None:
    """Delete tables of models."""


@tables.command("delete", context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@service_options(rights=True)
def delete_table(model: str, table: str, service: Endpoint) -> None:
    """Delete TABLE of MODEL, with its rows: replicas are not sent it any more.

    Refused while a connected rank publishes it. A run that announces it again makes it anew.
    """
    Admin(service).delete_table(model, table)
    click.echo(f"table {table} of model {model} deleted")
