"""`deltasync lag`."""

import sys
from typing import Any

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options, suggested
from deltasync.cli.output import (
    json_lines,
    json_option,
    one_line,
    paragraphs,
    say,
    seconds,
    share,
    show,
    text_table,
    urgency,
    watch_option,
)
from deltasync.client.admin import EachProcess, fetch_lag, owners_lines
from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import Policy

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
def lag(
    consumers: tuple[str, ...], service: Endpoint, max_seconds: float | None, watch: bool, as_json: bool
) -> None:
    """Show how far consumers are behind their models: one line each, or full details of each NAME.

    \b
    state         one word, explained in sync_service/docs/operating.md; worst first
    offset        newest version that all replicas have acknowledged; with a policy, newest release. Releases have
                  their own numbers, which can exceed the version
    versions      sealed versions not applied yet
    rows          upper bound of the rows that differ from the model's
    bytes         bytes of these rows' ids and values
    seconds       age of the oldest of these rows or versions
    replicas      connected replicas / all replicas
    p50, p99      time from the end of a step until replicas had it, over the last 500 deliveries
    unsent norm   with a policy: L2 norm of the difference between the model and its replicas
    unsent share  the same as a share of the norm of the tables
    """
    answers: list[Any] = []

    def shown(processes: EachProcess) -> list[str]:
        answers[:] = (
            [fetch_lag(service, name) for name in consumers]
            if consumers
            else owners_lines(processes.answers("/lag"), "consumer")
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
    behind = answer["lag"]["seconds"] if "lag" in answer else answer["seconds"]
    return answer["state"] not in _HOLDING or behind is None or behind > most


# One line of a table.
Row = tuple[Any, ...]


_TITLES = ("", "offset", "versions", "rows", "bytes", "seconds")


_UNSENT_TITLES = ("unsent norm", "unsent share")


def consumer_lines(lines: list[dict[str, Any]]) -> list[str]:
    """One line per consumer, most urgent first, then the replicas in trouble.

    Even a consumer in sync can have such a replica: one that another program writes to.
    """
    if not lines:
        return [f"no consumers: create one with {suggested('consumers create NAME --model MODEL')}"]
    titles = (
        *("consumer", "model", "state", "versions", "rows", "bytes", "seconds", "unsent share", "replicas"),
        *("p50", "p99", "why"),
    )
    worst_first = sorted(lines, key=lambda line: (urgency(line["state"]), line["consumer"]))
    return [*text_table(titles, map(_line, worst_first)), *_wrong(worst_first)]


def _wrong(lines: list[dict[str, Any]]) -> list[str]:
    wrong = [
        f"replica {each['replica']} of {line['consumer']}: {each['reason']}"
        for line in lines
        for each in line["wrong"]
    ]
    more = len(wrong) - _MOST_WRONG
    return wrong[:_MOST_WRONG] + ([f"and {more} more: {suggested('replicas list')}"] if more > 0 else [])


def _line(line: dict[str, Any]) -> tuple[Any, ...]:
    fresh = line["freshness"]
    return (
        *(line[name] for name in ("consumer", "model", "state", "versions", "rows", "bytes", "seconds")),
        share(line["unsent_share"]),
        f"{line['connected']}/{line['replicas']}",
        seconds(fresh["p50"]),
        seconds(fresh["p99"]),
        line["reason"],
    )


def lag_lines(answer: dict[str, Any]) -> list[str]:
    """Format the lag of a consumer: its state, its last release if any, and a table of replicas and tables."""
    head = f"consumer {answer['consumer']}  model {answer['model']}  head {answer['head']}  {answer['state']}"
    return [head, answer["reason"], *_aligned(_facts(answer)), "", *_table(answer)]


def _facts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("policy", Policy.from_dict(answer["policy"]).words)]
    facts += _release_facts(answer, answer["release"]) if answer["release"] else []
    if (behind := answer["head_seconds_behind_events"]) is not None:
        facts.append(("events", _events(answer["lag"]["seconds_behind_events"], behind)))
    if answer["damages"]:
        facts.append(("damages", f"{counted(answer['damages'], 'table')} of replicas since the service started"))
    facts += [(f"replica {replica['replica']}", replica["reason"]) for replica in answer["replicas"]]
    return [(name, text) for name, text in facts if text]


def _events(replica: float | None, head: float) -> str:
    holds = "unknown" if replica is None else f"{replica} seconds ago"
    return f"newest event in the newest version: {head} seconds ago; in the slowest replica: {holds}"


def _release_facts(answer: dict[str, Any], release: dict[str, Any]) -> list[tuple[str, str]]:
    lag = answer["lag"]
    # After a restart, or without a connected replica, the norm is unknown for a while.
    until = "next release is made" if answer["offset"] == release["number"] else "newest release is applied"
    unsent = f"norm {_norm(lag)}, {_share(lag)} of the tables'" if _norm(lag) else f"unknown until the {until}"
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


def _table(answer: dict[str, Any]) -> list[str]:
    ranked = answer["release"] is not None
    lines: list[Row] = [(*_TITLES, *_UNSENT_TITLES)]
    lines.append(("all replicas", answer["offset"], *_numbers(answer["lag"])))
    lines += [(_name(replica), replica["offset"], *_numbers(replica["lag"])) for replica in answer["replicas"]]
    for table in answer["tables"]:
        seconds = table["oldest_row_seconds"] if ranked else ""
        lines.append((table["table"], "", "", table["rows"], table["bytes"], seconds, _norm(table), _share(table)))
    return _columns(lines if ranked else [line[: len(_TITLES)] for line in lines])


def _columns(lines: list[Row]) -> list[str]:
    names = [one_line(line[0]) for line in lines]
    width = max(map(len, names))
    return [
        f"{name:<{width}}" + "".join(f"{cell!s:>14}" for cell in line[1:])
        for name, line in zip(names, lines, strict=True)
    ]


def _name(replica: dict[str, Any]) -> str:
    name, state = replica["replica"], replica["state"]
    return f"{name}" if state == "connected" else f"{name} ({state})"


def _numbers(lag: dict[str, Any]) -> Row:
    return lag["versions"], lag["rows"], lag["bytes"], lag["seconds"], _norm(lag), _share(lag)


def _norm(lag: dict[str, Any]) -> str:
    return "" if lag["unsent_norm"] is None else f"{lag['unsent_norm']:.4g}"


def _share(lag: dict[str, Any]) -> str:
    return "" if lag["unsent_share"] is None else f"{100 * lag['unsent_share']:.3g} %"
