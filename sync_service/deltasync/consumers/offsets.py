"""The offsets of a consumer's replicas, and the record of a consumer, in the log."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

from deltasync.base.events import EventKind, Events
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.pause import pause_of_record
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.log_store import LogStore
from deltasync.log.records import pack_json, reading, unpack_json

# So many are written together: they take a millisecond of the event loop, and as much of a commit.
_AT_ONCE = 128
# Times what a write took; at most.
_PAUSES, _LONGEST_PAUSE_SECONDS = 9, 1.0


class OffsetLog:
    """Writes down the newest offset of each replica that has moved, some at a time. Used in the event loop.

    However many acknowledgements come, one record of a replica waits at most, and a tenth of the log's time is
    taken. What a crash loses is found when the replica comes again: it is sent what comes after the offset
    that is written down, or shows what it holds.
    """

    def __init__(self, log: LogStore, events: Events, names: Iterable[str]) -> None:
        """`names` are those of the records that the log has, see `offset_name`."""
        self._log, self._events = log, events
        self._recorded = set(names)  # Which the log may have.
        self._moved: dict[str, Replica] = {}  # By the record's name.
        self._resting = False  # While some are written, and in the pause after that.
        self._last: asyncio.Future[None] | None = None

    def note(self, consumer: str, replica: Replica) -> None:
        """Have a replica's offset written down, as it is by then."""
        self._moved[offset_name(consumer, replica.name)] = replica
        if not self._resting:
            self._write_some()

    def forget(self, consumer: str, replica: str) -> None:
        """Forget the offset of a replica: at once, as one that has gone does not come back to say so again."""
        name = offset_name(consumer, replica)
        self._moved.pop(name, None)
        if name in self._recorded:
            self._write({name: None})

    def forgotten(self, consumer: str, replica: str) -> Mapping[str, None]:
        """The record to be removed, by whoever asks, so that the offset of a replica is forgotten now."""
        return self._forgotten([offset_name(consumer, replica)])

    def all_forgotten(self, consumer: str) -> Mapping[str, None]:
        """Those of all offsets of a consumer; also of replicas of which it is still to be written that they are
        forgotten.
        """
        names, prefix = self._recorded | self._moved.keys(), offset_name(consumer, "")
        return self._forgotten([name for name in names if name.startswith(prefix)])

    def write_all(self) -> None:
        """Submit all that there is, at the end: nothing is written any more after that."""
        self._resting = True
        while self._moved:
            self._submit()

    async def written(self) -> None:
        """Wait until the log has all that there is by now; what it cannot take was told."""
        while self._moved:
            self._submit()
        if self._last:
            await asyncio.wait({self._last})

    def _forgotten(self, names: Iterable[str]) -> Mapping[str, None]:
        for name in (records := dict.fromkeys(names)):
            self._moved.pop(name, None)
            self._recorded.discard(name)
        return records

    def _write_some(self) -> None:
        self._resting = True
        begun = time.monotonic()
        self._submit().add_done_callback(lambda _: self._rest(time.monotonic() - begun))

    def _rest(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(pause_after(seconds), self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        if self._moved:
            self._write_some()

    def _submit(self) -> "asyncio.Future[None]":
        names = list(islice(self._moved, _AT_ONCE))
        return self._write({name: pack_json(_offset_record(self._moved.pop(name))) for name in names})

    def _write(self, records: Mapping[str, bytes | None]) -> "asyncio.Future[None]":
        for name, record in records.items():
            (self._recorded.add if record else self._recorded.discard)(name)
        self._last = written = asyncio.wrap_future(self._log.put_all(records))
        written.add_done_callback(partial(self._report, tuple(records)))
        return written

    def _report(self, names: tuple[str, ...], written: "asyncio.Future[None]") -> None:
        if isinstance(error := written.exception(), Exception):
            self._recorded.update(names)  # As far as they were: the one written before is there still.
            others = f", nor could {len(names) - 1} others" if len(names) > 1 else ""
            text = f"could not be written{others}; after a restart the one written before counts"
            self._events.emit(EventKind.FAILED, text, error, record=names[0])


def pause_after(seconds: float) -> float:
    """Seconds to wait after a write that took so many: a tenth of the time is taken, and no offset gets old."""
    return min(_PAUSES * seconds, _LONGEST_PAUSE_SECONDS)


def offset_name(consumer: str, replica: str) -> str:
    """The name of the record of a replica's offset."""
    return f"offset/{consumer}/{replica}"


def recorded_offsets(log: LogStore, consumer: str) -> dict[str, Replica]:
    """The replicas of a consumer whose offsets are written down, by name.

    Raises:
        StorageFailed: a record is damaged.
    """
    found = log.items(offset_name(consumer, ""))
    return {name: _recorded_replica(consumer, name, record) for name, record in found.items()}


def _recorded_replica(consumer: str, name: str, record: bytes) -> Replica:
    with reading(f"record {offset_name(consumer, name)}"):
        found = unpack_json(record)
        position = Position(found["history"], found["version"], found["seal"])
        return Replica(name, position, found["acked_unix_ns"], has_held=True)


def _offset_record(replica: Replica) -> dict[str, Any]:
    applied = replica.applied
    return {
        "history": applied.history,
        "version": applied.number,
        "seal": applied.seal,
        "acked_unix_ns": replica.acked_unix_ns,
    }


def recorded_consumers(log: LogStore) -> dict[str, Consumer]:
    """The consumers that a log has, with the offsets of their replicas. Blocks.

    Raises:
        StorageFailed: a record is damaged.
    """
    return {name: _recorded_consumer(log, name, record) for name, record in log.items("consumer/").items()}


def _recorded_consumer(log: LogStore, name: str, record: bytes) -> Consumer:
    replicas = recorded_offsets(log, name)
    with reading(f"record consumer/{name}"):
        found = unpack_json(record)
        policy = Policy.from_dict(found["policy"])
        pause = pause_of_record(found)
        return Consumer(name, found["model"], found["created_unix_ns"], policy, replicas, pause=pause)
