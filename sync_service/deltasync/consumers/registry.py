"""The consumers that exist, and the offset of each of their replicas, kept in the log."""

import asyncio
import time
from functools import partial
from typing import Any

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.fleet import forgettable
from deltasync.core.errors import Contradiction, NotFound
from deltasync.core.events import EventKind, Events
from deltasync.core.names import check_name
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import pack_json, reading, unpack_json


class ConsumerRegistry:
    """All consumers of the service."""

    def __init__(self, log: LogStore, replica_retention_seconds: float, events: Events) -> None:
        self._log = log
        self._events = events
        self._creating = asyncio.Lock()
        self._retention_ns = int(replica_retention_seconds * 1e9)
        self.consumers: dict[str, Consumer] = {
            name: _recorded_consumer(log, name, record) for name, record in log.items("consumer/").items()
        }

    def get(self, name: str) -> Consumer:
        """The consumer of that name.

        Raises:
            NotFound: there is none; the message names those that exist.
        """
        if name not in self.consumers:
            existing = ", ".join(sorted(self.consumers)) or "none yet"
            raise NotFound(f"no consumer {name!r}; consumers: {existing}")
        return self.consumers[name]

    def of_model(self, model: str) -> list[Consumer]:
        """The consumers that follow a model."""
        return [consumer for consumer in self.consumers.values() if consumer.model == model]

    async def create(self, name: str, model: str, policy: Policy) -> Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Raises:
            InvalidInput: a name that cannot be one.
            Contradiction: it exists for another model, or with another policy.
        """
        check_name("consumer", name)
        check_name("model", model)
        async with self._creating:
            existing = self.consumers.get(name)
            if existing and existing.model != model:
                raise Contradiction(f"consumer {name!r} exists for model {existing.model!r}: delete it first")
            if existing and existing.policy != policy:
                raise Contradiction(f"consumer {name!r} exists with another policy: update it instead")
            if existing:
                return existing
            consumer = Consumer(name, model, time.time_ns(), policy)
            await self._write(consumer, policy)
            self.consumers[name] = consumer
            return consumer

    async def update(self, name: str, policy: Policy) -> Consumer:
        """Give a consumer another policy.

        Raises:
            NotFound: there is none of that name.
        """
        async with self._creating:
            consumer = self.get(name)
            if consumer.policy != policy:
                await self._write(consumer, policy)
                consumer.policy = policy
                consumer.signal.wake()
            return consumer

    async def delete(self, name: str) -> None:
        """Forget a consumer and its offsets.

        Raises:
            NotFound: there is none of that name.
        """
        consumer = self.get(name)
        del self.consumers[name]
        for replica in consumer.replicas.values():
            _end_stream(replica)
        forgotten = [self._log.put(f"offset/{name}/{replica}", None) for replica in consumer.replicas]
        forgotten.append(self._log.put(f"consumer/{name}", None))
        await asyncio.gather(*map(asyncio.wrap_future, forgotten))

    def connect(self, consumer: Consumer, name: str, stream: asyncio.Event) -> Replica:
        """Note that a replica has opened a stream, which replaces an older one of its name.

        Raises:
            InvalidInput: a name that cannot be one.
        """
        replica = consumer.replicas.setdefault(check_name("replica", name), Replica(name))
        _end_stream(replica)
        replica.stream = stream
        consumer.signal.wake()
        return replica

    def disconnect(self, replica: Replica, stream: asyncio.Event) -> None:
        """Note that a stream of a replica has ended."""
        if replica.stream is stream:
            replica.stream, replica.away_since_unix_ns = None, time.time_ns()

    def acknowledge(self, consumer: Consumer, replica: Replica, applied: Position) -> None:
        """Move a replica's offset, without waiting for the disk: delivery is at least once anyway."""
        moved = replica.applied != applied
        replica.applied, replica.acked_unix_ns = applied, time.time_ns()
        if not moved:
            return  # Idle replicas show now and then what they hold: no reason to write, or to wake anybody.
        consumer.signal.wake()
        if self.consumers.get(consumer.name) is not consumer:
            return  # Deleted meanwhile: nothing of it is to be written down.
        self._put(f"offset/{consumer.name}/{replica.name}", _offset_record(replica))

    def forget_the_gone(self) -> None:
        """Forget replicas that have been away for long, so that they no longer hold their consumer's offset."""
        for consumer in self.consumers.values():
            for name in forgettable(list(consumer.replicas.values()), time.time_ns(), self._retention_ns):
                del consumer.replicas[name]
                self._put(f"offset/{consumer.name}/{name}", None)

    async def _write(self, consumer: Consumer, policy: Policy) -> None:
        created = consumer.created_unix_ns
        record = {"model": consumer.model, "created_unix_ns": created, "policy": _policy_record(policy)}
        await asyncio.wrap_future(self._log.put(f"consumer/{consumer.name}", pack_json(record)))

    def _put(self, name: str, record: dict[str, Any] | None) -> None:
        """Write down a record without waiting for the disk; None removes it."""
        written = asyncio.wrap_future(self._log.put(name, pack_json(record) if record else None))
        written.add_done_callback(partial(self._report, name))

    def _report(self, name: str, written: asyncio.Future[None]) -> None:
        if isinstance(error := written.exception(), Exception):
            text = "could not be written; after a restart the one written before counts"
            self._events.emit(EventKind.FAILED, text, error, record=name)


def _end_stream(replica: Replica) -> None:
    if replica.stream:
        replica.stream.set()


def _recorded_consumer(log: LogStore, name: str, record: bytes) -> Consumer:
    offsets = log.items(f"offset/{name}/")
    replicas = {each: _recorded_replica(name, each, offset) for each, offset in offsets.items()}
    with reading(f"record consumer/{name}"):
        found = unpack_json(record)
        policy = Policy.from_dict(found.get("policy", {}))
        return Consumer(name, found["model"], found["created_unix_ns"], policy, replicas)


def _recorded_replica(consumer: str, name: str, record: bytes) -> Replica:
    with reading(f"record offset/{consumer}/{name}"):
        found = unpack_json(record)
        position = Position(found["history"], found["version"])
        return Replica(name, position, found["acked_unix_ns"], away_since_unix_ns=time.time_ns())


def _policy_record(policy: Policy) -> dict[str, Any]:
    """A policy as it is written down: without a limit of readiness it opens with services that know of none."""
    record = policy.as_dict()
    if policy.ready_within_seconds is None:
        del record["ready_within_seconds"]
    return record


def _offset_record(replica: Replica) -> dict[str, Any]:
    applied = replica.applied
    return {"history": applied.history, "version": applied.number, "acked_unix_ns": replica.acked_unix_ns}
