"""What attacks did, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

_MUCH_MEMORY, _MUCH_DISK, _MUCH_LOG = 64 << 20, 48 << 20, 1 << 20
_MANY = 20
# A cut that takes longer than both has been kept waiting.
_LONG_MS, _LONG_RATIO = 200.0, 10.0
_HEADS = ("without roles", "with roles")
_NO_HARM, _NOT_MEASURED = "none", "not measured"


def harms(figures: Mapping[str, Any]) -> list[str]:
    """What an attack did to the service and to those who use it."""
    if not figures["alive"]:
        return ["the service has ended"]
    found = [*_taken(figures["usage"]), *_slowed(figures["cuts"])]
    if figures["harm"]:
        found.append(figures["harm"])
    if figures["failure"]:
        found.append(f"the trainer is refused: {figures['failure'].split(':')[0]}")
    elif not figures["same_rows"]:
        found.append("the replica has other rows than the trainer")
    return found


def _taken(usage: Mapping[str, Mapping[str, int]]) -> list[str]:
    before, most, after = usage["before"], usage["most"], usage["after"]
    grown = {name: most[name] - before[name] for name in before}
    kept = {name: after[name] - before[name] for name in before}
    found = [
        f"{name} +{_size(grown[name])}, {_size(max(0, kept[name]))} stay"
        for name, much in (("memory", _MUCH_MEMORY), ("disk", _MUCH_DISK))
        if grown[name] > much
    ]
    found += [f"{kept[name]} more {name} stay" for name in ("threads", "descriptors") if kept[name] > _MANY]
    if kept["log"] > _MUCH_LOG:
        found.append(f"{kept['lines']:,} lines of log, {_size(kept['log'])}")
    return found


def _slowed(cuts: Mapping[str, float]) -> list[str]:
    longest, before = cuts["during_longest"], cuts["without_p99"]
    slow = longest > max(_LONG_MS, _LONG_RATIO * before)
    return [f"cuts of up to {longest:,.0f} ms"] if slow else []


def table(*runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the attacks that did harm, with a column for each run, and a list of the others."""
    by_name = [{each["attack"]: each for each in run} for run in runs]
    lines = [
        (each["says"], [_cell(run[each["attack"]]) if each["attack"] in run else _NOT_MEASURED for run in by_name])
        for each in runs[0]
    ]
    return written(lines)


def written(lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Markdown of attacks in words, each with its harm in each run."""
    heads = ["attack", *_HEADS]
    harmful = [(says, cells) for says, cells in lines if {*cells} - {_NO_HARM, _NOT_MEASURED}]
    rows = [heads, ["---"] * len(heads), *([says, *cells] for says, cells in harmful)]
    text = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    rest = [(says, _NOT_MEASURED in cells) for says, cells in lines if (says, cells) not in harmful]
    for title, partly in (
        ("No harm in either case", False),
        ("No harm without roles, not measured with roles", True),
    ):
        if names := [says for says, missing in rest if missing is partly]:
            text += f"\n{title}: {'; '.join(names)}.\n"
    return text


def _cell(figures: Mapping[str, Any]) -> str:
    return "; ".join(harms(figures)).replace("|", "/") or _NO_HARM


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
