"""Readable forms of numbers, times, names and texts of peers."""

from collections.abc import Iterable
from datetime import UTC, datetime

# Maximum length of a text from a peer, in characters.
LONGEST_TEXT = 400


def counted(number: int, noun: str) -> str:
    """A number and a noun whose plural ends in -s: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def are(number: int, noun: str) -> str:
    """A counted noun as the subject of a sentence: `1 row is`, `2 rows are`."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def duration(seconds: float) -> str:
    """A duration: `0.3 ms`, `41 ms`, `2.5 s`, `3 min`, `2.1 h`."""
    for limit, factor, unit in (
        (0.0995, 1000, "ms"),
        (120, 1, "s"),
        (7200, 1 / 60, "min"),
        (172_800, 1 / 3600, "h"),
    ):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    days = seconds / 86_400
    return f"{days:.3g} days" if days < 100 else f"{days:.0f} days"


def utc(unix_ns: int) -> str:
    """A time, in nanoseconds since 1970, as UTC with seconds: `2001-09-09T01:46:40Z`."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def listed(names: Iterable[str], most: int = 10) -> str:
    """Names in order, at most `most` of them: `a, b, c ... and 390 more`; empty without names."""
    ordered = sorted(names)
    more = f" ... and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def printable(text: str, longest: int = LONGEST_TEXT) -> str:
    """Put the text of a peer on one line of at most `longest` characters, escaping unprintable ones."""
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
