"""The events of a service: how they are emitted, logged, counted and kept for readers."""

import logging
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from deltasync.base.errors import DeltasyncError
from deltasync.base.logs import FIELDS
from deltasync.base.waiting import Signal
from deltasync.base.words import printable

logger = logging.getLogger("deltasync.events")


class EventKind(Enum):
    """Kinds of events: the name in logs and metrics, the level of the log, and when it happens."""

    RANK_JOINED = "rank_joined", logging.INFO, "A rank opened its stream."
    RANK_LEFT = (
        "rank_left",
        logging.INFO,
        "The stream of a rank ended: it finished, its connection was lost, or the service ended it and says why.",
    )
    RUN_SUPERSEDED = (
        "run_superseded",
        logging.WARNING,
        "A newer training run took over a model; the event names the processes of both.",
    )
    PUBLISHER_REFUSED = (
        "publisher_refused",
        logging.WARNING,
        "A stream of a rank was refused because of its opening message.",
    )
    CUT_SEALED = "cut_sealed", logging.DEBUG, "A cut is complete and became a version."
    REPLICA_JOINED = (
        "replica_joined",
        logging.INFO,
        "A replica opened its stream and was told which tables it gets.",
    )
    REPLICA_LEFT = (
        "replica_left",
        logging.INFO,
        "The stream of a replica ended: it said goodbye, or the service ended it and says why.",
    )
    REPLICA_LOST = "replica_lost", logging.INFO, "The connection of a replica was lost."
    REPLICA_REPLACED = (
        "replica_replaced",
        logging.WARNING,
        "The stream of a replica ended because a newer stream with the same name was opened.",
    )
    REPLICA_TAKEN_OVER = (
        "replica_taken_over",
        logging.WARNING,
        "A replica name is used by another identity, or by another process while the first is connected.",
    )
    REPLICA_FORGOTTEN = (
        "replica_forgotten",
        logging.INFO,
        "A replica no longer counts in any lag: it said goodbye, was away for too long, or an operator named it.",
    )
    REPLICA_REFUSED = (
        "replica_refused",
        logging.WARNING,
        "A stream of a replica was refused because of its opening message.",
    )
    REPLICA_DAMAGED = (
        "replica_damaged",
        logging.ERROR,
        "Checksums show that a replica holds rows that differ from those sent.",
    )
    REPLICA_REPAIRED = "replica_repaired", logging.INFO, "The checksums of a damaged replica are right again."
    REPLICA_VERIFIED = (
        "replica_verified",
        logging.INFO,
        "An operator's check compared all rows of a replica; gives the result.",
    )
    REPLICA_REWOUND = (
        "replica_rewound",
        logging.WARNING,
        "A replica holds a version of a history that was discarded; it gets the rows that replace it.",
    )
    RELEASE_MADE = "release_made", logging.DEBUG, "A release of a consumer with a policy was made."
    CONSUMER_CHANGED = (
        "consumer_changed",
        logging.INFO,
        "A consumer was created, deleted, or given another policy; names who did it.",
    )
    CONSUMER_FOLLOWS = (
        "consumer_follows",
        logging.WARNING,
        "A consumer follows a kept version, or the newest one again; names who did it and why.",
    )
    CONSUMER_OBJECTS = (
        "consumer_objects",
        logging.WARNING,
        "A consumer raised an objection to what it serves, or withdrew it; names who did it and why.",
    )
    CONSUMER_PAUSED = (
        "consumer_paused",
        logging.WARNING,
        "A consumer was paused by an operator or by a quarantine.",
    )
    CONSUMER_RESUMED = "consumer_resumed", logging.WARNING, "A paused consumer was resumed."
    CONFIGURATION_RELOADED = (
        "configuration_reloaded",
        logging.INFO,
        "The service read its configuration again (SIGHUP); with what changed.",
    )
    CONFIGURATION_REFUSED = (
        "configuration_refused",
        logging.ERROR,
        "The configuration has an error; nothing changed.",
    )
    CERTIFICATE_RELOADED = "certificate_reloaded", logging.INFO, "Changed TLS files are in use."
    CERTIFICATE_REFUSED = (
        "certificate_refused",
        logging.ERROR,
        "Changed TLS files have an error; the previous ones stay in use.",
    )
    CERTIFICATE_EXPIRED = (
        "certificate_expired",
        logging.WARNING,
        "A certificate in use has expired or is not valid yet.",
    )
    KEY_EXPOSED = "key_exposed", logging.WARNING, "Every user of the machine can read a private key in use."
    ROLES_RELOADED = "roles_reloaded", logging.INFO, "The changed roles file is in use."
    ROLES_REFUSED = (
        "roles_refused",
        logging.ERROR,
        "The changed roles file has an error; the previous roles stay in force.",
    )
    LOG_LEVEL_CHANGED = "log_level_changed", logging.INFO, "An operator changed the level of a logger."
    # The audit writes it, in a log of its own.
    CALL_REFUSED = "call_refused", logging.WARNING, "A call was refused because the caller has no role for it."
    CUT_REFUSED = (
        "cut_refused",
        logging.ERROR,
        "A cut was refused for its content, for example a row whose norm grew too much.",
    )
    CUT_QUARANTINED = (
        "cut_quarantined",
        logging.ERROR,
        "A cut with suspicious rows was sealed, and the consumers of its model were paused.",
    )
    MODEL_ROLLED_BACK = (
        "model_rolled_back",
        logging.WARNING,
        "An operator made the rows of a kept version the newest version of its model.",
    )
    VERSION_KEPT = "version_kept", logging.INFO, "A version of a model was kept; names who did it."
    VERSION_RELEASED = (
        "version_released",
        logging.INFO,
        "A version of a model is no longer kept; names who did it.",
    )
    MODEL_DELETED = "model_deleted", logging.WARNING, "An operator deleted a model."
    TABLE_DELETED = "table_deleted", logging.WARNING, "An operator deleted a table."
    DELETE_REQUESTED = "delete_requested", logging.INFO, "An operator asked for rows to be deleted."
    ROWS_DELETED = "rows_deleted", logging.INFO, "The cut that deletes these rows is sealed."
    MODEL_RECOVERED = "model_recovered", logging.INFO, "A model was loaded from its checkpoint and log."
    MODEL_CLAIMED = "model_claimed", logging.INFO, "This process owns a model now."
    MODEL_TAKEN_OVER = (
        "model_taken_over",
        logging.WARNING,
        "This process owns a model that another process owned; with the reason.",
    )
    MODEL_NOT_TAKEN = (
        "model_not_taken",
        logging.ERROR,
        "A model could not be loaded by this process; it will be tried again, by another process if there is one.",
    )
    MODEL_GIVEN_UP = "model_given_up", logging.WARNING, "This process no longer owns a model; with the reason."
    PROCESS_CONFIRMED = "process_confirmed", logging.INFO, "The brokers confirm again that this process is alive."
    PROCESS_UNCONFIRMED = (
        "process_unconfirmed",
        logging.ERROR,
        "The brokers did not confirm in time that this process is alive; it gives up its models.",
    )
    PROCESS_DRAINING = (
        "process_draining",
        logging.WARNING,
        "This process hands its models to others and takes none.",
    )
    ROWS_DAMAGED = (
        "rows_damaged",
        logging.ERROR,
        "Rows in memory differ from what was stored; the model is loaded again.",
    )
    ROWS_MISSING = (
        "rows_missing",
        logging.ERROR,
        "Damage on disk has cost rows; the model waits for its trainer, which sends them.",
    )
    MODEL_RELOADED = "model_reloaded", logging.WARNING, "A model with damaged rows was loaded again."
    CHECKED = "checked", logging.INFO, "An operator's check read everything on disk; gives the number of problems."
    BACKED_UP = "backed_up", logging.INFO, "A backup is complete."
    CHECKPOINTED = "checkpointed", logging.DEBUG, "A checkpoint is complete."
    VOLUME_FAILED = "volume_failed", logging.ERROR, "A volume refuses writes."
    VOLUME_RECOVERED = "volume_recovered", logging.INFO, "A volume takes writes again."
    STORAGE_SILENT = (
        "storage_silent",
        logging.ERROR,
        "The place of checkpoint copies has not answered a call in time.",
    )
    STORAGE_ANSWERS = "storage_answers", logging.INFO, "The place of checkpoint copies answers again."
    FAILED = "failed", logging.ERROR, "Something failed; an unexpected error has its traceback."

    def __new__(cls, name: str, level: int, meaning: str) -> "EventKind":
        """Make a kind with its level and meaning."""
        kind = object.__new__(cls)
        kind._value_ = name
        kind.level = level
        kind.meaning = meaning
        return kind

    level: int
    meaning: str


