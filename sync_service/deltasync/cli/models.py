"""`deltasync models`."""

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import say
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint


@click.group()
def models() -> None:
    """Delete models."""


@models.command("delete", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def delete_model(name: str, service: Endpoint) -> None:
    """Delete model NAME, with its tables and all that is kept of it.

    Refused while a rank is connected, or a consumer follows it.
    """
    Admin(service).delete_model(name)
    say(f"model {name} deleted")
