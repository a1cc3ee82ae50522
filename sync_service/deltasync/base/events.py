"""The events of a service: one place to emit them, the log that writes them, and the last ones for readers."""

import logging
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile

from deltasync.base.errors import DeltasyncError
from deltasync.base.logs import FIELDS
from deltasync.base.waiting import Signal
from deltasync.base.words import printable

logger = logging.getLogger("deltasync.events")


class EventKind(Enum):
    """Kinds of events. The value is the name in logs and metrics, `level` the level of the log."""

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
    # The audit writes it, in a log of its own.
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


@dataclass(frozen=True)
class Event:
    """An event.

    Attributes:
        kind: its kind.
        subject: model, consumer, replica, rank, version and the like, by name.
        text: reason or result in words; may contain the words of a peer.
        error: the error behind it.
    """

    kind: EventKind
    subject: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    error: Exception | None = None


class Events:
    """The one place where events are emitted. Used in the event loop."""

    def __init__(self, *listeners: Callable[[Event], None]) -> None:
        self._listeners = listeners

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Add a listener."""
        self._listeners += (listener,)

    def emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        """Pass an event to all listeners."""
        event = Event(kind, subject, text, error)
        for listener in self._listeners:
            listener(event)


# Kinds that peers repeat while a volume refuses writes, and those of them that tell where a rank is.
_OF_AN_OUTAGE = frozenset(
    {EventKind.RANK_JOINED, EventKind.RANK_LEFT, EventKind.PUBLISHER_REFUSED, EventKind.FAILED}
)
_OF_RANKS = frozenset({EventKind.RANK_JOINED, EventKind.RANK_LEFT})
# Kinds that peers repeat because they try again, how often the log repeats a line, and how many it remembers.
_TRIED_AGAIN = frozenset(
    {EventKind.PUBLISHER_REFUSED, EventKind.REPLICA_REFUSED, EventKind.CUT_REFUSED, EventKind.FAILED}
)
_REPEAT_SECONDS = 60.0
# Numbers in an error may differ with each try: free bytes, for example.
_NUMBER = re.compile("[0-9]+")
_LINES = 1000
# Kinds that are in the audit's log.
_AUDITED = frozenset({EventKind.CALL_REFUSED})


class EventLog:
    """A listener that writes each event into the log as one line, and an unexpected error with its traceback.

    Repeated refusals of a peer, repeated failures and quarantined versions of a model are written once a minute,
    with their number. While a volume refuses writes, a repeated event of its peers is written once.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        keep: Callable[[Event, int], None] | None = None,
    ) -> None:
        """`keep` gets each event above level debug that is written, and the number of its repeats since."""
        self._now, self._keep = now, keep or _keep_nothing
        self._lines = dict[str, _Line]()  # The one with the earliest time first.
        self._outage = _Outage()

    def __call__(self, event: Event) -> None:
        """Write an event."""
        for each in self._outage.due(event):
            self._write(each)

    def tell_repeats(self) -> None:
        """Write the repeats of lines that are older than a minute, and forget the others. Called now and then: the
        event may never come again.
        """
        now = self._now()
        for key in list(takewhile(lambda key: self._lines[key].is_over(now), self._lines)):
            self._renew(key, now)

    def _write(self, event: Event) -> None:
        if event.kind in _AUDITED:
            if event.subject:  # Others are only counted.
                self._keep(event, 0)
        elif (key := _repeated(event)) is None:
            self._write_line(event)
        else:
            self._repeat(key, event, self._now())

    def _repeat(self, key: str, event: Event, now: float) -> None:
        # Without its error, whose traceback keeps the frames of a call.
        kept = replace(event, text=event_text(event), error=None)
        if line := self._lines.get(key):
            line.event, line.repeats = kept, line.repeats + 1
            if line.is_over(now):
                self._renew(key, now)
            return
        self._lines[key] = _Line(kept, now)
        self._write_line(event)
        if len(self._lines) > _LINES:
            self._forget(next(iter(self._lines)))

    def _renew(self, key: str, now: float) -> None:
        if line := self._forget(key):
            self._lines[key] = _Line(line.event, now)

    def _forget(self, key: str) -> "_Line | None":
        """Forget a line. If it has repeats, write them and return it."""
        line = self._lines.pop(key)
        if not line.repeats:
            return None
        self._write_line(line.event, line.repeats - 1)
        return line

    def _write_line(self, event: Event, repeats: int = 0) -> None:
        kept = event.kind.level > logging.DEBUG
        if not kept and not logger.isEnabledFor(event.kind.level):
            return
        if kept:
            self._keep(event, repeats)
        more = f" ({repeats} more like it since the last one)" if repeats else ""
        unforeseen = None if isinstance(event.error, DeltasyncError) else event.error
        fields = {"event": event.kind.value, **event.subject, "text": event_text(event)}
        fields |= {"repeats": repeats} if repeats else {}
        logger.log(event.kind.level, "%s", event_line(event) + more, exc_info=unforeseen, extra={FIELDS: fields})


