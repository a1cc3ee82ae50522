"""`deltasync events`."""

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
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
@click.option("--last", type=click.IntRange(0, 1000), default=20, help="Earlier events to show.")
@click.option("--follow", "-f", is_flag=True, help="Also show new events, until Ctrl-C.")
@json_option
@operator_options()
def events(last: int, follow: bool, service: Endpoint, as_json: bool) -> None:
    """Show recent events of all processes: joins, refusals, repairs, takeovers.

    Each line has the time (UTC), level, event, subject and reason. With --json and --follow, each line is a JSON
    object.
    """
    if not follow:
        processes = EachProcess(service)
        newest = _newest(_last(processes, last), last)
        print_missing(processes)
        say(*(json_lines(newest) if as_json else map(event_line, newest)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        follow_events(lambda: EachProcess(service), last, as_json=as_json, pause=partial(time.sleep, _SECONDS))


def follow_events(ask: Callable[[], EachProcess], last: int, *, as_json: bool, pause: Callable[[], None]) -> None:
    """Print the last events, and then new ones for ever, with a pause between requests."""
    # Poll, because the event stream covers only one process, and processes come and go.
    seen, first, away, missing = dict[str, int](), True, False, dict[str, str]()
    while True:
        processes = ask()
        try:
            latest = _asked(processes, max(last, _FEW) if first else _FEW, None if first else seen)
        except ServiceUnavailable as error:
            if not away:
                say(f"The service does not answer; trying again: {error}", err=True)
            away = True
        else:
            new = unseen(latest, seen)
            for each in _newest(new, last) if first else new:
                say(json.dumps(each) if as_json else event_line(each))
            if processes.missing.keys() != missing.keys():
                print_missing(processes)
            first, away, missing = False, False, processes.missing
        pause()


def _asked(processes: EachProcess, few: int, seen: dict[str, int] | None) -> list[dict[str, Any]]:
    """The last few events of each process; as many as possible if these may leave a gap after `seen`."""
    latest = _last(processes, few)
    if seen is not None and may_lack(latest, seen, few):
        latest = _last(processes, _MOST)
    return latest


def _last(processes: EachProcess, count: int) -> list[dict[str, Any]]:
    return processes.lines(f"/events?last={count}", "unix_ns")


def may_lack(latest: list[dict[str, Any]], seen: dict[str, int], few: int) -> bool:
    """Whether events may be missing between the last seen number of a process and its latest few events."""
    numbers = dict[str, list[int]]()
    for each in latest:
        numbers.setdefault(each["process"], []).append(each["number"])
    return any(len(own) >= few and not min(own) <= seen.get(name, 0) <= max(own) for name, own in numbers.items())


def _newest(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The last `count` of all events, because each process has sent up to `count`."""
    return events[max(0, len(events) - count) :]


def unseen(latest: list[dict[str, Any]], seen: dict[str, int]) -> list[dict[str, Any]]:
    """The events after the last seen number of their process; updates `seen`, which is by process name.

    If a process's numbers went back, it has restarted with another clock, and all its events are new.
    """
    newest = dict[str, int]()
    for each in latest:
        newest[each["process"]] = max(each["number"], newest.get(each["process"], 0))
    after = {name: last if (last := seen.get(name, 0)) <= number else 0 for name, number in newest.items()}
    seen |= newest
    return [each for each in latest if each["number"] > after[each["process"]]]


def event_line(event: dict[str, Any]) -> str:
    """Format an event as one line."""
    where = {"process": event["process"]} if event["process"] else {}
    subject = " ".join(f"{name}={value}" for name, value in (where | event["subject"]).items())
    more = f"({event['repeats']} more like it since the last one)" if event.get("repeats") else ""
    words = " ".join(filter(None, [subject, event["text"], more]))
    return f"{utc(event['unix_ns'])}  {event['level']:7}  {event['event'].replace('_', ' ')}: {words}"
