"""What happens to a service: events in its log, and the last ones for those who look later."""

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from typing import TypeAlias

from deltasync.base.errors import DeltasyncError
from deltasync.base.logs import FIELDS
from deltasync.base.signals import Signal
from deltasync.base.words import printable

logger = logging.getLogger("deltasync.events")


class EventKind(Enum):
    """What can happen. The value is its name for logs and metrics, the level how loud the log says it."""

    RANK_JOINED = "rank_joined", logging.INFO
    RANK_LEFT = "rank_left", logging.INFO
    RUN_SUPERSEDED = "run_superseded", logging.WARNING
    PUBLISHER_REFUSED = "publisher_refused", logging.WARNING
    CUT_SEALED = "cut_sealed", logging.DEBUG
    REPLICA_JOINED = "replica_joined", logging.INFO
    REPLICA_LEFT = "replica_left", logging.INFO
    REPLICA_LOST = "replica_lost", logging.INFO
    REPLICA_REPLACED = "replica_replaced", logging.WARNING
    REPLICA_TAKEN_OVER = "replica_taken_over", logging.WARNING
    REPLICA_FORGOTTEN = "replica_forgotten", logging.INFO
    REPLICA_REFUSED = "replica_refused", logging.WARNING
    REPLICA_DAMAGED = "replica_damaged", logging.ERROR
    REPLICA_REPAIRED = "replica_repaired", logging.INFO
    REPLICA_VERIFIED = "replica_verified", logging.INFO
    REPLICA_REWOUND = "replica_rewound", logging.WARNING
    RELEASE_MADE = "release_made", logging.DEBUG
    CONSUMER_CHANGED = "consumer_changed", logging.INFO
    CONSUMER_PAUSED = "consumer_paused", logging.WARNING
    CONSUMER_RESUMED = "consumer_resumed", logging.WARNING
    CONFIGURATION_RELOADED = "configuration_reloaded", logging.INFO
    CONFIGURATION_REFUSED = "configuration_refused", logging.ERROR
    CERTIFICATE_RELOADED = "certificate_reloaded", logging.INFO
    CERTIFICATE_REFUSED = "certificate_refused", logging.ERROR
    CERTIFICATE_EXPIRED = "certificate_expired", logging.WARNING
    KEY_EXPOSED = "key_exposed", logging.WARNING
    ROLES_RELOADED = "roles_reloaded", logging.INFO
    ROLES_REFUSED = "roles_refused", logging.ERROR
    LOG_LEVEL_CHANGED = "log_level_changed", logging.INFO
    # Written down by the audit, in a log of its own.
    CALL_REFUSED = "call_refused", logging.WARNING
    CUT_REFUSED = "cut_refused", logging.ERROR
    CUT_QUARANTINED = "cut_quarantined", logging.ERROR
    MODEL_DELETED = "model_deleted", logging.WARNING
    TABLE_DELETED = "table_deleted", logging.WARNING
    DELETE_REQUESTED = "delete_requested", logging.INFO
    ROWS_DELETED = "rows_deleted", logging.INFO
    MODEL_RECOVERED = "model_recovered", logging.INFO
    MODEL_CLAIMED = "model_claimed", logging.INFO
    MODEL_TAKEN_OVER = "model_taken_over", logging.WARNING
    MODEL_NOT_TAKEN = "model_not_taken", logging.ERROR
    MODEL_GIVEN_UP = "model_given_up", logging.WARNING
    PROCESS_CONFIRMED = "process_confirmed", logging.INFO
    PROCESS_UNCONFIRMED = "process_unconfirmed", logging.ERROR
    PROCESS_DRAINING = "process_draining", logging.WARNING
    ROWS_DAMAGED = "rows_damaged", logging.ERROR
    MODEL_RELOADED = "model_reloaded", logging.WARNING
    CHECKED = "checked", logging.INFO
    BACKED_UP = "backed_up", logging.INFO
    CHECKPOINTED = "checkpointed", logging.DEBUG
    VOLUME_FAILED = "volume_failed", logging.ERROR
    VOLUME_RECOVERED = "volume_recovered", logging.INFO
    FAILED = "failed", logging.ERROR

    def __new__(cls, name: str, level: int) -> "EventKind":
        """A kind of that name."""
        kind = object.__new__(cls)
        kind._value_ = name
        kind.level = level
        return kind

    level: int


