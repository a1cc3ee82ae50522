"""`deltasync consumers` and `replicas`."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import click

from deltasync.base.errors import InvalidInput
from deltasync.base.words import utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.output import (
    json_lines,
    json_option,
    record_table,
    say,
    show,
    size,
    text_table,
    watch_option,
    with_columns,
)
from deltasync.client.admin import Admin, EachProcess, owners_lines
from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import FIELDS, Amount, Bytes, Flag, Kind, OneOf, Patterns, Policy, PolicyField
from deltasync.status.records import ReplicaStatus

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT = Policy().as_dict()


def _parameter(field: PolicyField) -> str:
    """The name of a field's parameter and environment variable."""
    return field.flags[0].removeprefix("--").replace("-", "_")


def _option(field: PolicyField) -> Callable[[F], F]:
    words = field.description.replace("`", "")
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
    """A number; an int if written without a point."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        try:
            return int(value)
        except ValueError:
            return click.FLOAT.convert(value, param, ctx)


class _Duration(click.ParamType[float]):
    """Seconds, from a number with a unit."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        number, unit = (value[:-1], value[-1:]) if isinstance(value, str) else (value, "s")
        try:
            return float(number) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}[unit]
        except (KeyError, ValueError):
            self.fail(f"{value!r}: expected a number with a unit: 30s, 20m, 2h or 1d", param, ctx)


def policy_options(function: F) -> F:
    """Add the options of a policy; `policy_of` turns their values into one."""
    for field in reversed(FIELDS):
        function = _option(field)(function)
    return function


def policy_of(options: Mapping[str, Any]) -> Policy:
    """The policy from the values of `policy_options`."""
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
    """List all consumers with their policies, and what they follow. For their lag see `deltasync lag`."""

    def shown(processes: EachProcess) -> list[str]:
        lines = owners_lines(processes.answers("/consumers"), "consumer")
        return json_lines(lines) if as_json else _table(lines)

    show(shown, service)


def _table(lines: list[dict[str, Any]]) -> list[str]:
    rows = (
        (
            *(each[name] for name in ("consumer", "model", "state")),
            "" if each["fleet"] is None else f"{each['connected']}/{each['fleet']}",
            each["policy_words"],
            each["reason"] if each["paused"] else "",
            each["follows"],
        )
        for each in lines
    )
    return text_table(("consumer", "model", "state", "replicas", "policy", "paused", "follows"), rows)


@consumers.command("create", context_settings=CONTEXT)
@click.argument("name")
@click.option("--model", required=True, help="Model that the consumer follows.")
@policy_options
@operator_options(changes=True)
def create_consumer(name: str, model: str, service: Endpoint, **options: Any) -> None:
    """Create consumer NAME. If an equal one exists, nothing changes.

    Without policy options the service sends its replicas every changed row, in its own type, at once.
    """
    policy = policy_of(options)
    made = Admin(service).create_consumer(name, model, policy)
    words = "; ".join(filter(None, [policy.description, made["reason"] if made["paused"] else ""]))
    say(f"consumer {name} follows model {model}{f': {words}' if words else ''}")


@consumers.command("update", context_settings=CONTEXT)
@click.argument("name")
@policy_options
@operator_options(changes=True)
def update_consumer(name: str, service: Endpoint, **options: Any) -> None:
    """Replace the whole policy of consumer NAME.

    An option that you leave out returns to its default. Without options the service sends every changed row, in
    its own type, at once. Replicas keep their offsets. A replica stops with an error if it needs values and
    --mode becomes ids, or if its modules cannot hold the new --value-type.
    """
    policy, admin = policy_of(options), Admin(service)
    before = Policy.from_dict(admin.consumer(name)["policy"])
    admin.update_consumer(name, policy)
    was = f" (was {before.description or _EVERYTHING})" if before != policy else ""
    say(f"policy of consumer {name}: {policy.description or _EVERYTHING}{was}")


@consumers.command("follow", context_settings=CONTEXT)
@click.argument("name")
@click.option("--version", default="", metavar="VERSION", help="Name or number of a kept version of its model.")
@click.option("--live", is_flag=True, help="Follow the newest version again.")
@click.option(
    "--after", default="", metavar="CONSUMER", help="Follow another consumer of its model at a distance."
)
@click.option("--behind", type=_Duration(), default=None, show_default=False, help="The distance, such as 20m.")
@click.option(
    "--on-objection",
    type=click.Choice(["stay", "back"]),
    default="stay",
    help="With --after: stay at the version, or go back to the one before.",
)
@operator_options(changes=True)
def follow_version(
    name: str,
    version: str,
    live: bool,
    after: str,
    behind: float | None,
    on_objection: Literal["stay", "back"],
    service: Endpoint,
) -> None:
    """Let the replicas of consumer NAME hold exactly a kept version while training continues.

    With --after and --behind they get the newest kept version that every replica of another consumer has held
    exactly, if these have gone on for that long since without an objection (`consumers object`); and later ones
    by themselves. Use it to try versions on a small fleet first. --version then names the first one.

    An older version is a rollback: the replicas get the rows that differ, whatever the policy holds back. The
    service needs memory for one more copy of the tables while it makes the release, and from then on for the rows
    of a consumer without a policy.
    """
    if bool(after) != (behind is not None) or live + bool(version or after) != 1:
        raise click.UsageError("use --version, --live, or --after with --behind")
    if after and behind is not None:
        follows = Admin(service).follow_consumer(name, after, behind, on_objection, version)
        say(f"consumer {name} follows {follows}")
        return
    admin = Admin(service)
    if version and (kept := _kept_version(admin, name, version)):
        named = f" ({kept['name']})" if kept["name"] else ""
        say(f"the service loads kept version {kept['version']}{named}: {size(kept['bytes'])}")
    admin.follow_version(name, version or "live")
    say(f"consumer {name} follows {'the newest version' if live else f'version {version}'}")


