"""`deltasync tables`, `models` and `rows`: what a service keeps, and deleting some of it."""

from typing import Any

import click

from deltasync.base.errors import NotFound
from deltasync.base.words import counted, listed, utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, print_missing, say, show, size, text_table
from deltasync.client.admin import Admin, EachProcess
from deltasync.client.endpoint import Endpoint


@click.group()
def tables() -> None:
    """List tables, and delete some."""


@tables.command("list", context_settings=CONTEXT)
@click.argument("model", default="")
@json_option
@operator_options()
def list_tables(model: str, service: Endpoint, as_json: bool) -> None:
    """List the tables of MODEL, or of all.

    \b
    kind     embeddings, a parameter, a buffer, or the map of a managed collision module
    version  the model's newest
    trouble  that the last cut was refused for its rows, or that ranks of the trainer have different ones
    """

    def shown(processes: EachProcess) -> list[str]:
        lines = [each for each in processes.lines("/tables", "model") if model in ("", each["model"])]
        if model and not lines:
            _check_known(model, processes)
        return json_lines(lines) if as_json else _table(lines)

    show(shown, service)


def _check_known(model: str, processes: EachProcess) -> None:
    names = [each["model"] for each in processes.lines("/models", "model")]
    if model not in names:
        print_missing(processes)
        raise NotFound(f"no model {model!r}; models: {listed(names) or 'none yet'}")


def _table(lines: list[Any]) -> list[str]:
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
    return text_table(titles, rows)


@tables.command("delete", context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@operator_options(changes=True)
def delete_table(model: str, table: str, service: Endpoint) -> None:
    """Delete TABLE of MODEL, with its rows: replicas are not sent it any more.

    Refused while a connected rank publishes it. A run that announces it again makes it anew.
    """
    Admin(service).delete_table(model, table)
    say(f"table {table} of model {model} deleted")


@click.group()
def models() -> None:
    """Delete models."""


@models.command("delete", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def delete_model(name: str, service: Endpoint) -> None:
    """Delete model NAME, with its tables and all that is kept of it.

    Refused while a rank is connected, or a consumer follows it.
    """
    Admin(service).delete_model(name)
    say(f"model {name} deleted")


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