# Those that come again and again while a volume refuses writes; of these the ones that say where a rank is.
_OF_AN_OUTAGE = frozenset(
    {EventKind.RANK_JOINED, EventKind.RANK_LEFT, EventKind.PUBLISHER_REFUSED, EventKind.FAILED}
)
_OF_RANKS = frozenset({EventKind.RANK_JOINED, EventKind.RANK_LEFT})
# Those of peers that come again by themselves; how often the log repeats one, and how many lines it remembers.
_TRIED_AGAIN = frozenset(
    {EventKind.PUBLISHER_REFUSED, EventKind.REPLICA_REFUSED, EventKind.CUT_REFUSED, EventKind.FAILED}
)
_REPEAT_SECONDS = 60.0
# In an error numbers may differ with each try: bytes that are free, say.
_NUMBER = re.compile("[0-9]+")
_LINES = 1000
# Those that another log has.
_AUDITED = frozenset({EventKind.CALL_REFUSED})


@dataclass(frozen=True)
class Event:
    """Something that has happened.

    Attributes:
        kind: what.
        subject: to whom: model, consumer, replica, rank, version and the like, by name.
        text: why, or what came of it, in words; may hold what a peer has said.
        error: what has failed.
    """

    kind: EventKind
    subject: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    error: Exception | None = None


Listener = Callable[[Event], None]


# Keeps an event that is written down, and how often more it was since the one before that says the same.
Keep = Callable[[Event, int], None]


@dataclass
class _Line:
    """A line of the log that may come again.

    Attributes:
        event: what it says.
        written: when it was written last.
        repeats: how often it was not since.
    """

    event: Event
    written: float
    repeats: int = 0

    def is_over(self, now: float) -> bool:
        """Whether it may be written again."""
        return now - self.written >= _REPEAT_SECONDS


