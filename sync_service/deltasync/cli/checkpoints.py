"""`deltasync checkpoint` and `deltasync checkpoints`."""

import time
from typing import TYPE_CHECKING, Any

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import (
    json_lines,
    print_missing,
    record_table,
    say,
    seconds,
    size,
    text_table,
    waiting_for,
    with_columns,
)
from deltasync.client.admin import Admin, EachProcess, owners_lines
from deltasync.client.endpoint import Endpoint
from deltasync.status.records import CheckpointStatus

if TYPE_CHECKING:
    from deltasync.checkpoints.manifest import Manifest


@click.command(context_settings=CONTEXT)
@click.argument("model")
@operator_options(changes=True)
def checkpoint(model: str, service: Endpoint) -> None:
    """Write a checkpoint of MODEL now; with `serve --checkpoints URL`, also at that URL."""
    with waiting_for(service):
        made = Admin(service).make_checkpoint(model)
    size = f"{counted(made['bytes'], 'byte')}, {made['new_bytes']} of them new"
    say(f"the checkpoint of version {made['version']} of model {model} is complete: {size}")


@click.command(context_settings=CONTEXT)
@click.argument("model", default="")
@operator_options()
@click.option("--json", "as_json", is_flag=True, help="Print JSON; without --at, the service's answer.")
@click.option("--at", "url", default="", metavar="URL", help="List all at a folder or URL, without a service.")
@with_columns(CheckpointStatus)
def checkpoints(model: str, service: Endpoint, as_json: bool, url: str) -> None:
    """Show the newest checkpoint of MODEL, or of each model.

    With --at, show every checkpoint there with its name. The exit status is 1 if one is unreadable.
    """
    if url:
        _show_stored(url, model, as_json)
        return
    processes = EachProcess(service)
    models = owners_lines(processes.answers("/models"), "model")
    lines = [
        {"model": each["model"], **each["checkpoint"]}
        for each in models
        if each["checkpoint"] and model in ("", each["model"])
    ]
    print_missing(processes)
    if as_json:
        say(*json_lines(lines))
        return
    say(*(record_table(CheckpointStatus, lines, by="model") if lines else ["no models"]))


def _show_stored(url: str, model: str, as_json: bool) -> None:
    from deltasync.checkpoints.file_storage import Place
    from deltasync.checkpoints.store import CheckpointStore, models_of

    place, lines, problems = Place(url), list[dict[str, Any]](), list[str]()
    for name in models_of(place):
        if model in ("", name):
            stored = CheckpointStore(name, place).manifests()
            problems += [*stored.problems, *stored.unreachable]
            lines += [_stored_line(each) for each in stored.manifests]
    if as_json:
        say(*json_lines(lines))
    else:
        titles = ("model", "version", "age", "bytes", "new", "checkpoint")
        nothing = [f"no checkpoints{f' of {model}' if model else ''} at {url}"]
        say(*(text_table(titles, map(_stored_row, lines)) if lines else nothing))
    if problems:
        say(*problems, err=True)
        raise SystemExit(1)


def _stored_row(line: dict[str, Any]) -> tuple[Any, ...]:
    amounts = size(line["bytes"]), size(line["new_bytes"])
    return line["model"], line["version"], seconds(line["age_seconds"]), *amounts, line["name"]


def _stored_line(manifest: "Manifest") -> dict[str, Any]:
    return {
        "model": manifest.model,
        "version": manifest.version,
        "age_seconds": (time.time_ns() - manifest.made_unix_ns) / 1e9,
        "bytes": manifest.bytes,
        "new_bytes": manifest.new_bytes,
        "name": manifest.name,
    }
