"""`deltasync status` and `versions`."""

from typing import Any
from urllib.parse import quote

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.events import event_line
from deltasync.cli.lag import consumer_lines
from deltasync.cli.output import (
    json_lines,
    json_option,
    overview,
    paragraphs,
    record_table,
    seconds,
    show,
    size,
    watch_option,
    with_columns,
)
from deltasync.client.admin import EachProcess
from deltasync.client.endpoint import Endpoint
from deltasync.status.records import ModelStatus, VersionStatus

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
