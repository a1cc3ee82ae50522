"""`deltasync snapshot` and `deltasync snapshots`."""

import time
from typing import TYPE_CHECKING, Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.showing import json_lines, print_missing, waiting_for
from deltasync.cli.text_table import say, seconds, size, text_table
from deltasync.client.admin import Admin
from deltasync.client.each_process import EachProcess
from deltasync.client.endpoint import Endpoint
from deltasync.core.words import counted

if TYPE_CHECKING:
    from deltasync.snapshots.manifest import Manifest


@click.command(context_settings=CONTEXT)
@click.argument("model")
@operator_options(changes=True)
def snapshot(model: str, service: Endpoint) -> None:
    """Make a snapshot of MODEL now, where the service's snapshots go."""
    with waiting_for(service):
        made = Admin(service).make_snapshot(model)
    size = f"{counted(made['bytes'], 'byte')}, {made['new_bytes']} of them new"
    say(f"snapshot of version {made['version']} of model {model} is complete: {size}")


@click.command(context_settings=CONTEXT)
@click.argument("model", default="")
@operator_options()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, without --at the service's answer.")
@click.option(
    "--at", "url", default="", metavar="URL", help="Show all that are at a folder or URL, without a service."
)
@click.option("--check", is_flag=True, help="With --at: compare all that they have with its checksums.")
def snapshots(model: str, service: Endpoint, as_json: bool, url: str, check: bool) -> None:
    """Show the newest snapshot of MODEL, or of each model.

    \b
    version   that it is of; empty where there is none
    behind    versions that came since
    age       since it was complete
    bytes     of all that it has
    new       of what no snapshot before had
    why       none is made, or the last try has failed

    With --at, all that are there, each with its name; the exit status is 1 where one cannot be read or, with
    --check, is damaged.
    """
    if url:
        _show_stored(url, model, check, as_json)
        return
    if check:
        raise click.UsageError("--check reads what is at --at URL")
    processes = EachProcess(service)
    lines = [each for each in processes.lines("/snapshots", "model") if model in ("", each["model"])]
    print_missing(processes)
    if as_json:
        say(*json_lines(lines))
        return
    titles = ("model", "version", "behind", "age", "bytes", "new", "why")
    say(*(text_table(titles, map(_row, lines)) if lines else ["no models"]))


def _row(line: dict[str, Any]) -> tuple[Any, ...]:
    amounts = (size(line["bytes"]), size(line["new_bytes"])) if line["version"] else ("", "")
    behind = line["behind_versions"]
    return line["model"], line["version"] or "", behind, seconds(line["age_seconds"]), *amounts, line["reason"]


def _show_stored(url: str, model: str, check: bool, as_json: bool) -> None:
    lines, problems = _stored(url, model, check)
    if as_json:
        say(*json_lines(lines))
    else:
        say(*(_stored_table(lines) if lines else [f"no snapshots{f' of {model}' if model else ''} at {url}"]))
    for problem in problems:
        say(problem, err=True)
    if problems:
        raise SystemExit(1)


def _stored_table(lines: list[dict[str, Any]]) -> list[str]:
    return text_table(("model", "version", "age", "bytes", "new", "snapshot"), map(_stored_row, lines))


def _stored_row(line: dict[str, Any]) -> tuple[Any, ...]:
    amounts = size(line["bytes"]), size(line["new_bytes"])
    return line["model"], line["version"], seconds(line["age_seconds"]), *amounts, line["name"]


def _stored(url: str, model: str, check: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The snapshots at a place, and what is wrong with any, in words."""
    from deltasync.snapshots.place import SnapshotPlace
    from deltasync.snapshots.reading import check_snapshot, models_of, snapshots_of

    place, lines, problems = SnapshotPlace(url), list[dict[str, Any]](), list[str]()
    for found in (snapshots_of(place, each) for each in models_of(place) if model in ("", each)):
        problems += found.problems
        for each in found.manifests:
            lines.append(_stored_line(each))
            problems += check_snapshot(place, each) if check else []
    return lines, list(dict.fromkeys(problems))


def _stored_line(manifest: "Manifest") -> dict[str, Any]:
    return {
        "model": manifest.model,
        "version": manifest.version,
        "age_seconds": (time.time_ns() - manifest.made_unix_ns) / 1e9,
        "bytes": manifest.bytes,
        "new_bytes": manifest.new_bytes(),
        "name": manifest.name,
    }
