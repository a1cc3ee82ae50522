"""`deltasync fsck`."""

import sys

import click

from deltasync.base.errors import DeltasyncError
from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import naming_versions, operator_options
from deltasync.cli.output import json_lines, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint

_CLEAN, _DAMAGED, _COULD_NOT_READ = 0, 1, 2


@click.command(context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@operator_options(changes=True)
def fsck(as_json: bool, service: Endpoint) -> None:
    """Check all data of a running service for damage: all checkpoint files, log records, and rows in memory.

    The command repairs and removes nothing, but the service reloads a model with damaged rows in memory. The exit
    status is 0 without damage, 1 with damage, and 2 if something cannot be read.
    """
    try:
        with naming_versions(service), waiting_for(service):
            checked = Admin(service).fsck()
    except DeltasyncError as error:
        say(f"Error: {error}", err=True)
        sys.exit(_COULD_NOT_READ)
    clean = not any(each["problems"] for each in checked)
    if as_json:
        say(*json_lines({"clean": clean, "checked": checked}))
    else:
        for each in checked:
            model, problems = each["model"], counted(len(each["problems"]), "problem")
            of_model = f"{counted(each['checkpoints'], 'checkpoint')}, {counted(each['rows'], 'row')} in memory"
            what = f"model {model}: {of_model}" if model else f"log: {counted(each['records'], 'record')}"
            say(f"{what} read; {problems}", *(f"  {problem}" for problem in each["problems"]))
        say("nothing is damaged" if clean else "something is damaged")
    sys.exit(_CLEAN if clean else _DAMAGED)
