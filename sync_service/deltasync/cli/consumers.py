"""`deltasync consumers`."""

from typing import Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.policy_options import policy_of, policy_options
from deltasync.cli.showing import json_lines, json_option, show
from deltasync.cli.text_table import say, text_table
from deltasync.client.admin import Admin
from deltasync.client.each_process import EachProcess, known
from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import Policy

_EVERYTHING = "every changed row, in its own type"


@click.group()
def consumers() -> None:
    """List, create, update, pause and delete consumers."""


@consumers.command("list", context_settings=CONTEXT)
@json_option
@operator_options()
def list_consumers(service: Endpoint, as_json: bool) -> None:
    """List all consumers.

    \b
    state     one word, which README.md explains; empty while its model is still recovering
    replicas  connected, of all
    policy    what of it differs from the default, which is every changed row, in its own type
    paused    since when, by whom and why
    """

    def shown(processes: EachProcess) -> list[str]:
        lines = processes.lines("/consumers", "consumer")
        return json_lines(lines) if as_json else _table(lines, known(processes.answers("/lag"), "consumer"))

    show(shown, service)


def _table(lines: list[Any], lags: list[Any]) -> list[str]:
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
@operator_options(changes=True)
def create_consumer(name: str, model: str, service: Endpoint, **options: Any) -> None:
    """Make consumer NAME; making an equal one again changes nothing.

    Without options of a policy its replicas are sent every changed row, in its own type, at once.
    """
    policy = policy_of(options)
    paused = Admin(service).create_consumer(name, model, policy)["paused"]
    words = "; ".join(filter(None, [policy.words, paused]))
    say(f"consumer {name} follows model {model}{f': {words}' if words else ''}")


@consumers.command("update", context_settings=CONTEXT)
@click.argument("name")
@policy_options
@operator_options(changes=True)
def update_consumer(name: str, service: Endpoint, **options: Any) -> None:
    """Give consumer NAME another policy, which replaces the one it has as a whole.

    Options that are left out take their defaults, whatever they were before: without any, replicas are sent every
    changed row, in its own type, at once. Replicas keep their place; but where --mode becomes ids, those that
    take values stop with an error, and where --value-type becomes one that their modules do not hold, those do.
    """
    policy, admin = policy_of(options), Admin(service)
    before = Policy.from_dict(admin.consumer(name)["policy"])
    admin.update_consumer(name, policy)
    was = f" (was {before.words or _EVERYTHING})" if before != policy else ""
    say(f"policy of consumer {name}: {policy.words or _EVERYTHING}{was}")


@consumers.command("pause", context_settings=CONTEXT)
@click.argument("name")
@click.option("--reason", default="", show_default=False, help="Why, for whoever looks at its lag.")
@operator_options(changes=True)
def pause_consumer(name: str, reason: str, service: Endpoint) -> None:
    """Hold the replicas of consumer NAME at what they have, at once, whatever is published, until it is resumed.

    It holds over restarts of the service. What a replica has been sent whole is still applied.
    """
    Admin(service).pause_consumer(name, reason)
    say(f"consumer {name} is paused; go on with: {suggested(f'consumers resume {name}')}")


@consumers.command("resume", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def resume_consumer(name: str, service: Endpoint) -> None:
    """Let consumer NAME go on, with all that its replicas lack."""
    Admin(service).resume_consumer(name)
    say(f"consumer {name} goes on")


@consumers.command("delete", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def delete_consumer(name: str, service: Endpoint) -> None:
    """Forget consumer NAME and its offsets. Replicas that are connected stop, with what they hold."""
    Admin(service).delete_consumer(name)
    say(f"consumer {name} deleted")