def _keep_nothing(_event: Event, _repeats: int) -> None:
    """For a log that nobody reads events from."""


def _repeated(event: Event) -> str | None:
    """The key by which an event counts as a repeat; None if every one is logged."""
    if event.kind is EventKind.CUT_QUARANTINED:  # Each is another version; lag has their number.
        return f"{event.kind.value} {event.subject.get('model')}"
    if event.kind not in _TRIED_AGAIN:
        return None
    return event_line(replace(event, error=None)) + _NUMBER.sub("0", printable(str(event.error)))


def event_line(event: Event) -> str:
    """An event as one line: `replica joined: consumer=c replica=r the replica holds nothing`."""
    subject = [f"{name}={value}" for name, value in event.subject.items()]
    words = " ".join([*subject, _words(event)])
    return f"{event.kind.value.replace('_', ' ')}: {printable(words.strip())}"


def event_text(event: Event) -> str:
    """Reason or result of an event, on one line of bounded length."""
    return printable(_words(event))


def _words(event: Event) -> str:
    return ": ".join(filter(None, [event.text, error_text(event.error) if event.error else ""]))


def error_text(error: Exception) -> str:
    """An error in words; an unexpected one with its type."""
    return str(error) if isinstance(error, DeltasyncError) else f"{type(error).__name__}: {error}"


class _Outage:
    """What the log has about peers that try again while a volume refuses writes."""

    def __init__(self) -> None:
        self._volumes = set[object]()
        self._logged = set[tuple[object, ...]]()
        self._ranks = dict[tuple[object, ...], tuple[EventKind, Event]]()  # The last one logged, and the last one.

    def due(self, event: Event) -> list[Event]:
        """Events to log now: repeats are dropped during an outage, ranks' final states follow at its end."""
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
        new = key not in self._logged
        if new and len(self._logged) < _LINES:  # Beyond it, everything is logged.
            self._logged.add(key)
            if event.kind in _OF_RANKS:
                self._ranks[subject] = event.kind, event
        elif not new and subject in self._ranks:
            self._ranks[subject] = self._ranks[subject][0], event
        return new

    def _end(self) -> list[Event]:
        changed = [event for logged, event in self._ranks.values() if event.kind is not logged]
        self._logged.clear()
        self._ranks.clear()
        return changed


@dataclass
class _Line:
    """A line of the log that may repeat.

    Attributes:
        event: its event.
        written: when it was written last.
        repeats: number of events since then that would have been the same line.
    """

    event: Event
    written: float
    repeats: int = 0

    def is_over(self, now: float) -> bool:
        """Whether it may be written again."""
        return now - self.written >= _REPEAT_SECONDS


class EventCounts(Counter[EventKind]):
    """A listener that counts each kind of event."""

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self[event.kind] += 1


KEPT_EVENTS = 1000
_LONGEST_NAME = 200


@dataclass(frozen=True)
class RecentEvent:
    """An event as readers get it.

    Attributes:
        process: name of the process in which it happened; empty before the process has one.
        number: grows with every event of the process, also over a restart.
        unix_ns: when it happened, nanoseconds since 1970.
        event: name of its kind, as in `deltasync_events_total`.
        level: its level in the log: info, warning or error.
        subject: model, consumer, replica, rank and the like, by name.
        text: reason or result.
        repeats: number of events of the same text since the last one that was logged.
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
        signal: wakes tasks that wait for the next one.
        process: the name of the process in which they happen; empty if it is alone.
        last: the number of the last one; 0 before there is one.
    """

    def __init__(self, process: str = "", now_unix_ns: Callable[[], int] = time.time_ns) -> None:
        self.signal, self.process = Signal(), process
        self._now, self.last, self._lost = now_unix_ns, 0, 0
        self._events = deque[RecentEvent](maxlen=KEPT_EVENTS)

    def add(self, event: Event, repeats: int = 0) -> None:
        """Add an event with the number of its repeats."""
        now = self._now()
        # Numbers grow even if the clock was set back.
        self.last = max(self.last + 1, now // 1000)
        subject = {name: printable(str(value), _LONGEST_NAME) for name, value in event.subject.items()}
        level = logging.getLevelName(event.kind.level).lower()
        kind, text = event.kind.value, event_text(event)
        if len(self._events) == KEPT_EVENTS:
            self._lost = self._events[0].number
        self._events.append(RecentEvent(self.process, self.last, now, kind, level, subject, text, repeats))
        self.signal.wake()

    def lacks(self, number: int) -> bool:
        """Whether later events than that of this number are not kept any more."""
        return number < self._lost

    def newest(self, count: int) -> list[RecentEvent]:
        """The last `count` events, the oldest first."""
        return list(self._events)[-count:] if count else []

    def before(self, count: int) -> int:
        """The number after which the last `count` events come."""
        events = self.newest(count)
        return events[0].number - 1 if events else self.last

    def after(self, number: int) -> list[RecentEvent]:
        """The events with greater numbers, the oldest first."""
        return [each for each in self._events if each.number > number]
