"""`deltasync rows`."""

import click

from deltasync.base.words import counted, utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, say, show, text_table
from deltasync.client.admin import Admin, EachProcess
from deltasync.client.endpoint import Endpoint

_KEYS = ("model", "table", "rows")


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
    say(f"{counted(count, 'row')} {which} {verb} to be deleted: {reason}")


@rows.command("pending", context_settings=CONTEXT)
@json_option
@operator_options()
def pending_deletes(service: Endpoint, as_json: bool) -> None:
    """List the deletes that are not done: model, table, number of rows, since when, and what they wait for."""

    def shown(processes: EachProcess) -> list[str]:
        lines = processes.lines("/deletes", "model", "asked_unix_ns")
        if as_json:
            return json_lines(lines)
        rows = ((*(each[name] for name in _KEYS), utc(each["asked_unix_ns"]), each["reason"]) for each in lines)
        return text_table((*_KEYS, "asked", "waits for"), rows) if lines else ["no deletes are pending"]

    show(shown, service)
