"""`deltasync processes`, `move` and `drain`: processes that share a log."""

from typing import Any

import click

from deltasync.base.words import listed
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route


@click.command(context_settings=CONTEXT)
@json_option
@operator_options()
def processes(service: Endpoint, as_json: bool) -> None:
    """List the processes of a service and the models that each owns.

    State "gone" means that a process ended without signing off. Others take over its models.
    """
    lines = Route(service).ask("GET", "/processes")
    if as_json:
        say(*json_lines(lines))
        return
    for line in lines:
        owns = listed(line["models"]) or "no model"
        say(f"{line['process']:20}  {_state(line):8}  {line['grpc']:24}  {owns}")


def _state(line: dict[str, Any]) -> str:
    if not line["alive"]:
        return "gone"
    return "draining" if line["draining"] else "here" if line["here"] else "alive"


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
