"""The events of a service: how they are emitted, logged, counted and kept for readers."""

import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from logging import DEBUG, ERROR, INFO, WARNING

from deltasync.base.errors import DeltasyncError
from deltasync.base.logs import FIELDS
from deltasync.base.waiting import Signal
from deltasync.base.words import printable

logger = logging.getLogger("deltasync.events")


class EventKind(Enum):
    """Kinds of events: the level in the log, and when they happen."""

    RANK_JOINED = INFO, "A rank opened its stream."
    RANK_LEFT = INFO, "The stream of a rank ended: it finished, was lost, or the service ended it and says why."
    RUN_SUPERSEDED = WARNING, "A newer training run took over a model; the event names the processes of both."
    PUBLISHER_REFUSED = WARNING, "A stream of a rank was refused because of its opening message."
    CUT_SEALED = DEBUG, "A cut is complete and became a version."
    REPLICA_JOINED = INFO, "A replica opened its stream and was told which tables it gets."
    REPLICA_LEFT = INFO, "The stream of a replica ended: it said goodbye, or the service ended it and says why."
    REPLICA_LOST = INFO, "The connection of a replica was lost."
    REPLICA_REPLACED = WARNING, "A newer stream with the same name replaced the stream of a replica."
    REPLICA_TAKEN_OVER = WARNING, "Another identity, or a second process at the same time, uses a replica's name."
    REPLICA_FORGOTTEN = INFO, "A replica counts in no lag now: it said goodbye, stayed away, or was forgotten."
    REPLICA_REFUSED = WARNING, "A stream of a replica was refused because of its opening message."
    REPLICA_DAMAGED = ERROR, "Checksums show that a replica holds rows that differ from those sent."
    REPLICA_REPAIRED = INFO, "The checksums of a damaged replica are right again."
    REPLICA_VERIFIED = INFO, "An operator's check compared all rows of a replica; gives the result."
    REPLICA_REWOUND = WARNING, "A replica holds a version of a discarded history; it gets the rows that differ."
    RELEASE_MADE = DEBUG, "A release of a consumer with a policy was made."
    CONSUMER_CHANGED = INFO, "A consumer was created, deleted, or given another policy; names who did it."
    CONSUMER_FOLLOWS = WARNING, "A consumer follows a kept version, or the newest again; names who did it and why."
    CONSUMER_OBJECTS = WARNING, "A consumer objects to what it serves, or no longer does; names who and why."
    CONSUMER_PAUSED = WARNING, "A consumer was paused by an operator or by a quarantine."
    CONSUMER_RESUMED = WARNING, "A paused consumer was resumed."
    CONFIGURATION_RELOADED = INFO, "The service read its configuration again (SIGHUP); with what changed."
    CONFIGURATION_REFUSED = ERROR, "The configuration has an error; nothing changed."
    CERTIFICATE_RELOADED = INFO, "Changed TLS files are in use."
    CERTIFICATE_REFUSED = ERROR, "Changed TLS files have an error; the previous ones stay in use."
    CERTIFICATE_EXPIRED = WARNING, "A certificate in use has expired or is not valid yet."
    KEY_EXPOSED = WARNING, "Every user of the machine can read a private key in use."
    ROLES_RELOADED = INFO, "The changed roles file is in use."
    ROLES_REFUSED = ERROR, "The changed roles file has an error; the previous roles stay in force."
    LOG_LEVEL_CHANGED = INFO, "An operator changed the level of a logger."
    CALL_REFUSED = WARNING, "A call was refused because the caller has no role for it."
    CUT_REFUSED = ERROR, "A cut was refused for its content, for example a row whose norm grew too much."
    CUT_QUARANTINED = ERROR, "A cut with suspicious rows was sealed, and the consumers of its model were paused."
    MODEL_ROLLED_BACK = WARNING, "An operator made the rows of a kept version the newest version of its model."
    VERSION_KEPT = INFO, "A version of a model was kept; names who did it."
    VERSION_RELEASED = INFO, "A version of a model is no longer kept; names who did it."
    MODEL_DELETED = WARNING, "An operator deleted a model."
    TABLE_DELETED = WARNING, "An operator deleted a table."
    DELETE_REQUESTED = INFO, "An operator asked for rows to be deleted."
    ROWS_DELETED = INFO, "The cut that deletes these rows is sealed."
    MODEL_RECOVERED = INFO, "A model was loaded from its checkpoint and log."
    MODEL_CLAIMED = INFO, "This process owns a model now."
    MODEL_TAKEN_OVER = WARNING, "This process owns a model that another process owned; with the reason."
    MODEL_NOT_TAKEN = ERROR, "This process could not load a model; it tries again, or another process does."
    MODEL_GIVEN_UP = WARNING, "This process no longer owns a model; with the reason."
    PROCESS_CONFIRMED = INFO, "The brokers confirm again that this process is alive."
    PROCESS_UNCONFIRMED = ERROR, "The brokers did not confirm this process in time; it gives up its models."
    PROCESS_DRAINING = WARNING, "This process hands its models to others and takes none."
    ROWS_DAMAGED = ERROR, "Rows in memory differ from what was stored; the model is loaded again."
    ROWS_MISSING = ERROR, "Damage on disk has cost rows; the model waits for its trainer, which sends them."
    MODEL_RELOADED = WARNING, "A model with damaged rows was loaded again."
    CHECKED = INFO, "An operator's check read everything on disk; gives the number of problems."
    BACKED_UP = INFO, "A backup is complete."
    CHECKPOINTED = DEBUG, "A checkpoint is complete."
    VOLUME_FAILED = ERROR, "A volume refuses writes."
    VOLUME_RECOVERED = INFO, "A volume takes writes again."
    STORAGE_SILENT = ERROR, "The place of checkpoint copies has not answered a call in time."
    STORAGE_ANSWERS = INFO, "The place of checkpoint copies answers again."
    FAILED = ERROR, "Something failed; an unexpected error has its traceback."

    def __init__(self, level: int, meaning: str) -> None:
        self.level, self.meaning = level, meaning

    @property
    def label(self) -> str:
        """Its name in logs and metrics."""
        return self.name.lower()


