"""`deltasync consumers` and `replicas`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from deltasync.base.errors import InvalidInput
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.output import json_lines, json_option, say, seconds, show, text_table, watch_option
from deltasync.client.admin import Admin, EachProcess, fetch_lag, owners_lines
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
        return json_lines(lines) if as_json else _table(lines, owners_lines(processes.answers("/lag"), "consumer"))

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


@click.group()
def replicas() -> None:
    """List replicas, and forget those that do not come back."""


@replicas.command("list", context_settings=CONTEXT)
@click.argument("consumers", nargs=-1, metavar="[CONSUMER]...")
@watch_option
@json_option
@operator_options()
def list_replicas(consumers: tuple[str, ...], service: Endpoint, watch: bool, as_json: bool) -> None:
    """List the replicas of each CONSUMER, or of all.

    \b
    state     connected; or away, damaged, rewound (it came with rows of a discarded past), waiting (for room on
              disk), late (it lacks what is 10 seconds old), partial (it lacks tables); a guest only looks, and
              counts nowhere
    since     for how long it has been connected, or away
    offset    the version that it has acknowledged last or, of a consumer with a policy, the release
    versions  sealed versions that it has not applied
    seconds   for how long the oldest of these is lacking
    checked   whether it has shown by checksums that it holds the right rows
    why       what is wrong with it, in words
    """

    def shown(processes: EachProcess) -> list[str]:
        names = consumers or [each["consumer"] for each in processes.lines("/consumers", "consumer")]
        lags = [fetch_lag(service, name) for name in names]
        if as_json:
            return json_lines([{"consumer": lag["consumer"], **each} for lag in lags for each in lag["replicas"]])
        rows = [_replica_row(lag["consumer"], each) for lag in lags for each in lag["replicas"]]
        titles = ("consumer", "replica", "state", "since", "offset", "versions", "seconds", "checked", "why")
        return text_table(titles, rows) if rows else ["no replicas"]

    show(shown, service, watch=watch)


def _replica_row(consumer: str, replica: dict[str, Any]) -> tuple[Any, ...]:
    lag = replica["lag"]
    return (
        consumer,
        replica["replica"],
        replica["state"],
        seconds(replica["since_seconds"]),
        replica["offset"],
        lag["versions"],
        lag["seconds"],
        "yes" if replica["checked"] else "no",
        replica["reason"],
    )


@replicas.command("forget", context_settings=CONTEXT)
@click.argument("consumer")
@click.argument("replica")
@operator_options(changes=True)
def forget_replica(consumer: str, replica: str, service: Endpoint) -> None:
    """Forget REPLICA of CONSUMER, which is away: no lag counts it any more. `deltasync lag` names them.

    One that comes back under its name goes on from what it holds.
    """
    Admin(service).forget_replica(consumer, replica)
    say(f"replica {replica} of consumer {consumer} is forgotten")
