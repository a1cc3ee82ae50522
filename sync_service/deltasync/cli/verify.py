"""`deltasync verify`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from deltasync.base.errors import DeltasyncError, NotFound, NotPermitted
from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import either_options
from deltasync.cli.lag import BEHIND
from deltasync.cli.output import json_lines, say, text_table, waiting_for
from deltasync.cli.tail import goodbye_on_sigterm
from deltasync.client.admin import Admin, fetch_lag
from deltasync.client.endpoint import Endpoint
from deltasync.client.stored_copy import StoredCopy, compare, stored_checkpoint
from deltasync.core.verified import VerifiedLine, VerifiedStatus

_TITLES = ("what", "version", "table", "rows", "status", "checksum", "held", "why")


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--replica", "replicas", metavar="NAME", multiple=True, help="Only this replica; may be repeated.")
@click.option(
    "--checkpoint",
    metavar="URL",
    default=None,
    show_default=False,
    help="Compare the newest checkpoint of the consumer's model at this folder or URL instead.",
)
@click.option(
    "--torch-checkpoint",
    type=click.Path(exists=True, path_type=Path),
    default=None,
    show_default=False,
    help="Compare a checkpoint of the trainer: a folder of torch.distributed.checkpoint, or a file of torch.save. "
    "Needs torch, and trusts the checkpoint as whoever loads it.",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds it may take.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@either_options(
    lambda settings: bool(settings.get("checkpoint") or settings.get("torch_checkpoint")),
    "With --checkpoint or --torch-checkpoint",
)
def verify(
    consumer: str,
    replicas: Sequence[str],
    checkpoint: str | None,
    torch_checkpoint: Path | None,
    timeout: float,
    as_json: bool,
    service: Endpoint,
) -> None:
    """Compare rows that somebody holds with those that the service gives CONSUMER: by checksum, then by row.

    Without an option each replica, one after the other: it reads all of its rows again, and goes on to apply what
    comes meanwhile. Rows that differ are sent again. Guests are not asked. Needs role admin.

    With --checkpoint or --torch-checkpoint the service's rows are fetched, which takes the role of a replica. Rows
    that have changed since the version that was stored are left out.

    \b
    version   the model's, of which the service's rows are
    rows      that were compared
    status    equal, differs, not held, or not shown: it cannot be said what is held
    checksum  what that of the rows should be; held: what it is
    why       which rows differ, and how many were left out

    The exit status is 0 if all are equal, and 3 if something differs, is not held or is not shown: a replica that
    is away or goes meanwhile shows nothing.
    """
    if (checkpoint is not None) + (torch_checkpoint is not None) + bool(replicas) > 1:
        raise click.UsageError("--replica, --checkpoint and --torch-checkpoint: give one of them")
    if checkpoint is not None:
        found = _of_copy(service, consumer, stored_checkpoint(checkpoint, consumer), timeout)
    elif torch_checkpoint is not None:
        found = _of_copy(service, consumer, _torch_checkpoint(torch_checkpoint), timeout)
    else:
        found = _of_replicas(service, consumer, replicas, timeout)
    say(*(json_lines(found) if as_json else text_table(_TITLES, map(_line, found))))
    if {each["status"] for each in found} != {VerifiedStatus.EQUAL.value}:
        sys.exit(BEHIND)


def _torch_checkpoint(path: Path) -> StoredCopy:
    try:
        from deltasync.client.torch_checkpoint import checkpoint_copy
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"--torch-checkpoint needs {error.name}: pip install 'deltasync[trainer]'"
        ) from error
    return checkpoint_copy(path)


def _of_replicas(service: Endpoint, consumer: str, names: Sequence[str], timeout: float) -> list[dict[str, Any]]:
    fleet = dict.fromkeys(names, "") or _fleet(service, consumer)
    found = list[dict[str, Any]]()
    for name, away in fleet.items():
        found += [_not_shown(name, away)] if away else _of_replica(service, consumer, name, timeout)
    return found


def _fleet(service: Endpoint, consumer: str) -> dict[str, str]:
    """The replicas of a consumer, but for guests, and of each that is away since when and why."""
    replicas = [each for each in fetch_lag(service, consumer)["replicas"] if not each["guest"]]
    if not replicas:
        raise NotFound(f"consumer {consumer!r} has no replicas")
    return {each["replica"]: "" if each["connected"] else each["reason"] or "away" for each in replicas}


def _of_replica(service: Endpoint, consumer: str, name: str, timeout: float) -> list[dict[str, Any]]:
    """What one replica shows, or why it shows nothing: others are asked all the same."""
    say(f"replica {name} reads its rows again", err=True)
    try:
        with waiting_for(service):
            answer = Admin(service).verify_replica(consumer, name, timeout)
    except NotPermitted:
        raise
    except DeltasyncError as error:
        return [_not_shown(name, str(error))]
    return [{"what": f"replica {name}", "version": answer["version"], **each} for each in answer["tables"]]


def _not_shown(name: str, why: str) -> dict[str, Any]:
    """A replica of whose tables nothing is known."""
    status = VerifiedStatus.NOT_SHOWN.value
    line = VerifiedLine("", 0, status, checksum="", held="", differing=0, ids=[], changed=0, reason=why)
    return {"what": f"replica {name}", "version": None, **vars(line), "rows": None}


def _of_copy(service: Endpoint, consumer: str, copy: StoredCopy, timeout: float) -> list[dict[str, Any]]:
    of = f"version {copy.position.number}" if copy.position.number else "a version that it does not say"
    say(f"{copy.name} is of {of}; the service's rows are fetched", err=True)
    with goodbye_on_sigterm(), waiting_for(None):
        found = compare(service, consumer, copy, timeout)
    if not found.since:
        say("the service cannot say what has changed since: all rows are compared with those of now", err=True)
    return [{"what": copy.name, "version": found.version, **vars(VerifiedLine.of(each))} for each in found.tables]


def _line(row: dict[str, Any]) -> tuple[Any, ...]:
    left_out = f"{counted(row['changed'], 'row')} changed since" if row["changed"] else ""
    why = "; ".join(each for each in (row["reason"], left_out) if each)
    return (*("" if row[name] is None else row[name] for name in _TITLES[:-1]), why)
