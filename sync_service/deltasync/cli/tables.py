"""`deltasync tables`."""

from typing import Any

import click

from deltasync.base.errors import NotFound
from deltasync.base.words import listed
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
