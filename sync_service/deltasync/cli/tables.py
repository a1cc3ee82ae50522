"""`deltasync tables`."""

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import http_options, service_options
from deltasync.cli.text_table import size, text_table
from deltasync.cli.watching import as_json_text, json_option
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route


@click.group()
def tables() -> None:
    """List tables, and delete some."""


@tables.command("list", context_settings=CONTEXT)
@click.argument("model", default="")
@json_option
@http_options
def list_tables(model: str, http: Endpoint, as_json: bool) -> None:
    """List the tables of MODEL, or of all.

    \b
    kind     embeddings, a parameter, a buffer, or the map of a managed collision module
    version  the model's newest
    trouble  that the last cut was refused for its rows, or that ranks of the trainer have different ones
    """
    lines = [each for each in Route(http).get_json("/tables") if model in ("", each["model"])]
    if as_json:
        click.echo(as_json_text(lines))
        return
    rows = (
        (
            *(each[name] for name in ("model", "table", "kind", "rows", "dim", "dtype")),
            size(each["bytes"]),
            each["head"],
            each["refused"] or ("ranks have different rows" if each["ranks_differ"] else ""),
        )
        for each in lines
    )
    titles = ("model", "table", "kind", "rows", "dim", "type", "bytes", "version", "trouble")
    click.echo(text_table(titles, rows))


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
