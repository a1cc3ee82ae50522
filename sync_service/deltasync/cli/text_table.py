"""What people read on a terminal: lines, tables and numbers."""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from deltasync.core.words import duration, printable

_STATES = (
    *("failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current"),
    "in sync",
)


def say(*lines: str, err: bool = False) -> None:
    """Print lines. All text of a command goes out here.

    Characters that do not print are escaped. Names come from others: one with a line break or a control sequence
    would otherwise forge a line, or command the terminal.
    """
    click.echo("\n".join(map(one_line, lines)), err=err)


def one_line(text: object) -> str:
    """A text of any length with the characters escaped that do not print."""
    return printable(str(text), sys.maxsize)


def paragraphs(parts: Iterable[Sequence[str]]) -> list[str]:
    """The lines of all parts, with an empty line between two of them."""
    return [line for part in parts if part for line in ("", *part)][1:]


def text_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Format rows under their titles, a line each.

    Columns of numbers are aligned to the right. None is an empty cell.
    """
    lines = [["" if cell is None else one_line(cell) for cell in row] for row in rows]
    everything = [list(titles), *lines]
    widths = [max(len(line[at]) for line in everything) for at in range(len(titles))]
    right = [bool(lines) and all(_is_number(line[at]) for line in lines) for at in range(len(titles))]
    return [_line(line, widths, right) for line in everything]


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
