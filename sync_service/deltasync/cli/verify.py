"""`deltasync verify` and `fsck`: check rows of replicas, and everything on disk."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from deltasync.base.errors import DeltasyncError, NotFound, NotPermitted
from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import naming_versions, operator_options
from deltasync.cli.output import json_lines, say, text_table, waiting_for
from deltasync.cli.status import BEHIND
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.consumers.consumer import ComparisonStatus, TableComparison

_TITLES = ("replica", "version", "table", "rows", "status", "checksum", "held", "reason")


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--replica", "replicas", metavar="NAME", multiple=True, help="Only this replica. May be repeated.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds to wait.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@operator_options(changes=True)
def verify(consumer: str, replicas: Sequence[str], timeout: float, as_json: bool, service: Endpoint) -> None:
    """Compare all rows of CONSUMER's replicas with the service's.

    By default the command checks every replica except guests, one at a time. A replica reads all its rows again
    while it continues to apply releases, and the service resends rows that differ. This needs role admin.

    \b
    version   version of the model that the service's rows belong to
    rows      number of rows compared
    status    equal, differs, not held (the table is missing) or not shown (no answer)
    checksum  expected checksum; held: the actual one

    The exit status is 0 if all are equal, else 3. A replica that is away, or disconnects during the check, counts
    as not shown.
    """
    results = list[dict[str, Any]]()
    for name, away in (dict.fromkeys(replicas, "") or _fleet(service, consumer)).items():
        results += [_not_shown(name, away)] if away else _of_replica(service, consumer, name, timeout)
    rows = ([each[title] for title in _TITLES] for each in results)
    say(*(json_lines(results) if as_json else text_table(_TITLES, rows)))
    if {each["status"] for each in results} != {ComparisonStatus.EQUAL.value}:
        sys.exit(BEHIND)


def _fleet(service: Endpoint, consumer: str) -> dict[str, str]:
    """The replicas of a consumer except guests; for each that is away, the reason, else ''."""
    replicas = [each for each in Admin(service).consumer(consumer)["replicas"] if not each["guest"]]
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
    return [{"replica": name, "version": answer["version"], **each} for each in answer["tables"]]


def _not_shown(name: str, reason: str) -> dict[str, Any]:
    """The line for a replica that gave no answer."""
    line = vars(TableComparison("", 0, ComparisonStatus.NOT_SHOWN))
    status = ComparisonStatus.NOT_SHOWN.value
    return {"replica": name, "version": None, **line, "rows": None, "status": status, "reason": reason}


_CLEAN, _DAMAGED, _COULD_NOT_READ = 0, 1, 2


@click.command(context_settings=CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@operator_options(changes=True)
def fsck(as_json: bool, service: Endpoint) -> None:
    """Check all data of a running service for damage: all checkpoint files, log records, and rows in memory.

    The command repairs and removes nothing, but the service reloads a model with damaged rows in memory. The exit
    status is 0 without damage, 1 with damage, and 2 if something cannot be read.
    """
    try:
        with naming_versions(service), waiting_for(service):
            checked = Admin(service).fsck()
    except DeltasyncError as error:
        say(f"Error: {error}", err=True)
        sys.exit(_COULD_NOT_READ)
    clean = not any(each["problems"] for each in checked)
    if as_json:
        say(*json_lines({"clean": clean, "checked": checked}))
    else:
        for each in checked:
            model, problems = each["model"], counted(len(each["problems"]), "problem")
            of_model = f"{counted(each['checkpoints'], 'checkpoint')}, {counted(each['rows'], 'row')} in memory"
            what = f"model {model}: {of_model}" if model else f"log: {counted(each['records'], 'record')}"
            say(f"{what} read; {problems}", *(f"  {problem}" for problem in each["problems"]))
        say("nothing is damaged" if clean else "something is damaged")
    sys.exit(_CLEAN if clean else _DAMAGED)
