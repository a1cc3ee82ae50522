"""`deltasync checkpoint`, `checkpoints`, `versions`, `backup` and `restore`: a model and its versions in files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import (
    SERVICE,
    check_needs,
    json_lines,
    json_option,
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
from deltasync.status.records import CheckpointStatus, KeptStatus

if TYPE_CHECKING:
    from deltasync.checkpoints.manifest import Manifest

check_needs(*SERVICE)


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


@click.command(context_settings=CONTEXT)
@click.argument("url")
@operator_options(changes=True)
def backup(url: str, service: Endpoint) -> None:
    """Back up a running service to URL: an absolute path of a folder on the service's machine, or object storage,
    s3://BUCKET/PATH. It must be new or empty.

    Trainers and replicas continue during the backup. It is complete once this command reports it.
    """
    if "://" not in url and not Path(url).is_absolute():
        raise click.UsageError(
            f"URL {url!r}: give an absolute path on the service's machine; on this machine it would be "
            f"{Path(url).absolute()}"
        )
    with waiting_for(service):
        made = Admin(service).backup(url)
    say(f"backup {url} is complete: {_content(made['models'], made['bytes'])}")


def _content(models: Mapping[str, int], size: int) -> str:
    versions = ", ".join(f"{name} at version {version}" for name, version in models.items()) or "no model"
    return f"{versions}, {counted(size, 'byte')}"


@click.command(context_settings=CONTEXT)
@click.argument("url")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Data directory to create; new or empty.",
)
def restore(url: str, data_dir: Path) -> None:
    """Create a data directory from a backup, or from the newest checkpoint of each model at the folder or URL of
    `serve --checkpoints`. The command checks every file against its checksums.

    Every model starts a new epoch, so that replicas and trainers with newer versions detect the rollback.
    """
    from deltasync.service import restore as restoring

    made = restoring.restore(url, data_dir)
    say(f"restored {data_dir} from {url}: {_content(made.models, made.bytes)}", *made.lacking)
