"""Answers of several processes, as JSON, made one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from deltasync.status.overview import CUTS, EVENTS

# Of the answers of some processes, and the names of those that did not answer.
Merge = Callable[[Sequence[Any], Sequence[str]], Any]


def _lists(answers: Sequence[Any], _missing: Sequence[str], *, by: Sequence[str]) -> list[Any]:
    return sorted((line for each in answers for line in each), key=lambda line: [line[name] for name in by])


def _known(answers: Sequence[Any], missing: Sequence[str], *, by: str) -> list[Any]:
    """Lines of which several processes may have one of the same name: whoever answers for it knows more of it."""
    known_last = sorted(_lists(answers, missing, by=(by,)), key=lambda line: line.get("head") is not None)
    return _lists([list({line[by]: line for line in known_last}.values())], missing, by=(by,))


def _overviews(answers: Sequence[Any], missing: Sequence[str]) -> dict[str, Any]:
    """Overviews: the first is that of whoever answers."""
    lines: dict[str, list[Any]] = {
        name: _lists([each[name] for each in answers], missing, by=by) for name, by in _OVERVIEW.items()
    }
    for name, by in _KNOWN.items():
        lines[name] = _known([each[name] for each in answers], missing, by=by)
    shortened = {"cuts": lines["cuts"][:CUTS], "events": lines["events"][-EVENTS:]}
    return {**answers[0], **lines, **shortened, "missing": list(missing)}


_OVERVIEW = {
    "processes": ("process",),
    "trainers": ("model", "rank"),
    "cuts": ("seconds_ago",),
    "events": ("unix_ns",),
}
# Others than whoever answers for a model may know of it, too.
_KNOWN = {"models": "model", "consumers": "consumer"}
# By route; what other routes answer is of one process alone.
_MERGES: dict[str, Merge] = {
    "/status": _overviews,
    "/events": partial(_lists, by=("unix_ns",)),
    "/consumers": partial(_lists, by=("consumer",)),
    "/lag": partial(_known, by="consumer"),
    "/models": partial(_lists, by=("model",)),
    "/tables": partial(_lists, by=("model", "table")),
    "/trainers": partial(_lists, by=("model", "rank")),
    "/versions": partial(_lists, by=("model",)),
    "/deletes": partial(_lists, by=("model",)),
    "/snapshots": partial(_lists, by=("model",)),
}
_TABLE = "/tables/"


def merge_of(path: str) -> Merge | None:
    """What makes one answer of those of several processes; None where one of them alone has it."""
    return _tables_of_name if path.startswith(_TABLE) else _MERGES.get(path)


def _tables_of_name(answers: Sequence[Any], _missing: Sequence[str]) -> list[Any]:
    return sorted((line for each in answers for line in each), key=lambda line: line["table"]["model"])