@dataclass(frozen=True)
class Event:
    """Something that happened in a service.

    Attributes:
        kind: its kind.
        subject: model, consumer, replica, rank, version and the like, by name.
        text: reason or result in words, perhaps with text from a peer.
        error: the error that caused it.
    """

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
            except Exception:  # What the event reports goes on.
                logger.exception("a listener for events failed at %s", kind.value)


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
# Kinds for the audit log.
_AUDITED = frozenset({EventKind.CALL_REFUSED})


class EventLog:
    """A listener that logs each event as one line, and unexpected errors with their traceback.

    An event that repeats with each attempt is logged once a minute, with the number of those left out.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        keep: Callable[[Event, int], None] | None = None,
    ) -> None:
        """`keep` gets each logged event above level debug, with the number of its repeats since the last one."""
        self._now, self._keep = now, keep or _keep_nothing
        # When each line was last written, and its repeats since then; the latest event is last.
        self._lines = dict[str, tuple[float, int]]()

    def __call__(self, event: Event) -> None:
        """Log an event."""
        if event.kind in _AUDITED:
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
        if event.kind.level > logging.DEBUG:
            self._keep(event, repeats)
        elif not logger.isEnabledFor(event.kind.level):
            return
        more = f" ({repeats} more like it since the last one)" if repeats else ""
        unforeseen = None if isinstance(event.error, DeltasyncError) else event.error
        fields = {"event": event.kind.value, **event.subject, "text": event_text(event)}
        fields |= {"repeats": repeats} if repeats else {}
        logger.log(event.kind.level, "%s", event_line(event) + more, exc_info=unforeseen, extra={FIELDS: fields})


def _keep_nothing(_event: Event, _repeats: int) -> None:
    """Ignore events, because nobody reads them."""


def _repeated(event: Event) -> str | None:
    """The key that repeats of an event share; None if every one is logged."""
    if event.kind is EventKind.CUT_QUARANTINED:  # Each has another version; lag reports their number.
        return f"{event.kind.value} {event.subject.get('model')}"
    if event.kind not in _TRIED_AGAIN or (event.kind is EventKind.RANK_LEFT and not event.error):
        return None
    return event_line(replace(event, error=None)) + _NUMBER.sub("0", printable(str(event.error)))


def event_line(event: Event) -> str:
    """Format an event as one line: `replica joined: consumer=c replica=r the replica holds nothing`."""
    subject = [f"{name}={value}" for name, value in event.subject.items()]
    words = " ".join([*subject, _words(event)])
    return f"{event.kind.value.replace('_', ' ')}: {printable(words.strip())}"


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
    """The most recent events. Events are added in the event loop.

    Attributes:
        signal: wakes tasks that wait for the next event.
        process: the name of this process; empty if it is alone.
        last: the number of the last event; 0 if there is none.
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