@dataclass(frozen=True)
class Event:
    """Something that happened to a subject (model, consumer, replica and the like by name), and why."""

    kind: EventKind
    subject: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    error: Exception | None = None


class Events:
    """Passes events to listeners. Used in the event loop."""

    def __init__(self, *listeners: Callable[[Event], None]) -> None:
        self._listeners = listeners

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Add a listener."""
        self._listeners += (listener,)

    def emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        """Pass an event to all listeners."""
        event = Event(kind, subject, text, error)
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # The work that the event reports must continue.
                logger.exception("a listener for events failed at %s", kind.label)


# Kinds that repeat with each attempt of a peer or of this process.
_TRIED_AGAIN = frozenset(
    {
        EventKind.RANK_LEFT,
        EventKind.PUBLISHER_REFUSED,
        EventKind.REPLICA_REFUSED,
        EventKind.CUT_REFUSED,
        EventKind.MODEL_NOT_TAKEN,
        EventKind.FAILED,
    }
)
# The pause before the log repeats such a line, and the number of lines that it remembers. A flood of refusals must
# fill neither the disk nor the memory.
_REPEAT_SECONDS, _LINES = 60.0, 1000
# Numbers in an error, such as free bytes, may differ with each attempt.
_NUMBER = re.compile("[0-9]+")


class EventLog:
    """A listener that logs each event as one line, and unexpected errors with their traceback.

    An event that repeats with each attempt is logged once a minute, with the number of those left out.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        keep: Callable[[Event, int], object] = lambda _event, _repeats: None,
    ) -> None:
        """`keep` gets each logged event above level debug, with the number of its repeats since the last one."""
        self._now, self._keep = now, keep
        # When each line was last written, and its repeats since then; the latest event is last.
        self._lines = dict[str, tuple[float, int]]()

    def __call__(self, event: Event) -> None:
        """Log an event."""
        if event.kind is EventKind.CALL_REFUSED:  # The audit logs it.
            if event.subject:  # Events without a subject are only counted.
                self._keep(event, 0)
            return
        if (key := _repeated(event)) is None:
            self._write(event)
            return
        now = self._now()
        written, repeats = self._lines.pop(key, (-math.inf, 0))
        if now - written < _REPEAT_SECONDS:
            self._lines[key] = written, repeats + 1
            return
        self._lines[key] = now, 0
        if len(self._lines) > _LINES:
            del self._lines[next(iter(self._lines))]
        self._write(event, repeats)

    def _write(self, event: Event, repeats: int = 0) -> None:
        if event.kind.level > DEBUG:
            self._keep(event, repeats)
        elif not logger.isEnabledFor(event.kind.level):
            return
        more = f" ({repeats} more like it since the last one)" if repeats else ""
        unforeseen = None if isinstance(event.error, DeltasyncError) else event.error
        fields = {"event": event.kind.label, **event.subject, "text": event_text(event)}
        fields |= {"repeats": repeats} if repeats else {}
        logger.log(event.kind.level, "%s", event_line(event) + more, exc_info=unforeseen, extra={FIELDS: fields})


