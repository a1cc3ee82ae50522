"""What happens in the service, said in one place, to which logging and metrics listen."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from deltasync.core.errors import DeltasyncError

logger = logging.getLogger("deltasync.events")

# What peers say of themselves is part of some events: a line of the log stays one line, of bounded length.
_LONGEST_TEXT = 400


class EventKind(Enum):
    """What can happen. The value is its name for logs and metrics, the level how loud the log says it."""

    RANK_JOINED = "rank_joined", logging.INFO
    RANK_LEFT = "rank_left", logging.INFO
    PUBLISHER_REFUSED = "publisher_refused", logging.WARNING
    CUT_SEALED = "cut_sealed", logging.DEBUG
    REPLICA_JOINED = "replica_joined", logging.INFO
    REPLICA_LEFT = "replica_left", logging.INFO
    REPLICA_REFUSED = "replica_refused", logging.WARNING
    REPLICA_DAMAGED = "replica_damaged", logging.ERROR
    REPLICA_REPAIRED = "replica_repaired", logging.INFO
    RELEASE_MADE = "release_made", logging.DEBUG
    CONSUMER_CHANGED = "consumer_changed", logging.INFO
    DELETE_REQUESTED = "delete_requested", logging.INFO
    ROWS_DELETED = "rows_deleted", logging.INFO
    MODEL_RECOVERED = "model_recovered", logging.INFO
    ROWS_DAMAGED = "rows_damaged", logging.ERROR
    ROWS_MENDED = "rows_mended", logging.INFO
    FLUSHED = "flushed", logging.DEBUG
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


class Events:
    """The one place. Used in the event loop."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        """Tell all listeners of something that has just happened."""
        event = Event(kind, subject, text, error)
        for listener in self._listeners:
            listener(event)


def log_event(event: Event) -> None:
    """Write an event into the log, as one line; an error that was not foreseen with its traceback."""
    if logger.isEnabledFor(event.kind.level):
        unforeseen = None if isinstance(event.error, DeltasyncError) else event.error
        logger.log(event.kind.level, "%s", line_of(event), exc_info=unforeseen)


def line_of(event: Event) -> str:
    """An event as one line: `replica joined: consumer=c replica=r the replica holds nothing`."""
    subject = [f"{name}={value}" for name, value in event.subject.items()]
    error = described(event.error) if event.error else ""
    words = " ".join([*subject, ": ".join(filter(None, [event.text, error]))])
    return f"{event.kind.value.replace('_', ' ')}: {_printable(words.strip())}"


def described(error: Exception) -> str:
    """An error in words; of one that was not foreseen its type too."""
    return str(error) if isinstance(error, DeltasyncError) else f"{type(error).__name__}: {error}"


def _printable(text: str) -> str:
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[: _LONGEST_TEXT + 1])
    return shown if len(text) <= _LONGEST_TEXT else f"{shown[:_LONGEST_TEXT]}..."


class EventCounts(Counter[EventKind]):
    """How often each kind of event has happened; a listener."""

    def __call__(self, event: Event) -> None:
        """Count an event."""
        self[event.kind] += 1
