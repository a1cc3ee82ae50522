"""`deltasync fsck`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from deltasync.base.errors import DeltasyncError
from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import naming_versions, operator_options
from deltasync.cli.output import SERVICE, check_needs, json_lines, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint

check_needs(*SERVICE)

_CLEAN, _DAMAGED, _COULD_NOT_READ = 0, 1, 2


@click.command(context_settings=CONTEXT)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default=False,
    allow_from_autoenv=False,  # The variable is meant for `serve`.
    help="Check this data directory of a stopped service instead of a running service.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@operator_options(changes=True)
def fsck(data_dir: Path | None, as_json: bool, service: Endpoint) -> None:
    """Check all data of a service for damage: every checkpoint file, every record of the log and, in a running
    service, every row in memory.

    The command repairs and removes nothing, but a running service reloads a model with damaged rows in memory. The
    exit status is 0 without damage, 1 with damage, and 2 if something cannot be read.
    """
    try:
        with naming_versions(service):
            checked = _checked(data_dir, service)
    except DeltasyncError as error:
        say(f"Error: {error}", err=True)
        sys.exit(_COULD_NOT_READ)
    clean = not any(each["problems"] for each in checked)
    if as_json:
        say(*json_lines({"clean": clean, "checked": checked}))
    else:
        _print(checked)
        say("nothing is damaged" if clean else "something is damaged")
    sys.exit(_CLEAN if clean else _DAMAGED)


def _checked(data_dir: Path | None, service: Endpoint) -> list[dict[str, Any]]:
    if data_dir is None:
        with waiting_for(service):
            return Admin(service).fsck()
    # Imported late, because a running service needs none of it here.
    from deltasync.service.fsck import check_data_directory

    return [asdict(each) for each in check_data_directory(data_dir)]


def _print(checked: list[dict[str, Any]]) -> None:
    for each in checked:
        whose = f"model {each['model']}" if each["model"] else "other"
        read = [counted(each["checkpoints"], "checkpoint")] if each["model"] else []
        read.append(f"{counted(each['records'], 'record')} of the log")
        read += [f"{counted(each['rows'], 'row')} in memory"] if each["rows"] else []
        say(f"{whose}: {', '.join(read)} read; {counted(len(each['problems']), 'problem')}")
        for problem in each["problems"]:
            say(f"  {problem}")
        for path in each["unknown"]:
            say(f"  {path} was not made by a service; leaving it alone")