def _repeated(event: Event) -> str | None:
    """The key that repeats of an event share; None if every one is logged."""
    if event.kind is EventKind.CUT_QUARANTINED:  # Each has another version; lag reports their number.
        return f"{event.kind.label} {event.subject.get('model')}"
    if event.kind not in _TRIED_AGAIN or (event.kind is EventKind.RANK_LEFT and not event.error):
        return None
    return event_line(replace(event, error=None)) + _NUMBER.sub("0", printable(str(event.error)))


def event_line(event: Event) -> str:
    """Format an event as one line: `replica joined: consumer=c replica=r the replica holds nothing`."""
    subject = [f"{name}={value}" for name, value in event.subject.items()]
    words = " ".join([*subject, _words(event)])
    return f"{event.kind.label.replace('_', ' ')}: {printable(words.strip())}"


def event_text(event: Event) -> str:
    """Reason or result of an event, on one line of bounded length."""
    return printable(_words(event))


def _words(event: Event) -> str:
    return ": ".join(filter(None, [event.text, error_text(event.error) if event.error else ""]))


def error_text(error: Exception) -> str:
    """An error in words, with its type if it is unexpected."""
    return str(error) if isinstance(error, DeltasyncError) else f"{type(error).__name__}: {error}"


class EventCounts(Counter[EventKind]):
    """A listener that counts each kind of event."""

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self[event.kind] += 1


KEPT_EVENTS = 1000
_LONGEST_NAME = 200


@dataclass(frozen=True)
class RecentEvent:
    """An event for readers.

    Attributes:
        process: name of the process in which it happened; empty before the process has one.
        number: grows with every event of the process, even across restarts.
        unix_ns: when it happened, nanoseconds since 1970.
        event: name of its kind, as in `deltasync_events_total`.
        level: its log level: info, warning or error.
        subject: model, consumer, replica, rank and the like, by name.
        text: reason or result.
        repeats: number of events with the same text since the last one that was logged.
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
    """The most recent events of a process, for the event loop. `signal` wakes tasks that wait for the next one."""

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
        kind, text = event.kind.label, event_text(event)
        if len(self._events) == KEPT_EVENTS:
            self._lost = self._events[0].number
        self._events.append(RecentEvent(self.process, self.last, now, kind, level, subject, text, repeats))
        self.signal.wake()

    def lacks(self, number: int) -> bool:
        """Whether events after this number are no longer kept."""
        return number < self._lost

    def newest(self, count: int) -> list[RecentEvent]:
        """The last `count` events, oldest first."""
        return list(self._events)[-count:] if count else []

    def before(self, count: int) -> int:
        """The number just before the last `count` events."""
        events = self.newest(count)
        return events[0].number - 1 if events else self.last

    def after(self, number: int) -> list[RecentEvent]:
        """The events with greater numbers, oldest first."""
        return [each for each in self._events if each.number > number]
