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
    seconds,
    show,
    size,
    text_table,
    watch_option,
)
from deltasync.client.admin import EachProcess
from deltasync.client.endpoint import Endpoint

_CUTS, _EVENTS = 5, 8


@click.command(context_settings=CONTEXT)
@watch_option
@json_option
@operator_options()
def status(service: Endpoint, watch: bool, as_json: bool) -> None:
    """Show a whole service on one screen: problems, models and their trainers, consumers, the last cuts with the
    time of each phase, and the last events. Combines all processes of the service.

    \b
    models:
      step        the trainer's step of the newest version
      last cut    time since that version was sealed
      ranks       connected ranks / all ranks, and how many have finished; lost ranks are listed above
      bytes       size of the tables
      rows sent   rows published since the service started
      trouble     what keeps cuts from being sealed or applied
    consumers: see `deltasync lag --help`; cuts: see `deltasync cuts --help`
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


def _ranks(model: dict[str, Any]) -> str:
    finished = f", {model['finished']} finished" if model["finished"] else ""
    return f"{model['connected']}/{model['ranks']}{finished}"


def _models(models: list[dict[str, Any]]) -> list[str]:
    titles = ("model", "version", "step", "last cut", "ranks", "tables", "bytes", "rows sent", "trouble")
    rows = (
        (
            each["model"],
            each["head"],
            each["step"],
            f"{seconds(each['seconds_since_cut'])} ago" if each["seconds_since_cut"] is not None else "",
            _ranks(each),
            each["tables"],
            size(each["bytes"]),
            each["published_rows"],
            each["trouble"],
        )
        for each in models
    )
    return text_table(titles, rows) if models else ["nothing has been published yet"]


_PARTS = ("gather", "send", "seal", "log", "apply", "release", "ack")


@click.command(context_settings=CONTEXT)
@click.argument("model", default="")
@click.option("--last", type=click.IntRange(1, 200), default=20, help="Versions to show of each model.")
@watch_option
@json_option
@operator_options()
def cuts(model: str, last: int, service: Endpoint, watch: bool, as_json: bool) -> None:
    """Show the last versions of MODEL, or of every model, with the time of each phase.

    \b
    gather   from the end of the step until the slowest rank had collected its changed rows
    send     until the service had every rank's part; compares two machines' clocks
    seal     checks, and waiting for the previous version
    log      until the version was durable
    apply    until the model's tables had it
    release  until the slowest consumer had sent all of it to a replica
    ack      until that replica acknowledged it
    """

    def shown(processes: EachProcess) -> list[str]:
        query = f"&model={quote(model, safe='')}" if model else ""
        lines = processes.lines(f"/versions?last={last}{query}", "model")
        return json_lines(lines) if as_json else cut_lines(lines)

    show(shown, service, watch=watch)


def cut_lines(lines: list[dict[str, Any]]) -> list[str]:
    """Format versions, one per line."""
    if not lines:
        return ["no version has been sealed since the service started"]
    titles = ("model", "version", "step", "rows", "bytes", "ago", *_PARTS)
    rows = (
        (
            *(line[name] for name in ("model", "version", "step", "rows")),
            size(line["bytes"]),
            seconds(line["seconds_ago"]),
            *(seconds(line["seconds"][part]) for part in _PARTS),
        )
        for line in lines
    )
    return text_table(titles, rows)
