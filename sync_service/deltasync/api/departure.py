"""Why a replica's stream has ended: a pure decision."""

import asyncio
from dataclasses import dataclass

from deltasync.core.errors import (
    Contradiction,
    DeltasyncError,
    InvalidInput,
    LimitReached,
    NotFound,
    NotPermitted,
    Superseded,
)
from deltasync.core.events import EventKind, described
from deltasync.core.words import printable

# What a replica has itself to do with; all else is the service's, and may be over when it comes again.
_OF_PEERS = (InvalidInput, NotFound, NotPermitted, Contradiction, LimitReached)


class StreamEnded(Exception):
    """The replica has ended its side of the stream."""


@dataclass(frozen=True)
class Departure:
    """What is told of a replica whose stream has ended, why it has, and whether the replica is expected back."""

    kind: EventKind
    reason: str
    expected: bool = False


def departure(
    error: BaseException,
    *,
    goodbye: bool,
    instance: str,
    replaced: bool,
    given_up: str = "",
    stopped: str = "",
) -> Departure:
    """How a replica has left.

    Args:
        error: what has ended its stream.
        goodbye: whether it has said that it ends for good.
        instance: what it says of itself; those that say nothing do not say goodbye either.
        replaced: whether a newer stream of its name has come.
        stopped: why it has stopped, as it says itself; empty where it says nothing.
        given_up: why the service has ended the stream of one that takes nothing; empty if it has not.
    """
    if goodbye:
        return Departure(EventKind.REPLICA_LEFT, "it has said goodbye")
    if replaced:
        text = str(error) if isinstance(error, DeltasyncError) else "a newer stream has taken over"
        return Departure(EventKind.REPLICA_REPLACED, text)
    if stopped:
        return Departure(EventKind.REPLICA_LOST, f"it has stopped: {printable(stopped)}", expected=True)
    if given_up:
        return Departure(EventKind.REPLICA_LEFT, given_up, expected=True)
    if isinstance(error, StreamEnded):
        if instance:
            return Departure(EventKind.REPLICA_LOST, "its stream has ended without a goodbye")
        return Departure(EventKind.REPLICA_LEFT, "its stream has ended")
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Departure(EventKind.REPLICA_LOST, "its connection is lost")
    reason = described(error) if isinstance(error, Exception) else str(error)
    return Departure(EventKind.REPLICA_LEFT, reason, expected=not isinstance(error, _OF_PEERS))


def superseded(consumer: str, replica: str, ours: str, newer: str) -> DeltasyncError:
    """What ends a stream when a newer one of the same replica has come, of an instance or of nobody knows which.

    One that reconnects is told to do so again, if it still hears that; another of its name would be told the same,
    and the two would take each other's place for ever: so the older one has to stop.
    """
    if ours and newer and ours != newer:
        return Contradiction(
            f"another replica named {replica!r} of consumer {consumer!r} has come, and this one has to stop: give "
            "each a name of its own, SubscriberOptions(replica=...)"
        )
    return Superseded(f"a newer stream of replica {replica!r} has taken over")
