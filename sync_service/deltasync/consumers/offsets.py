"""The log records of consumers, and of the offsets of their replicas."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from deltasync.base.events import EventKind, Events
from deltasync.consumers.consumer import Consumer, Replica, pause_of_record
from deltasync.consumers.follow import Objection, follow_of_record
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.log_store import LogStore
from deltasync.log.records import pack_json, reading, unpack_json

# Offsets in one write, which takes a millisecond of the event loop and of a commit.
_AT_ONCE = 128


def pause_after(seconds: float) -> float:
    """Seconds to wait after a write that took `seconds`, which limits writing to a tenth of the time."""
    return min(9 * seconds, 1.0)


class OffsetLog:
    """Writes the changed offsets of replicas in batches. Used in the event loop.

    At any rate of acknowledgements, at most one record of a replica is pending, and writing takes at most a tenth
    of the log's time. A crash loses only the newest offsets: a replica that reconnects gets the rows after its
    recorded offset, or reports a newer one.
    """

    def __init__(
        self,
        log: LogStore,
        events: Events,
        names: Iterable[str],
        pause_after: Callable[[float], float] = pause_after,
    ) -> None:
        """`names` are the names of the records in the log, see `offset_name`."""
        self._log, self._events, self._pause_after = log, events, pause_after
        self._recorded = set(names)  # Names of records that may be in the log.
        self._moved: dict[str, Replica] = {}  # By the record's name.
        self._resting = False  # During a write and the pause after it.
        self._last: asyncio.Future[None] | None = None

    def note(self, consumer: str, replica: Replica) -> None:
        """Schedule a write of a replica's offset, as it is at that time."""
        self._moved[offset_name(consumer, replica.name)] = replica
        if not self._resting:
            self._write_some()

    def forget(self, consumer: str, replica: str) -> None:
        """Forget the offset of a replica at once, because its goodbye comes only once."""
        name = offset_name(consumer, replica)
        self._moved.pop(name, None)
        if name in self._recorded:
            self._write({name: None})

    def forgotten(self, consumer: str, replica: str | None = None) -> Mapping[str, None]:
        """Forget the offset of a replica, or of all; return their records, which the caller removes."""
        names, prefix = self._recorded | self._moved.keys(), offset_name(consumer, replica or "")
        records = {name: None for name in names if (name == prefix if replica else name.startswith(prefix))}
        for name in records:
            self._moved.pop(name, None)
            self._recorded.discard(name)
        return records

    def write_all(self) -> None:
        """Submit all offsets before the log is closed. The last call."""
        self._resting = True
        while self._moved:
            self._submit()

    async def written(self) -> None:
        """Wait until all present offsets are written; report failures as events."""
        while self._moved:
            self._submit()
        if self._last:
            await asyncio.wait({self._last})

    def _write_some(self) -> None:
        self._resting = True
        loop, begun = asyncio.get_running_loop(), time.monotonic()

        def rest(_written: object) -> None:
            loop.call_later(self._pause_after(time.monotonic() - begun), self._go_on)

        self._submit().add_done_callback(rest)

    def _go_on(self) -> None:
        self._resting = False
        if self._moved:
            self._write_some()

    def _submit(self) -> "asyncio.Future[None]":
        moved = {name: self._moved.pop(name) for name in list(islice(self._moved, _AT_ONCE))}
        records = {
            name: vars(each.applied) | {"acked_unix_ns": each.acked_unix_ns} for name, each in moved.items()
        }
        return self._write({name: pack_json(record) for name, record in records.items()})

    def _write(self, records: Mapping[str, bytes | None]) -> "asyncio.Future[None]":
        for name, record in records.items():
            (self._recorded.add if record else self._recorded.discard)(name)
        self._last = written = asyncio.wrap_future(self._log.put_all(records))
        written.add_done_callback(partial(self._report, tuple(records)))
        return written

    def _report(self, names: tuple[str, ...], written: "asyncio.Future[None]") -> None:
        if isinstance(error := written.exception(), Exception):
            self._recorded.update(names)  # The earlier record is still there.
            others = f" with {len(names) - 1} others" if len(names) > 1 else ""
            text = f"could not be written{others}; after a restart, the previous one counts"
            self._events.emit(EventKind.FAILED, text, error, record=names[0])


def offset_name(consumer: str, replica: str) -> str:
    """The name of the record of a replica's offset."""
    return f"offset/{consumer}/{replica}"


def recorded_offsets(log: LogStore, consumer: str) -> dict[str, Replica]:
    """The replicas of a consumer whose offsets are in the log, by name."""
    replicas = dict[str, Replica]()
    for name, record in log.items(offset_name(consumer, "")).items():
        with reading(f"record {offset_name(consumer, name)}"):
            offset = unpack_json(record)
            position = Position(offset["history"], offset["number"], offset["seal"])
            replicas[name] = Replica(name, position, offset["acked_unix_ns"], has_held=True)
    return replicas


def recorded_consumers(log: LogStore) -> dict[str, Consumer]:
    """The consumers in a log, with the offsets of their replicas. Blocks."""
    consumers = dict[str, Consumer]()
    for name, record in log.items("consumer/").items():
        replicas = recorded_offsets(log, name)
        with reading(f"record consumer/{name}"):
            fields = unpack_json(record)
            fields["policy"], objection = Policy.from_dict(fields["policy"]), fields.get("objection")
            fields["pause"] = pause_of_record(fields.get("pause"))
            fields["follows"] = follow_of_record(fields.get("follows"))
            fields["objection"] = objection and Objection(**objection)
            consumers[name] = Consumer(name, replicas=replicas, **fields)
    return consumers


def consumer_record(consumer: Consumer) -> dict[str, Any]:
    """The record of a consumer."""
    pause, follows, objection = consumer.pause, consumer.follows, consumer.objection
    return {
        "model": consumer.model,
        "created_unix_ns": consumer.created_unix_ns,
        "policy": consumer.policy.as_dict(),
        "pause": asdict(pause) if pause else None,
        "follows": asdict(follows) if follows else None,
        "objection": asdict(objection) if objection else None,
    }
