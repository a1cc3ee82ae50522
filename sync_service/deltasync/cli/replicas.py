"""`deltasync replicas`."""

from typing import Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, say, seconds, show, text_table, watch_option
from deltasync.client.admin import Admin, EachProcess, fetch_lag
from deltasync.client.endpoint import Endpoint


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
        rows = [_row(lag["consumer"], each) for lag in lags for each in lag["replicas"]]
        titles = ("consumer", "replica", "state", "since", "offset", "versions", "seconds", "checked", "why")
        return text_table(titles, rows) if rows else ["no replicas"]

    show(shown, service, watch=watch)


def _row(consumer: str, replica: dict[str, Any]) -> tuple[Any, ...]:
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
