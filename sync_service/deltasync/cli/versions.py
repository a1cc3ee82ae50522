"""`deltasync versions`: keep versions of a model."""

import time
from typing import Any

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, say, seconds, size, text_table, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint


@click.group()
def versions() -> None:
    """List, keep and release versions of a model."""


@versions.command(context_settings=CONTEXT)
@click.argument("model")
@click.option("--name", default="", help="A name; versions with a name are kept until you release them.")
@operator_options(changes=True)
def keep(model: str, name: str, service: Endpoint) -> None:
    """Keep the newest version of MODEL.

    It writes a checkpoint. With `serve --checkpoints URL` the version is kept once it is complete there.
    """
    with waiting_for(service):
        kept = Admin(service).keep_version(model, name)
    named = f" as {kept['name']}" if kept["name"] else ""
    say(f"version {kept['version']} of model {model} is kept{named}: {counted(kept['bytes'], 'byte')}")


@versions.command("list", context_settings=CONTEXT)
@click.argument("model")
@json_option
@operator_options()
def list_versions(model: str, service: Endpoint, as_json: bool) -> None:
    """List the kept versions of MODEL, oldest first.

    \b
    step    the trainer's step
    events  age of the newest event on which it was trained
    kept    time since it was kept
    bytes   size of all its files
    own     bytes that releasing it makes free
    followed by  the consumers that follow it
    """
    lines = Admin(service).kept_versions(model)
    if as_json:
        say(*json_lines(lines))
        return
    titles = ("version", "name", "step", "events", "kept", "bytes", "own", "by", "followed by")
    say(*(text_table(titles, map(_row, lines)) if lines else [f"no version of model {model} is kept"]))


@versions.command(context_settings=CONTEXT)
@click.argument("model")
@click.argument("version")
@operator_options(changes=True)
def release(model: str, version: str, service: Endpoint) -> None:
    """Stop keeping VERSION of MODEL, a name or a number. The next checkpoint removes its files."""
    Admin(service).release_version(model, version)
    say(f"version {version} of model {model} is no longer kept")


def _row(line: dict[str, Any]) -> tuple[Any, ...]:
    events = line["event_time_unix_ns"]
    return (
        line["version"],
        line["name"],
        line["step"],
        "" if events is None else _age(events),
        _age(line["kept_unix_ns"]),
        size(line["bytes"]),
        "" if line["own_bytes"] is None else size(line["own_bytes"]),
        line["by"],
        ", ".join(line["followers"]),
    )


def _age(unix_ns: int) -> str:
    return seconds(max(0.0, (time.time_ns() - unix_ns) / 1e9))
