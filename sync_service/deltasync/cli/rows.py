"""`deltasync rows`."""

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.showing import print_missing
from deltasync.client.admin import Admin
from deltasync.client.each_process import EachProcess
from deltasync.client.endpoint import Endpoint
from deltasync.core.words import counted, utc


@click.group()
def rows() -> None:
    """Delete rows of embedding tables, everywhere."""


@rows.command("delete", context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@click.argument("ids", metavar="ID...", type=click.IntRange(min=0), nargs=-1, required=True)
@operator_options(changes=True)
def delete_rows(model: str, table: str, ids: tuple[int, ...], service: Endpoint) -> None:
    """Have the rows ID... of TABLE deleted: by MODEL's trainer, with one of its next cuts, and by all replicas.

    The service goes on asking, also after a restart of its own or of the trainer, until a sealed cut carries the
    delete. A row that is looked up in training afterwards is a new row.
    """
    pending = Admin(service).delete_rows(model, table, ids)
    count, reason = pending["rows"], pending["reason"]
    which = f"of table {table} of model {model}"
    verb = "is" if count == 1 else "are"
    click.echo(f"{counted(count, 'row')} {which} {verb} to be deleted: {reason}")


@rows.command("pending", context_settings=CONTEXT)
@operator_options()
def pending_deletes(service: Endpoint) -> None:
    """List the deletes that are not done: model, table, number of rows, since when, and what they wait for."""
    processes = EachProcess(service)
    for pending in processes.lines("/deletes", "model", "asked_unix_ns"):
        asked = utc(pending["asked_unix_ns"])
        click.echo("\t".join([pending["model"], pending["table"], str(pending["rows"]), asked, pending["reason"]]))
    print_missing(processes)
