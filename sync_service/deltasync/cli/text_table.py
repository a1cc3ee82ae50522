"""Tables and numbers for people."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from deltasync.core.words import duration

_STATES = (
    *("failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current"),
    "in sync",
)


def text_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows under their titles; columns of numbers are to the right. What is not known (None) is left empty."""
    lines = [["" if cell is None else str(cell) for cell in row] for row in rows]
    everything = [list(titles), *lines]
    widths = [max(len(line[at]) for line in everything) for at in range(len(titles))]
    right = [bool(lines) and all(_is_number(line[at]) for line in lines) for at in range(len(titles))]
    return "\n".join(_line(line, widths, right) for line in everything)


def seconds(number: float | None) -> str:
    """A duration; empty where it is not known."""
    return "" if number is None else duration(number)


def size(number: float | None) -> str:
    """Bytes: `512 B`, `4.0 kB`, `1.2 GB`; empty where that is not known."""
    if number is None:
        return ""
    if number < 1000:
        return f"{number:.0f} B"
    units = ("kB", "MB", "GB", "TB")
    at = min(len(units), int(math.log10(number) / 3))
    return f"{number / 1000**at:.1f} {units[at - 1]}"


def share(number: float | None) -> str:
    """A share of one as percents; empty where it is not known."""
    return "" if number is None else f"{100 * number:.3g} %"


def urgency(state: str) -> int:
    """The place of a state among all, those that need somebody first."""
    return _STATES.index(state) if state in _STATES else -1


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    shown = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(shown).rstrip()


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit()
