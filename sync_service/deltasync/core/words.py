"""Numbers and times as people read them."""

from datetime import UTC, datetime


def counted(number: int, noun: str) -> str:
    """So many of something whose plural ends in -s: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def are(number: int, noun: str) -> str:
    """The same as the subject of a sentence: `1 row is`, `2 rows are`."""
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def utc(unix_ns: int) -> str:
    """A time, nanoseconds since 1970, in UTC, to the second: `2001-09-09T01:46:40Z`."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
