"""`deltasync consumers`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from deltasync.base.errors import InvalidInput
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.output import json_lines, json_option, say, show, text_table
from deltasync.client.admin import Admin, EachProcess, known
from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import FIELDS, Amount, Bytes, Flag, Kind, OneOf, Patterns, Policy, PolicyField

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT = Policy().as_dict()


def _parameter(field: PolicyField) -> str:
    """What a field is called among a command's parameters, and in the environment."""
    return field.flags[0].removeprefix("--").replace("-", "_")


def _option(field: PolicyField) -> Callable[[F], F]:
    words = field.words.replace("`", "")
    return click.option(
        *field.flags,
        _parameter(field),
        default=_DEFAULT[field.name],
        metavar=field.kind.metavar,
        help=f"{words} May be repeated." if isinstance(field.kind, Patterns) else words,
        **_type(field.kind),
    )


def _type(kind: Kind) -> dict[str, Any]:
    match kind:
        case OneOf():
            return {"type": click.Choice(kind.names)}
        case Patterns():
            return {"multiple": True}
        case Flag():
            return {"is_flag": True}
        case Bytes():
            return {"type": int}
        case Amount():
            return {"type": _AmountParameter()}
    return {"type": float}


class _AmountParameter(click.ParamType[float]):
    """A number, whole if it is written without a point."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        try:
            return int(value)
        except ValueError:
            return click.FLOAT.convert(value, param, ctx)


def policy_options(function: F) -> F:
    """The options that describe a policy; `policy_of` makes one of their values."""
    for field in reversed(FIELDS):
        function = _option(field)(function)
    return function


def policy_of(options: Mapping[str, Any]) -> Policy:
    """The policy that the values of `policy_options` describe."""
    names = {_parameter(field): field.name for field in FIELDS}
    described = {names[name]: value for name, value in options.items() if value is not None}
    try:
        return Policy.from_dict(described)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error


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