class Events:
    """The one place. Used in the event loop."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def listen(self, listener: Listener) -> None:
        """Have somebody else told, too."""
        self._listeners += (listener,)

    def emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        """Tell all listeners of something that has just happened."""
        event = Event(kind, subject, text, error)
        for listener in self._listeners:
            listener(event)


_Key: TypeAlias = tuple[object, ...]


class _Outage:
    """While a volume refuses writes: what its peers, who try again and again, have been told."""

    def __init__(self) -> None:
        self._volumes = set[object]()
        self._said = set[_Key]()
        self._ranks = dict[_Key, tuple[EventKind, Event]]()  # What was said of each last, and what happened last.

    def due(self, event: Event) -> list[Event]:
        """What is to be said now that an event has happened: itself, unless the same was said since the volume
        failed. Once it takes writes again, where ranks have come to by then.
        """
        if event.kind is EventKind.VOLUME_FAILED:
            self._volumes.add(event.subject.get("volume"))
        elif event.kind is EventKind.VOLUME_RECOVERED:
            self._volumes.discard(event.subject.get("volume"))
            return [event, *(self._end() if not self._volumes else ())]
        elif self._volumes and event.kind in _OF_AN_OUTAGE:
            return [event] if self._is_new(event) else []
        return [event]

    def _is_new(self, event: Event) -> bool:
        subject = tuple(event.subject.items())
        key = event.kind, subject, event.text, type(event.error)
        new = key not in self._said
        if new and len(self._said) < _LINES:  # Of more, all is said.
            self._said.add(key)
            if event.kind in _OF_RANKS:
                self._ranks[subject] = event.kind, event
        elif not new and subject in self._ranks:
            self._ranks[subject] = self._ranks[subject][0], event
        return new

    def _end(self) -> list[Event]:
        changed = [event for said, event in self._ranks.values() if event.kind is not said]
        self._said.clear()
        self._ranks.clear()
        return changed


class EventLog:
    """Writes events into the log, each as one line; an error that was not foreseen with its traceback. A listener.

    What a peer that tries again and again is refused for, is written down once a minute, with how often it was
    since; and so is what fails again and again, and that versions of a model are put in quarantine. What a volume
    that refuses writes brings again and again is, once.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic, keep: Keep = lambda _event, _repeats: None
    ) -> None:
        """`keep` is given what is written down, but for what is only there to find faults."""
        self._now, self._keep = now, keep
        self._lines = dict[str, _Line]()  # The one that was written longest ago first.
        self._outage = _Outage()

    def __call__(self, event: Event) -> None:
        """Write an event."""
        for each in self._outage.due(event):
            self._write(each)

    def tell_repeats(self) -> None:
        """Write what has come again since it was written, a while ago; and forget what has not. To be called now
        and then: who waited for it to come once more might wait for ever.
        """
        now = self._now()
        for key in list(takewhile(lambda key: self._lines[key].is_over(now), self._lines)):
            self._renew(key, now)

    def _write(self, event: Event) -> None:
        if event.kind in _AUDITED:
            if event.subject:  # The others are counted alone.
                self._keep(event, 0)
        elif (key := _repeated(event)) is None:
            self._say(event)
        else:
            self._repeat(key, event, self._now())

    def _repeat(self, key: str, event: Event, now: float) -> None:
        # Without its error, whose traceback holds what a call has held.
        kept = replace(event, text=text_of(event), error=None)
        if line := self._lines.get(key):
            line.event, line.repeats = kept, line.repeats + 1
            if line.is_over(now):
                self._renew(key, now)
            return
        self._lines[key] = _Line(kept, now)
        self._say(event)
        if len(self._lines) > _LINES:
            self._forget(next(iter(self._lines)))

    def _renew(self, key: str, now: float) -> None:
        if line := self._forget(key):
            self._lines[key] = _Line(line.event, now)

    def _forget(self, key: str) -> _Line | None:
        """Forget a line; it, where it has come again since it was written, which is said then."""
        line = self._lines.pop(key)
        if not line.repeats:
            return None
        self._say(line.event, line.repeats - 1)
        return line

    def _say(self, event: Event, repeats: int = 0) -> None:
        kept = event.kind.level > logging.DEBUG
        if not kept and not logger.isEnabledFor(event.kind.level):
            return
        if kept:
            self._keep(event, repeats)
        more = f" ({repeats} more like it since the last one)" if repeats else ""
        unforeseen = None if isinstance(event.error, DeltasyncError) else event.error
        fields = {"event": event.kind.value, **event.subject, "text": text_of(event)}
        fields |= {"repeats": repeats} if repeats else {}
        logger.log(event.kind.level, "%s", line_of(event) + more, exc_info=unforeseen, extra={FIELDS: fields})


def _repeated(event: Event) -> str | None:
    """What the log says again after a while only; None if it is said each time."""
    if event.kind is EventKind.CUT_QUARANTINED:  # Each is another version; lag says how many there are.
        return f"{event.kind.value} {event.subject.get('model')}"
    if event.kind not in _TRIED_AGAIN:
        return None
    return line_of(replace(event, error=None)) + _NUMBER.sub("0", printable(str(event.error)))


def line_of(event: Event) -> str:
    """An event as one line: `replica joined: consumer=c replica=r the replica holds nothing`."""
    subject = [f"{name}={value}" for name, value in event.subject.items()]
    words = " ".join([*subject, _words(event)])
    return f"{event.kind.value.replace('_', ' ')}: {printable(words.strip())}"


def text_of(event: Event) -> str:
    """Why an event has happened, or what came of it, on one line of bounded length."""
    return printable(_words(event))


def _words(event: Event) -> str:
    return ": ".join(filter(None, [event.text, described(event.error) if event.error else ""]))


def described(error: Exception) -> str:
    """An error in words; of one that was not foreseen its type too."""
    return str(error) if isinstance(error, DeltasyncError) else f"{type(error).__name__}: {error}"


class EventCounts(Counter[EventKind]):
    """How often each kind of event has happened; a listener."""

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self[event.kind] += 1


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
