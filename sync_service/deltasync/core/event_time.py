"""The time of the newest event that something has learnt from, which nobody need know: None then."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from deltasync.core.errors import InvalidInput

_LAST = 2**63 - 1


def newest_event_time(times: Iterable[int | None]) -> int | None:
    """The newest of some times, nanoseconds since 1970; None if none is known."""
    return max((time for time in times if time is not None), default=None)


def check_event_time(event_time_unix_ns: Any) -> None:
    """See that the time of an event is one, or None.

    Raises:
        InvalidInput: it is no whole number of nanoseconds since 1970.
    """
    if event_time_unix_ns is None:
        return
    whole = isinstance(event_time_unix_ns, Integral) and not isinstance(event_time_unix_ns, bool)
    if not whole or not 1 <= int(event_time_unix_ns) <= _LAST:
        raise InvalidInput(
            f"event_time_unix_ns: {event_time_unix_ns!r}, expected whole nanoseconds since 1970, or None"
        )


def seconds_behind(event_time_unix_ns: int | None, now_unix_ns: int) -> float | None:
    """For how many seconds an event is past; 0 if a clock that is ahead dates it in the future."""
    return None if event_time_unix_ns is None else round(max(0, now_unix_ns - event_time_unix_ns) / 1e9, 3)
