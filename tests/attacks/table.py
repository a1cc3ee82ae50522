"""What attacks did, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

_MUCH_MEMORY, _MUCH_DISK, _MUCH_LOG = 64 << 20, 48 << 20, 1 << 20
_MANY = 20
# A cut that takes longer than both has been kept waiting.
_LONG_MS, _LONG_RATIO = 200.0, 10.0
_HEADS = ("before", "now", "now, with roles")


def harms(figures: Mapping[str, Any]) -> list[str]:
    """What an attack did to the service and to those who use it."""
    if not figures["alive"]:
        return ["the service has ended"]
    found = [*_taken(figures["usage"]), *_slowed(figures["cuts"])]
    if figures["harm"]:
        found.append(figures["harm"])
    if figures["failure"]:
        found.append(f"the honest were refused: {figures['failure'].split(':')[0]}")
    elif not figures["same_rows"]:
        found.append("the replica has other rows than the trainer")
    return found


def _taken(usage: Mapping[str, Mapping[str, int]]) -> list[str]:
    before, most, after = usage["before"], usage["most"], usage["after"]
    grown = {name: most[name] - before[name] for name in before}
    kept = {name: after[name] - before[name] for name in before}
    found = [
        f"{name} +{_size(grown[name])}, of which {_size(max(0, kept[name]))} stay"
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
    """A Markdown table with a line for each attack and a column for each run."""
    by_name = [{each["attack"]: each for each in run} for run in runs]
    heads = ["attack", *_HEADS[: len(runs)]]
    lines = [heads, ["---"] * len(heads)]
    for each in runs[0]:
        cells = [_cell(run[each["attack"]]) if each["attack"] in run else "" for run in by_name]
        lines.append([f"{each['attack']}: {each['says']}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(figures: Mapping[str, Any]) -> str:
    """Memory and disk before, at most and after; 99 of 100 cuts without the attack and during it; and harms."""
    usage, cuts = figures["usage"], figures["cuts"]
    memory, disk = (
        " → ".join(f"{usage[when][name] / 1e6:,.0f}" for when in usage) + " MB" for name in ("memory", "disk")
    )
    times = f"{cuts['without_p99']:,.0f} → {cuts['during_p99']:,.0f} ms"
    done = "; ".join(harms(figures)).replace("|", "/") or "no harm"
    return f"memory {memory}, disk {disk}, cuts {times}: **{done}**"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"
