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
@click.option("--check", is_flag=True, help="With --at: verify the checksums of all files.")
@with_columns(CheckpointStatus)
def checkpoints(model: str, service: Endpoint, as_json: bool, url: str, check: bool) -> None:
    """Show the newest checkpoint of MODEL, or of each model.

    With --at, show every checkpoint there with its name. The exit status is 1 if one is unreadable or, with
    --check, damaged.
    """
    if url:
        _show_stored(url, model, check, as_json)
        return
    if check:
        raise click.UsageError("--check needs --at URL")
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


def _show_stored(url: str, model: str, check: bool, as_json: bool) -> None:
    lines, problems = _stored(url, model, check)
    if as_json:
        say(*json_lines(lines))
    else:
        say(*(_stored_table(lines) if lines else [f"no checkpoints{f' of {model}' if model else ''} at {url}"]))
    for problem in problems:
        say(problem, err=True)
    if problems:
        raise SystemExit(1)


def _stored_table(lines: list[dict[str, Any]]) -> list[str]:
    return text_table(("model", "version", "age", "bytes", "new", "checkpoint"), map(_stored_row, lines))


def _stored_row(line: dict[str, Any]) -> tuple[Any, ...]:
    amounts = size(line["bytes"]), size(line["new_bytes"])
    return line["model"], line["version"], seconds(line["age_seconds"]), *amounts, line["name"]


def _stored(url: str, model: str, check: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The checkpoints at a place, and a message for each problem."""
    from deltasync.checkpoints.file_storage import Place
    from deltasync.checkpoints.store import CheckpointStore, models_of

    place, lines, problems = Place(url), list[dict[str, Any]](), list[str]()
    for name in models_of(place):
        if model in ("", name):
            store = CheckpointStore(name, place)
            stored = store.manifests()
            problems += store.verify() if check else [*stored.problems, *stored.unreachable]
            lines += [_stored_line(each) for each in stored.manifests]
    return lines, list(dict.fromkeys(problems))


def _stored_line(manifest: "Manifest") -> dict[str, Any]:
    return {
        "model": manifest.model,
        "version": manifest.version,
        "age_seconds": (time.time_ns() - manifest.made_unix_ns) / 1e9,
        "bytes": manifest.bytes,
        "new_bytes": manifest.new_bytes,
        "name": manifest.name,
    }
