"""The last events, for whoever looks later or follows them."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deltasync.core.events import Event, text_of
from deltasync.core.signals import Signal
from deltasync.core.words import printable

KEPT_EVENTS = 1000
_LONGEST_NAME = 200


@dataclass(frozen=True)
class RecentEvent:
    """Something that has happened.

    Attributes:
        process: where; empty of what happened before it had a name.
        number: tells it from others there, and is greater than that of any before, also of those before a restart.
        unix_ns: when it happened, nanoseconds since 1970.
        event: what, as in `deltasync_events_total`.
        level: how loud the log says it: info, warning or error.
        subject: to whom: model, consumer, replica, rank and the like, by name.
        text: why, or what came of it.
        repeats: how often it was since the one before that says the same, and was not told.
    """

    process: str
    number: int
    unix_ns: int
    event: str
    level: str
    subject: dict[str, str]
    text: str
    repeats: int = 0


class RecentEvents:
    """The last events. Added to in the event loop.

    Attributes:
        signal: wakes who waits for the next one.
        last: the number of the last one; 0 before there is one.
    """

    def __init__(self, process: Callable[[], str], now_unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.signal, self._process = Signal(), process
        self._now, self.last, self._lost = now_unix_ns, 0, 0
        self._events = deque[RecentEvent](maxlen=KEPT_EVENTS)

    def add(self, event: Event, repeats: int = 0) -> None:
        """Have one more, and how often it was since the one before that says the same."""
        now = self._now()
        # Where the clock was set back, numbers go on all the same.
        self.last = max(self.last + 1, now // 1000)
        subject = {name: printable(str(value), _LONGEST_NAME) for name, value in event.subject.items()}
        level = logging.getLevelName(event.kind.level).lower()
        kind, text = event.kind.value, text_of(event)
        if len(self._events) == KEPT_EVENTS:
            self._lost = self._events[0].number
        self._events.append(RecentEvent(self._process(), self.last, now, kind, level, subject, text, repeats))
        self.signal.wake()

    def lacks(self, number: int) -> bool:
        """Whether others have come after the event of that number which are not kept any more."""
        return number < self._lost

    def newest(self, count: int) -> list[RecentEvent]:
        """The last ones, the oldest of them first."""
        return list(self._events)[-count:] if count else []

    def before(self, count: int) -> int:
        """The number after which so many of the last ones come."""
        found = self.newest(count)
        return found[0].number - 1 if found else self.last

    def after(self, number: int) -> list[RecentEvent]:
        """Those with greater numbers, the oldest first."""
        return [each for each in self._events if each.number > number]
