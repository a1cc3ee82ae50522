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
from deltasync.core.comparison import ComparisonLine, ComparisonStatus

_TITLES = ("what", "version", "table", "rows", "status", "checksum", "held", "why")


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--replica", "replicas", metavar="NAME", multiple=True, help="Only this replica. May be repeated.")
@click.option(
    "--checkpoint",
    metavar="URL",
    default=None,
    show_default=False,
    help="Compare the newest checkpoint of the consumer's model in this folder or URL instead.",
)
@click.option(
    "--torch-checkpoint",
    type=click.Path(exists=True, path_type=Path),
    default=None,
    show_default=False,
    help="Compare a trainer's checkpoint instead: a folder of torch.distributed.checkpoint, or a file of "
    "torch.save. Needs torch. Loading can run code from the checkpoint, so use only one you trust.",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds to wait.")
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
    """Compare the rows of replicas or of a checkpoint with the service's rows for CONSUMER.

    By default the command checks every replica except guests, one at a time. A replica reads all its rows again
    while it continues to apply releases, and the service resends rows that differ. This needs role admin.

    With --checkpoint or --torch-checkpoint the command fetches the service's rows, which needs role subscribe. It
    skips rows that have changed since the stored version.

    \b
    version   version of the model that the service's rows belong to
    rows      number of rows compared
    status    equal, differs, not held (the table is missing) or not shown (no answer)
    checksum  expected checksum; held: the actual one
    why       which rows differ, and how many were skipped

    The exit status is 0 if all are equal, else 3. A replica that is away, or disconnects during the check, counts
    as not shown.
    """
    if (checkpoint is not None) + (torch_checkpoint is not None) + bool(replicas) > 1:
        raise click.UsageError("give only one of --replica, --checkpoint and --torch-checkpoint")
    if checkpoint is not None:
        results = _of_copy(service, consumer, stored_checkpoint(checkpoint, consumer), timeout)
    elif torch_checkpoint is not None:
        results = _of_copy(service, consumer, _torch_checkpoint(torch_checkpoint), timeout)
    else:
        results = _of_replicas(service, consumer, replicas, timeout)
    say(*(json_lines(results) if as_json else text_table(_TITLES, map(_line, results))))
    if {each["status"] for each in results} != {ComparisonStatus.EQUAL.value}:
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
    results = list[dict[str, Any]]()
    for name, away in fleet.items():
        results += [_not_shown(name, away)] if away else _of_replica(service, consumer, name, timeout)
    return results


def _fleet(service: Endpoint, consumer: str) -> dict[str, str]:
    """The replicas of a consumer except guests; for each that is away, the reason, else ''."""
    replicas = [each for each in fetch_lag(service, consumer)["replicas"] if not each["guest"]]
    if not replicas:
        raise NotFound(f"consumer {consumer!r} has no replicas")
    return {each["replica"]: "" if each["connected"] else each["reason"] or "away" for each in replicas}


def _of_replica(service: Endpoint, consumer: str, name: str, timeout: float) -> list[dict[str, Any]]:
    """The result of one replica. An error becomes a line: the other replicas still get their turn."""
    say(f"replica {name} is reading its rows again", err=True)
    try:
        with waiting_for(service):
            answer = Admin(service).verify_replica(consumer, name, timeout)
    except NotPermitted:
        raise
    except DeltasyncError as error:
        return [_not_shown(name, str(error))]
    return [{"what": f"replica {name}", "version": answer["version"], **each} for each in answer["tables"]]


def _not_shown(name: str, why: str) -> dict[str, Any]:
    """The line for a replica that gave no answer."""
    status = ComparisonStatus.NOT_SHOWN.value
    line = ComparisonLine("", 0, status, checksum="", held="", differing=0, ids=[], changed=0, reason=why)
    return {"what": f"replica {name}", "version": None, **vars(line), "rows": None}


def _of_copy(service: Endpoint, consumer: str, copy: StoredCopy, timeout: float) -> list[dict[str, Any]]:
    version = f"version {copy.position.number}" if copy.position.number else "an unknown version"
    say(f"{copy.name} has {version}; fetching the service's rows", err=True)
    with goodbye_on_sigterm(), waiting_for(None):
        diff = compare(service, consumer, copy, timeout)
    if not diff.since:
        say("the service no longer knows which rows have changed since: comparing all of them", err=True)
    return [{"what": copy.name, "version": diff.version, **vars(ComparisonLine.of(each))} for each in diff.tables]


def _line(row: dict[str, Any]) -> tuple[Any, ...]:
    left_out = f"{counted(row['changed'], 'row')} changed since" if row["changed"] else ""
    why = "; ".join(each for each in (row["reason"], left_out) if each)
    return (*("" if row[name] is None else row[name] for name in _TITLES[:-1]), why)
