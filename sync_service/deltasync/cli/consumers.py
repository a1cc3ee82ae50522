"""`deltasync consumers`."""

from typing import Any

import click

from deltasync.cli.asking import Asking
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import http_options, service_options
from deltasync.cli.policy_options import policy_of, policy_options
from deltasync.cli.text_table import text_table
from deltasync.cli.watching import as_json_text, json_option, show
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.consumers.pause import Pause
from deltasync.core.policy import Policy
from deltasync.v1 import admin_pb2
from deltasync.wire.messages import policy_from_message

_EVERYTHING = "every changed row, in its own type"


@click.group()
def consumers() -> None:
    """List, create, update, pause and delete consumers."""


@consumers.command("list", context_settings=CONTEXT)
@json_option
@http_options
def list_consumers(http: Endpoint, as_json: bool) -> None:
    """List all consumers.

    \b
    state     one word, which README.md explains; empty while its model is still recovering
    replicas  connected, of all
    policy    what of it differs from the default, which is every changed row, in its own type
    paused    since when, by whom and why
    """

    def text(asking: Asking) -> str:
        lines = asking.get("/consumers")
        return as_json_text(lines) if as_json else _lines_text(lines, asking.get("/lag"))

    show(text, http, watch=False)


def _lines_text(lines: list[Any], lags: list[Any]) -> str:
    states = {each["consumer"]: each["state"] for each in lags}
    rows = (
        (
            each["consumer"],
            each["model"],
            states.get(each["consumer"], ""),
            f"{each['connected']}/{each['replicas']}",
            Policy.from_dict(each["policy"]).words,
            each["paused"],
        )
        for each in lines
    )
    return text_table(("consumer", "model", "state", "replicas", "policy", "paused"), rows)


@consumers.command("create", context_settings=CONTEXT)
@click.argument("name")
@click.option("--model", required=True, help="The model it subscribes to.")
@policy_options
@service_options(rights=True)
def create_consumer(name: str, model: str, service: Endpoint, **options: Any) -> None:
    """Make consumer NAME; making an equal one again changes nothing.

    Without options of a policy its replicas are sent every changed row, in its own type, at once.
    """
    policy = policy_of(options)
    paused = _paused(Admin(service).create_consumer(name, model, policy))
    words = "; ".join(filter(None, [policy.words, paused]))
    click.echo(f"consumer {name} follows model {model}{f': {words}' if words else ''}")


@consumers.command("update", context_settings=CONTEXT)
@click.argument("name")
@policy_options
@service_options(rights=True)
def update_consumer(name: str, service: Endpoint, **options: Any) -> None:
    """Give consumer NAME another policy, which replaces the one it has as a whole.

    Options that are left out take their defaults, whatever they were before: without any, replicas are sent every
    changed row, in its own type, at once. Replicas keep their place; but where --mode becomes ids, those that
    take values stop with an error, and where --value-type becomes one that their modules do not hold, those do.
    """
    policy, admin = policy_of(options), Admin(service)
    before = [policy_from_message(consumer.policy) for consumer in admin.consumers() if consumer.name == name]
    admin.update_consumer(name, policy)
    was = f" (was {before[0].words or _EVERYTHING})" if before and before[0] != policy else ""
    click.echo(f"policy of consumer {name}: {policy.words or _EVERYTHING}{was}")


@consumers.command("pause", context_settings=CONTEXT)
@click.argument("name")
@click.option("--reason", default="", show_default=False, help="Why, for whoever looks at its lag.")
@service_options(rights=True)
def pause_consumer(name: str, reason: str, service: Endpoint) -> None:
    """Hold the replicas of consumer NAME at what they have, at once, whatever is published, until it is resumed.

    It holds over restarts of the service. What a replica has been sent whole is still applied.
    """
    Admin(service).pause_consumer(name, reason)
    click.echo(f"consumer {name} is paused; go on with: deltasync consumers resume {name}")


@consumers.command("resume", context_settings=CONTEXT)
@click.argument("name")
@service_options(rights=True)
def resume_consumer(name: str, service: Endpoint) -> None:
    """Let consumer NAME go on, with all that its replicas lack."""
    Admin(service).resume_consumer(name)
    click.echo(f"consumer {name} goes on")


@consumers.command("delete", context_settings=CONTEXT)
@click.argument("name")
@service_options(rights=True)
def delete_consumer(name: str, service: Endpoint) -> None:
    """Forget consumer NAME and its offsets. Replicas that are connected stop, with what they hold."""
    Admin(service).delete_consumer(name)
    click.echo(f"consumer {name} deleted")


def _paused(consumer: admin_pb2.Consumer) -> str:
    if not consumer.HasField("pause"):
        return ""
    pause = consumer.pause
    return Pause(pause.since.ToNanoseconds(), pause.by, pause.reason).words
