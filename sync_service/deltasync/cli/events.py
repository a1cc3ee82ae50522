"""`deltasync events`."""

import contextlib
import json
import time
from typing import Any

import click

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.words import utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import json_lines, json_option, print_missing, say
from deltasync.client.admin import EachProcess
from deltasync.client.endpoint import Endpoint

_FEW, _MOST, _SECONDS = 50, 1000, 1.0


@click.command(context_settings=CONTEXT)
@click.option("--last", type=click.IntRange(0, 1000), default=20, help="How many of those before.")
@click.option("--follow", "-f", is_flag=True, help="Go on with those that come, until Ctrl-C.")
@json_option
@operator_options()
def events(last: int, follow: bool, service: Endpoint, as_json: bool) -> None:
    """Show what has happened: joins, refusals, repairs, takeovers.

    A line has the time (UTC), the level, the event, whom it concerns, and why. With --json and --follow, one JSON
    a line. Of several processes, those of all.
    """
    if not follow:
        processes = EachProcess(service)
        found = _newest(_last(processes, last), last)
        print_missing(processes)
        say(*(json_lines(found) if as_json else map(event_line, found)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        _follow(service, last, as_json=as_json)


def _follow(service: Endpoint, last: int, *, as_json: bool) -> None:
    # Not by the stream that there is of events: that is of one process, and which there are changes meanwhile.
    seen, first, away, missing = dict[str, int](), True, False, dict[str, str]()
    while True:
        processes = EachProcess(service)
        try:
            found = _asked(processes, max(last, _FEW) if first else _FEW, None if first else seen)
        except ServiceUnavailable as error:
            if not away:
                say(f"The service does not answer, which is tried again: {error}", err=True)
            away = True
        else:
            new = unseen(found, seen)
            for each in _newest(new, last) if first else new:
                say(json.dumps(each) if as_json else event_line(each))
            if processes.missing.keys() != missing.keys():
                print_missing(processes)
            first, away, missing = False, False, processes.missing
        time.sleep(_SECONDS)


def _asked(processes: EachProcess, few: int, seen: dict[str, int] | None) -> list[dict[str, Any]]:
    """The last few events of each process; all that there are, where others may have come after those seen."""
    found = _last(processes, few)
    if seen is not None and may_lack(found, seen, few):
        found = _last(processes, _MOST)
    return found


def _last(processes: EachProcess, count: int) -> list[dict[str, Any]]:
    return processes.lines(f"/events?last={count}", "unix_ns")


def may_lack(found: list[dict[str, Any]], seen: dict[str, int], few: int) -> bool:
    """Whether others may have come between the last event seen of a process and its last few, which were found."""
    numbers = dict[str, list[int]]()
    for each in found:
        numbers.setdefault(each["process"], []).append(each["number"])
    return any(
        len(those) >= few and not min(those) <= seen.get(name, 0) <= max(those) for name, those in numbers.items()
    )


def _newest(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The last ones: each process has told so many."""
    return events[max(0, len(events) - count) :]


def unseen(found: list[dict[str, Any]], seen: dict[str, int]) -> list[dict[str, Any]]:
    """Those of some events that come after the last one seen of their process, by name; and they are seen then.
    Where numbers of a process go back, it has started anew, by another clock.
    """
    newest = dict[str, int]()
    for each in found:
        newest[each["process"]] = max(each["number"], newest.get(each["process"], 0))
    known = {name: last if (last := seen.get(name, 0)) <= number else 0 for name, number in newest.items()}
    seen |= newest
    return [each for each in found if each["number"] > known[each["process"]]]


def event_line(event: dict[str, Any]) -> str:
    """An event on one line."""
    where = {"process": event["process"]} if event["process"] else {}
    subject = " ".join(f"{name}={value}" for name, value in (where | event["subject"]).items())
    more = f"({event['repeats']} more like it since the last one)" if event.get("repeats") else ""
    said = " ".join(filter(None, [subject, event["text"], more]))
    return f"{utc(event['unix_ns'])}  {event['level']:7}  {event['event'].replace('_', ' ')}: {said}"
