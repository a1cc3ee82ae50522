"""`deltasync processes`, `move` and `drain`: processes that share a log."""

import click

from deltasync.base.words import listed
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, record_table, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint, Route
from deltasync.status.records import ProcessStatus


@click.command(context_settings=CONTEXT)
@json_option
@operator_options()
def processes(service: Endpoint, as_json: bool) -> None:
    """List the processes of a service and the models that each owns.

    Others take over the models of a process that is not alive, as it ended without signing off.
    """
    lines = Route(service).ask("GET", "/processes")
    say(*(json_lines(lines) if as_json else record_table(ProcessStatus, lines)))


@click.command(context_settings=CONTEXT)
@click.argument("model")
@click.option("--to", "process", required=True, help="Name of the new owner.")
@operator_options(changes=True)
def move(model: str, process: str, service: Endpoint) -> None:
    """Move MODEL to another process. Its trainer and replicas follow."""
    with waiting_for(service):
        Admin(service).move_model(model, process)
    say(f"model {model} moved to process {process}")


@click.command(context_settings=CONTEXT)
@click.argument("process", default="")
@operator_options(changes=True)
def drain(process: str, service: Endpoint) -> None:
    """Move all models of PROCESS, by default the one that answers, to other processes before you stop it.

    Until its next start, the process takes over no models.
    """
    with waiting_for(service):
        models = Admin(service).drain_process(process)
    say(f"{process or 'the process'} has handed over {listed(models) or 'no model: it had none'}")
