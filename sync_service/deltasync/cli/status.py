"""`deltasync status`, `lag` and `cuts`."""

import sys
from typing import Any
from urllib.parse import quote

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.events import event_line
from deltasync.cli.output import (
    json_lines,
    json_option,
    one_line,
    overview,
    paragraphs,
    record_table,
    say,
    seconds,
    share,
    show,
    size,
    urgency,
    watch_option,
    with_columns,
)
from deltasync.client.admin import Admin, EachProcess, owners_lines
from deltasync.client.endpoint import Endpoint
from deltasync.status.records import ConsumerStatus, ModelStatus, ReplicaStatus, TableLag, VersionStatus

# States of consumers whose replicas are well, or catching up.
_HOLDING = frozenset({"in sync", "current", "delivered", "partial", "behind", "paused"})
# Exit status of a command that reports trouble.
BEHIND = 3
# Maximum number of replicas to show with their reason; `replicas list` shows all.
_MOST_WRONG = 10


@click.command(context_settings=CONTEXT)
@click.argument("consumers", nargs=-1, metavar="[NAME]...")
@click.option(
    "--max-seconds",
    type=click.FloatRange(0),
    default=None,
    show_default=False,
    help=f"Exit with status {BEHIND} if a consumer is further behind or its state is not one of in sync, current, "
    "delivered, partial, behind and paused; also if there is no consumer, a process does not answer, or no "
    "process owns a model.",
)
@watch_option
@json_option
@operator_options()
@with_columns(ConsumerStatus)
def lag(
    consumers: tuple[str, ...], service: Endpoint, max_seconds: float | None, watch: bool, as_json: bool
) -> None:
    """Show how far consumers are behind their models: one line each, or full details of each NAME.

    The most urgent comes first. sync_service/docs/operating.md explains the states.
    """
    answers: list[Any] = []

    def shown(processes: EachProcess) -> list[str]:
        answers[:] = (
            [Admin(service).consumer(name) for name in consumers]
            if consumers
            else owners_lines(processes.answers("/consumers"), "consumer")
        )
        if as_json:
            return json_lines(answers[0] if len(consumers) == 1 else answers)
        return paragraphs(map(lag_lines, answers)) if consumers else consumer_lines(answers)

    asked = show(shown, service, watch=watch)
    if max_seconds is not None:
        late = [each for each in answers if too_far(each, max_seconds)]
        for each in late:
            say(f"consumer {each['consumer']} is {each['state']}: {each['reason']}", err=True)
        if not answers:
            say("there are no consumers", err=True)
        if late or asked.missing or asked.unowned or not answers:
            sys.exit(BEHIND)


def too_far(answer: dict[str, Any], most: float) -> bool:
    """Whether a consumer is more than `most` seconds behind, or its lag is unknown."""
    behind = answer["lag"]["seconds"] if answer["lag"] else None
    return answer["state"] not in _HOLDING or behind is None or behind > most


def consumer_lines(lines: list[dict[str, Any]]) -> list[str]:
    """One line per consumer, most urgent first, then the replicas in trouble.

    Even a consumer in sync can have such a replica: one that another program writes to.
    """
    if not lines:
        return [f"no consumers: create one with {suggested('consumers create NAME --model MODEL')}"]
    worst_first = sorted(lines, key=lambda line: (urgency(line["state"]), line["consumer"]))
    return [*record_table(ConsumerStatus, worst_first), *_wrong(worst_first)]


def _wrong(lines: list[dict[str, Any]]) -> list[str]:
    wrong = [
        f"replica {each['replica']} of {line['consumer']}: {each['reason']}"
        for line in lines
        for each in line["replicas"]
    ]
    more = len(wrong) - _MOST_WRONG
    return wrong[:_MOST_WRONG] + ([f"and {more} more: {suggested('replicas list')}"] if more > 0 else [])


def lag_lines(answer: dict[str, Any]) -> list[str]:
    """Format the lag of a consumer: its state, its last release if any, its replicas and its tables."""
    head = f"consumer {answer['consumer']}  model {answer['model']}  head {answer['head']}  {answer['state']}"
    replicas = record_table(ReplicaStatus, answer["replicas"]) if answer["replicas"] else []
    tables = record_table(TableLag, answer["tables"]) if answer["tables"] else []
    return paragraphs([[head, answer["reason"], *_aligned(_facts(answer))], replicas, tables])


def _facts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    lag = answer["lag"]
    amounts = f"{counted(lag['versions'], 'version')}, {counted(lag['rows'], 'row')}, {size(lag['bytes'])}"
    facts = [("policy", answer["policy_words"]), ("lag", f"{amounts}, {seconds(lag['seconds'])}")]
    facts += _release_facts(answer, answer["release"]) if answer["release"] else []
    if (behind := answer["head_seconds_behind_events"]) is not None:
        facts.append(("events", _events(lag["seconds_behind_events"], behind)))
    if answer["damages"]:
        facts.append(("damages", f"{counted(answer['damages'], 'table')} of replicas since the service started"))
    return [(name, text) for name, text in facts if text]


def _events(replica: float | None, head: float) -> str:
    holds = "unknown" if replica is None else f"{replica} seconds ago"
    return f"newest event in the newest version: {head} seconds ago; in the slowest replica: {holds}"


