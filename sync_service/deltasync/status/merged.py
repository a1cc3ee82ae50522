"""Answers of several processes, as JSON, made one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deltasync.status.overview import CUTS, EVENTS

# Of the answers of some processes, and the names of those that did not answer.
Merge = Callable[[Sequence[Any], Sequence[str]], Any]


def _lists(answers: Sequence[Any], _missing: Sequence[str], *, by: Sequence[str]) -> list[Any]:
    return sorted((line for each in answers for line in each), key=lambda line: [line[name] for name in by])


def _overviews(answers: Sequence[Any], missing: Sequence[str]) -> dict[str, Any]:
    """Overviews: the first is that of whoever answers."""
    lines: dict[str, list[Any]] = {
        name: _lists([each[name] for each in answers], missing, by=by) for name, by in _OVERVIEW.items()
    }
    shortened = {"cuts": lines["cuts"][:CUTS], "events": lines["events"][-EVENTS:]}
    return {**answers[0], **lines, **shortened, "missing": list(missing)}


_OVERVIEW = {
    "processes": ("process",),
    "models": ("model",),
    "trainers": ("model", "rank"),
    "consumers": ("consumer",),
    "cuts": ("seconds_ago",),
    "events": ("unix_ns",),
}
# By route; what other routes answer is of one process alone.
MERGES: dict[str, Merge] = {
    "/status": _overviews,
    "/events": partial(_lists, by=("unix_ns",)),
    "/consumers": partial(_lists, by=("consumer",)),
    "/lag": partial(_lists, by=("consumer",)),
    "/models": partial(_lists, by=("model",)),
    "/tables": partial(_lists, by=("model", "table")),
    "/trainers": partial(_lists, by=("model", "rank")),
    "/versions": partial(_lists, by=("model",)),
    "/deletes": partial(_lists, by=("model",)),
    "/snapshots": partial(_lists, by=("model",)),
}
