"""`deltasync versions`: keep versions of a model."""

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, record_table, say, waiting_for, with_columns
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.status.records import KeptStatus


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
@with_columns(KeptStatus)
def list_versions(model: str, service: Endpoint, as_json: bool) -> None:
    """List the kept versions of MODEL, oldest first."""
    lines = Admin(service).kept_versions(model)
    table = record_table(KeptStatus, lines) if lines else [f"no version of model {model} is kept"]
    say(*(json_lines(lines) if as_json else table))


@versions.command(context_settings=CONTEXT)
@click.argument("model")
@click.argument("version")
@operator_options(changes=True)
def release(model: str, version: str, service: Endpoint) -> None:
    """Stop keeping VERSION of MODEL, a name or a number. The next checkpoint removes its files."""
    Admin(service).release_version(model, version)
    say(f"version {version} of model {model} is no longer kept")