def _release_facts(answer: dict[str, Any], release: dict[str, Any]) -> list[tuple[str, str]]:
    lag = answer["lag"]
    # After a restart, or without a connected replica, the norm is unknown for a while.
    until = "next release is made" if answer["offset"] == release["number"] else "newest release is applied"
    unsent = f"unknown until the {until}"
    if lag["unsent_norm"] is not None:
        unsent = f"norm {lag['unsent_norm']:.4g}, {share(lag['unsent_share'])} of the tables'"
    return [
        ("offset", f"{answer['offset']}, counted in releases"),
        ("release", f"{release['number']} of version {release['version']}, {release['seconds_ago']} seconds ago"),
        ("", release["reason"]),
        ("took", _amount(release["rows"], release["bytes"], release["norm"])),
        ("left", _amount(release["left_rows"], release["left_bytes"], release["left_norm"])),
        ("oldest row", f"{answer['oldest_row_seconds']} seconds unsent"),
        ("unsent", unsent),
    ]


def _amount(rows: int, size: int, norm: float) -> str:
    return f"{counted(rows, 'row')}, {counted(size, 'byte')}, norm {norm:.4g}"


def _aligned(facts: list[tuple[str, str]]) -> list[str]:
    shown = [(one_line(name), text) for name, text in facts]
    width = max((len(name) for name, _ in shown), default=0) + 2
    return [f"{name:<{width}}{text}" for name, text in shown]


_CUTS, _EVENTS = 5, 8


@click.command(context_settings=CONTEXT)
@watch_option
@json_option
@operator_options()
@with_columns(ModelStatus)
def status(service: Endpoint, watch: bool, as_json: bool) -> None:
    """Show a whole service on one screen: problems, models and their trainers, consumers, the last cuts with the
    time of each phase, and the last events. Combines all processes of the service.

    For the columns of consumers see `deltasync lag --help`, for those of cuts `deltasync cuts --help`. Those of
    models are:
    """

    def shown(processes: EachProcess) -> list[str]:
        answer = overview(processes)
        return json_lines(answer) if as_json else status_lines(answer)

    show(shown, service, watch=watch)


def status_lines(answer: dict[str, Any]) -> list[str]:
    """Format a status."""
    parts = [
        _processes(answer),
        _models(answer["models"]),
        consumer_lines(answer["consumers"]),
        cut_lines(answer["cuts"][:_CUTS]),
        [*map(event_line, answer["events"][-_EVENTS:])],
    ]
    return paragraphs(parts)


def _processes(answer: dict[str, Any]) -> list[str]:
    lines = [line for each in answer["processes"] for line in _process(each)]
    lines += [f"service {name}  DOES NOT ANSWER: its part is missing here" for name in answer["missing"]]
    lost = [each for each in answer["trainers"] if not each["connected"] and not each["finished"]]
    return lines + [f"  {_rank(each)}" for each in lost]


def _process(process: dict[str, Any]) -> list[str]:
    name = f" {process['process']}" if process["process"] else ""
    ready = "ready" if process["ready"] else "NOT READY"
    lines = [f"service{name}  {ready}  grpc {process['grpc']}  since {process['started']}"]
    lines += [f"  {each['check']}: {each['trouble']}" for each in process["checks"] if each["trouble"]]
    lines += [f"  {each}" for each in (*process["troubles"], *process["work"])]
    if probe := process["probe"]:
        times = f"{seconds(probe['seconds'])} from a publisher to a replica, {seconds(probe['age_seconds'])} ago"
        lines.append(f"  probe: {probe['trouble'] or times}")
    return lines + [f"  volume {each['volume']}: {each['refused'] or _room(each)}" for each in process["volumes"]]


def _room(volume: dict[str, Any]) -> str:
    return "kept by brokers" if volume["free_bytes"] is None else f"{size(volume['free_bytes'])} free"


def _rank(rank: dict[str, Any]) -> str:
    name = f"rank {rank['rank']} of {rank['model']}"
    return f"{name} has been away for {seconds(rank['since_seconds'])}: {rank['left']}"


def _models(models: list[dict[str, Any]]) -> list[str]:
    return record_table(ModelStatus, models) if models else ["nothing has been published yet"]


@click.command(context_settings=CONTEXT)
@click.argument("model", default="")
@click.option("--last", type=click.IntRange(1, 200), default=20, help="Versions to show of each model.")
@watch_option
@json_option
@operator_options()
@with_columns(VersionStatus)
def cuts(model: str, last: int, service: Endpoint, watch: bool, as_json: bool) -> None:
    """Show the last versions of MODEL, or of every model, with the time of each phase."""

    def shown(processes: EachProcess) -> list[str]:
        query = f"&model={quote(model, safe='')}" if model else ""
        lines = processes.lines(f"/versions?last={last}{query}", "model")
        return json_lines(lines) if as_json else cut_lines(lines)

    show(shown, service, watch=watch)


def cut_lines(lines: list[dict[str, Any]]) -> list[str]:
    """Format versions, one per line."""
    return (
        record_table(VersionStatus, lines) if lines else ["no version has been sealed since the service started"]
    )