def _kept_version(admin: Admin, consumer: str, version: str) -> dict[str, Any] | None:
    """The kept version with a name or a number; None if the service will refuse it."""
    kept = admin.kept_versions(admin.consumer(consumer)["model"])
    return next((each for each in reversed(kept) if version in (each["name"], str(each["version"]))), None)


@consumers.command("object", context_settings=CONTEXT)
@click.argument("name")
@click.option("--reason", default="", show_default=False, help="What is wrong with the version that it serves.")
@click.option("--withdraw", is_flag=True, help="Withdraw the objection.")
@operator_options()
def raise_objection(name: str, reason: str, withdraw: bool, service: Endpoint) -> None:
    """Raise an objection to what consumer NAME serves.

    Until it is withdrawn, consumers that follow NAME at a distance get no later version. Needs role subscribe for
    NAME, and to withdraw it role admin.
    """
    if bool(reason) == withdraw:
        raise click.UsageError("use --reason or --withdraw")
    if withdraw:
        Admin(service).withdraw_objection(name)
        say(f"the objection of consumer {name} is withdrawn")
        return
    Admin(service).object(name, reason)
    say(f"consumer {name} objects; withdraw it with: {suggested(f'consumers object {name} --withdraw')}")


@consumers.command("history", context_settings=CONTEXT)
@click.argument("name")
@click.option("--since", type=_Duration(), default="1h", help="How far to look back, such as 20m.")
@click.option("--last", type=click.IntRange(1, 100_000), default=1000, help="Maximum number of lines.")
@json_option
@operator_options()
def consumer_history(name: str, since: float, last: int, service: Endpoint, as_json: bool) -> None:
    """Show which version each replica of consumer NAME served, by time, oldest first.

    There is a line for each change, at most one a second, and one a minute without changes.

    \b
    when     time of the line, in UTC
    release  newest release that a replica had proven; without a policy, the newest version
    version  version of this release; step and events: of this version; rows and bytes: of this release
    follows  kept version that the consumer followed; empty for the newest version
    proven   replicas that had proven this version
    behind   the other replicas, with their versions
    """
    lines = Admin(service).history_lines(name, since, last)
    if as_json:
        say(*json_lines(list(lines)))
        return
    titles = ("when", "release", "version", "step", "events", "rows", "bytes", "follows", "proven", "behind")
    rows = [_history_row(line) for line in lines]
    say(*(text_table(titles, rows) if rows else ["no replica has served anything"]))


def _history_row(line: dict[str, Any]) -> tuple[Any, ...]:
    version, events, replicas = line["version"], line["event_time_unix_ns"], line["replicas"]
    behind = [f"{each} {held}" for each, held in replicas.items() if held < version]
    return (
        utc(line["unix_ns"]),
        line["number"],
        version,
        line["step"],
        "" if events is None else utc(events),
        line["rows"],
        size(line["bytes"]),
        line["follows"],
        f"{len(replicas) - len(behind)}/{len(replicas)}",
        ", ".join(behind),
    )


@consumers.command("pause", context_settings=CONTEXT)
@click.argument("name")
@click.option("--reason", default="", show_default=False, help="Reason to show in the consumer's lag.")
@operator_options(changes=True)
def pause_consumer(name: str, reason: str, service: Endpoint) -> None:
    """Stop sending to the replicas of consumer NAME until you resume it.

    The pause survives restarts of the service. A replica still applies a release that it has received completely.
    """
    Admin(service).pause_consumer(name, reason)
    say(f"consumer {name} is paused; resume it with: {suggested(f'consumers resume {name}')}")


@consumers.command("resume", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def resume_consumer(name: str, service: Endpoint) -> None:
    """Resume consumer NAME. Its replicas get the current rows; versions made during the pause are skipped."""
    Admin(service).resume_consumer(name)
    say(f"consumer {name} is resumed")


@consumers.command("delete", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def delete_consumer(name: str, service: Endpoint) -> None:
    """Delete consumer NAME and its offsets. Connected replicas stop and keep their rows."""
    Admin(service).delete_consumer(name)
    say(f"consumer {name} deleted")


@click.group()
def replicas() -> None:
    """List replicas, and forget lost ones."""


@replicas.command("list", context_settings=CONTEXT)
@click.argument("consumers", nargs=-1, metavar="[CONSUMER]...")
@watch_option
@json_option
@operator_options()
@with_columns(ReplicaStatus)
def list_replicas(consumers: tuple[str, ...], service: Endpoint, watch: bool, as_json: bool) -> None:
    """List the replicas of each CONSUMER, or of all consumers."""

    def shown(processes: EachProcess) -> list[str]:
        every = () if consumers else owners_lines(processes.answers("/consumers"), "consumer")
        names = consumers or [each["consumer"] for each in every]
        lags = [Admin(service).consumer(name) for name in names]
        lines = [{"consumer": lag["consumer"], **each} for lag in lags for each in lag["replicas"]]
        if as_json:
            return json_lines(lines)
        return record_table(ReplicaStatus, lines, by="consumer") if lines else ["no replicas"]

    show(shown, service, watch=watch)


@replicas.command("forget", context_settings=CONTEXT)
@click.argument("consumer")
@click.argument("replica")
@operator_options(changes=True)
def forget_replica(consumer: str, replica: str, service: Endpoint) -> None:
    """Forget REPLICA of CONSUMER, which must be away. It no longer counts for lag.

    If it returns under the same name, it continues from its own rows.
    """
    Admin(service).forget_replica(consumer, replica)
    say(f"replica {replica} of consumer {consumer} is forgotten")
