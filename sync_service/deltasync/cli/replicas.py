"""`deltasync replicas`."""

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint


@click.group()
def replicas() -> None:
    """Forget replicas that do not come back."""


@replicas.command("forget", context_settings=CONTEXT)
@click.argument("consumer")
@click.argument("replica")
@service_options(rights=True)
def forget_replica(consumer: str, replica: str, service: Endpoint) -> None:
    """Forget REPLICA of CONSUMER, which is away: no lag counts it any more. `deltasync lag` names them.

    One that comes back under its name goes on from what it holds.
    """
    Admin(service).forget_replica(consumer, replica)
    click.echo(f"replica {replica} of consumer {consumer} is forgotten")
