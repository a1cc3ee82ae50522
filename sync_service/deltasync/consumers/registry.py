"""The consumers of a service, and their replicas."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from deltasync.access.limits import Limits
from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import (
    Contradiction,
    DeltasyncError,
    InvalidInput,
    NotFound,
    NotPermitted,
    ServiceUnavailable,
    StorageFailed,
)
from deltasync.base.events import EventKind, Events
from deltasync.base.words import listed
from deltasync.consumers.consumer import ITSELF, Consumer, Pause, Quarantine, Replica, extended
from deltasync.consumers.follow import Follow, Objection, history_stream
from deltasync.consumers.offsets import OffsetLog, consumer_record, offset_name, recorded_consumers
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.log_store import LAST_NUMBER, Logs, LogStore
from deltasync.log.records import pack_json, reading, unpack_json

_LONGEST_INSTANCE = 64


class ConsumerRegistry:
    """All consumers of the models that this process owns.

    Attributes:
        consumers: the consumers, by name.
        elsewhere: makes the error for a consumer that another process owns, else returns None.
    """

    def __init__(
        self, logs: Logs, replica_retention_seconds: float, events: Events, limits: Limits | None = None
    ) -> None:
        self._logs = logs
        self._limits = limits or Limits()
        self._events = events
        self._creating = asyncio.Lock()
        self._retention_ns = int(replica_retention_seconds * 1e9)
        self.consumers = dict[str, Consumer]()
        self._limits.count("consumers", partial(len, self.consumers))
        self.elsewhere: Callable[[str], DeltasyncError | None] = lambda _name: None
        self._offsets = dict[LogStore, OffsetLog]()
        for log in logs.each():
            self.have(recorded_consumers(log), log)

    def have(self, consumers: Mapping[str, Consumer], log: LogStore) -> None:
        """Add the consumers of a log."""
        self.consumers |= consumers
        recorded = [offset_name(each.name, name) for each in consumers.values() for name in each.replicas]
        self._offsets[log] = OffsetLog(log, self._events, recorded)

    def end_streams(self, model: str) -> None:
        """End the streams of all consumers of a model that another process takes over."""
        for consumer in self.of_model(model):
            consumer.moved = True
            consumer.end_streams()
            consumer.pause_changed.wake()
            consumer.signal.wake()

    def give_up(self, model: str, log: LogStore, *, written: bool) -> None:
        """Remove the consumers of a model that another process takes over; write their offsets if `written`."""
        self.end_streams(model)
        for consumer in self.of_model(model):
            del self.consumers[consumer.name]
        offsets = self._offsets.pop(log, None)
        if offsets and written:
            offsets.write_all()

    def get(self, name: str) -> Consumer:
        """The consumer of that name."""
        if name not in self.consumers:
            if not_here := self.elsewhere(name):
                raise not_here
            raise NotFound(f"no consumer {name!r}", detail=f"; consumers: {listed(self.consumers) or 'none yet'}")
        return self.consumers[name]

    def of_model(self, model: str) -> list[Consumer]:
        """The consumers that follow a model."""
        return [consumer for consumer in self.consumers.values() if consumer.model == model]

    def followers_of(self, consumer: str) -> list[str]:
        """The names of the consumers that follow another one at a distance."""
        every = self.consumers.items()
        return [name for name, each in every if each.distance and each.distance.after == consumer]

    async def create(self, name: str, model: str, policy: Policy) -> Consumer:
        """Create a consumer, unless it exists with this policy; paused if a version is in quarantine."""
        check_name("consumer", name)
        check_name("model", model)
        async with self._creating:
            existing = self.consumers.get(name)
            if existing and existing.model != model:
                raise Contradiction(
                    f"consumer {name!r} exists for model {existing.model!r}: delete it first, or use another name "
                    f"for the consumer of model {model!r}"
                )
            if existing and existing.policy != policy:
                raise Contradiction(f"consumer {name!r} exists with another policy: update it instead")
            if existing:
                return existing
            self._limits.check_more("consumers")
            quarantine = self.quarantine_of(model)
            pause = Pause.now(ITSELF, quarantine=quarantine) if quarantine else None
            consumer = Consumer(name, model, time.time_ns(), policy, pause=pause)
            await self._write(consumer)
            self.consumers[name] = consumer
            if pause:
                self._events.emit(EventKind.CONSUMER_PAUSED, pause.why, consumer=name, by=pause.by)
            return consumer

    async def update(self, name: str, policy: Policy) -> Consumer:
        """Change the policy of a consumer."""
        return await self._change(name, policy=policy)

    async def pause(self, name: str, pause: Pause) -> Consumer:
        """Pause a consumer; the pause is durable once this returns.

        An earlier pause keeps its start and its author, and gets both reasons. If the log refuses the pause, it
        lasts until the service ends.
        """
        self.get(name).add_pause(pause)  # Effective at once, before any wait.
        async with self._creating:
            consumer = self.get(name)  # It may have been deleted or resumed during the wait.
            consumer.add_pause(pause)
            await self._write(consumer)
        return consumer

    async def follow(self, name: str, follows: Follow | None) -> Consumer:
        """Let a consumer follow a kept version, or the newest one; durable once this returns."""
        return await self._change(name, follows=follows)

    async def object(self, name: str, objection: Objection) -> Consumer:
        """Set the last objection of a consumer; durable once this returns."""
        return await self._change(name, objection=objection)

    async def _change(self, name: str, **fields: Any) -> Consumer:
        async with self._creating:
            consumer = self.get(name)
            changed = replace(consumer, **fields)
            if changed != consumer:
                await self._write(changed)
                vars(consumer).update(fields)
                consumer.signal.wake()
            return consumer

    async def hold_back(self, model: str, version: int, reason: str) -> None:
        """Put a version of a model in quarantine; durable once this returns.

        This pauses all consumers of the model, and each new one until operators have resumed all of them. An
        earlier pause keeps its author. If the log refuses the quarantine, it lasts until the service ends.
        """
        async with self._creating:
            quarantine = extended(self.quarantine_of(model), version, reason)
            record = pack_json(asdict(quarantine))
            written = [asyncio.wrap_future(self._logs.of(model).put(f"quarantine/{model}", record))]
            for consumer in self.of_model(model):
                before, pause = consumer.pause, Pause.now(ITSELF, quarantine=quarantine)
                consumer.add_pause(pause)
                if before is None or before.quarantine is None:  # Otherwise it only covers one more.
                    self._events.emit(EventKind.CONSUMER_PAUSED, pause.why, consumer=consumer.name, by=ITSELF)
                written.append(self._write(consumer))
            await asyncio.gather(*written)

    def quarantine_of(self, model: str) -> Quarantine | None:
        """The versions of a model in quarantine; None if there are none."""
        record = self._logs.of(model).items(f"quarantine/{model}").get("")
        with reading(f"record quarantine/{model}"):
            return Quarantine(**unpack_json(record)) if record else None

    async def _end_quarantine(self, model: str) -> None:
        """End a model's quarantine once operators have resumed all of its consumers."""
        kept = any(each.pause and each.pause.quarantine for each in self.of_model(model))
        if not kept and self.quarantine_of(model):
            try:
                await asyncio.wrap_future(self._logs.of(model).put(f"quarantine/{model}", None))
            except StorageFailed as error:  # Its consumers continue anyway.
                text = "could not be removed; after a restart, it counts again"
                self._events.emit(EventKind.FAILED, text, error, record=f"quarantine/{model}")

    async def resume(self, name: str, prepare: Callable[[Consumer], Awaitable[None]]) -> Consumer:
        """Resume a consumer after `prepare` has rebuilt its feed. After an error, it stays paused."""
        async with self._creating:
            consumer = self.get(name)
            pause = consumer.pause
            await self._write(replace(consumer, pause=None))
            try:
                await prepare(consumer)
            except BaseException:  # Also if the caller disconnected: a restart must not end the pause.
                await self._write(consumer)
                raise
            if consumer.pause is pause:  # Otherwise it was paused again.
                consumer.pause = None
                consumer.pause_changed.wake()
                consumer.signal.wake()
            await self._end_quarantine(consumer.model)
            return consumer

    async def delete(self, name: str) -> None:
        """Delete a consumer and its offsets."""
        consumer = self.get(name)
        del self.consumers[name]
        consumer.end_streams()
        log = self._logs.of(consumer.model)
        offsets = self._offsets[log].forgotten(name)
        log.truncate(history_stream(name), LAST_NUMBER)
        await asyncio.wrap_future(log.put_all({**offsets, f"consumer/{name}": None}))

    def connect(
        self, consumer: Consumer, name: str, stream: asyncio.Event, instance: str = "", by: str = ""
    ) -> Replica:
        """Record that a replica with identity `by` opened a stream, which replaces an older one of its name."""
        if len(instance) > _LONGEST_INSTANCE:
            raise InvalidInput(f"instance: use at most {_LONGEST_INSTANCE} characters")
        replica = consumer.replicas.get(check_name("replica", name)) or Replica(name)
        if replica.stream and replica.by != by:
            text = f"replica {name!r} of consumer {consumer.name!r} is connected with another identity"
            raise ServiceUnavailable(f"{text}: use another name, or wait until it disconnects")
        if name not in consumer.replicas:
            self._limits.check("replicas_per_consumer", len(consumer.replicas) + 1)
        other_process = replica.stream and replica.instance != instance
        if other_process or replica.by not in (None, by):
            owner = replica.by or "a client without a token or certificate"
            text = f"it belonged to {owner}" + (", which is still connected" if replica.stream else "")
            self._events.emit(EventKind.REPLICA_TAKEN_OVER, text, consumer=consumer.name, replica=name)
        if replica.instance != instance or not instance:  # Another process, which holds nothing yet.
            replica.held.clear()
        consumer.replicas[name] = replica
        replica.end_stream()
        replica.stream, replica.instance, replica.by, replica.since_ns = stream, instance, by, steady_ns()
        consumer.signal.wake()
        return replica

    def disconnect(
        self,
        consumer: Consumer,
        replica: Replica,
        stream: asyncio.Event,
        why: str,
        *,
        forget: bool = False,
        expected: bool = False,
    ) -> None:
        """Record why a stream of a replica ended. Forget a guest, and a replica that will not return (`forget`).

        Also forget one that never had a version, unless it is `expected` to return because the service ended its
        stream. Otherwise clients could fill the consumer with unused names.
        """
        if replica.stream is not stream:
            return
        replica.stream, replica.since_ns, replica.left = None, steady_ns(), why
        unused = not (replica.has_held or expected)
        if (forget or unused or replica.guest) and self.consumers.get(consumer.name) is consumer:
            self._forget(consumer, replica.name)

    async def forget(self, name: str, replica: str) -> None:
        """Forget a replica that is away; durable once this returns."""
        consumer = self.get(name)
        if replica not in consumer.replicas:
            names = f"; replicas: {listed(consumer.replicas) or 'none'}"
            raise NotFound(f"no replica {replica!r} of consumer {name!r}", detail=names)
        if consumer.replicas[replica].stream:
            raise Contradiction(f"replica {replica!r} of consumer {name!r} is connected: stop it first")
        del consumer.replicas[replica]
        consumer.signal.wake()
        log = self._logs.of(consumer.model)
        await asyncio.wrap_future(log.put_all(self._offsets[log].forgotten(name, replica)))

    def leave(self, name: str, replica: str, instance: str, by: str = "") -> None:
        """Forget a replica that says goodbye without a stream, unless another one of its name connected since."""
        consumer = self.consumers.get(name)
        present = consumer.replicas.get(replica) if consumer else None
        if present and present.by not in (None, by):
            raise NotPermitted(f"replica {replica!r} of consumer {name!r} belongs to another identity")
        decision = may_leave(present, instance)
        if consumer and present and decision.yes:
            if present.stream is None:  # Otherwise the end of its stream reports it.
                self._events.emit(EventKind.REPLICA_FORGOTTEN, decision.reason, consumer=name, replica=replica)
            present.end_stream()
            present.stream = None  # Its later messages do not count.
            self._forget(consumer, replica)

    def acknowledge(self, consumer: Consumer, replica: Replica, applied: Position) -> None:
        """Move a replica's offset without waiting for the disk, since delivery is at least once anyway."""
        moved = replica.applied != applied
        if moved or applied.seal:  # Otherwise its position is no longer in the history.
            replica.applied = applied
            replica.has_held |= applied.number > 0
        replica.acked_unix_ns, replica.acked_ns = time.time_ns(), steady_ns()
        if not moved:
            return  # Idle replicas repeat their position: there is nothing to write.
        consumer.signal.wake()
        if self.consumers.get(consumer.name) is not consumer or replica.guest:
            return  # A deleted consumer or a guest has no records.
        self._offsets[self._logs.of(consumer.model)].note(consumer.name, replica)

    def write_offsets(self) -> None:
        """Submit all offsets before the logs are closed."""
        for offsets in self._offsets.values():
            offsets.write_all()

    async def offsets_written(self, log: LogStore) -> None:
        """Wait until all present offsets of a log are written."""
        if offsets := self._offsets.get(log):
            await offsets.written()

    def forget_the_gone(self) -> None:
        """Forget replicas that were away for longer than the retention."""
        for consumer in self.consumers.values():
            for name in forgettable(list(consumer.replicas.values()), steady_ns(), self._retention_ns):
                self._forget(consumer, name)
                text = f"it was away for more than {self._retention_ns / 1e9:.15g} s"
                self._events.emit(EventKind.REPLICA_FORGOTTEN, text, consumer=consumer.name, replica=name)

    def _forget(self, consumer: Consumer, name: str) -> None:
        del consumer.replicas[name]
        consumer.signal.wake()
        self._offsets[self._logs.of(consumer.model)].forget(consumer.name, name)

    def _write(self, consumer: Consumer) -> "asyncio.Future[None]":
        record = pack_json(consumer_record(consumer))
        return asyncio.wrap_future(self._logs.of(consumer.model).put(f"consumer/{consumer.name}", record))


def offset_in(history: str, seal_of: Callable[[int], int], position: Position) -> int:
    """The number of a position in `history`, whose numbers have the seals `seal_of`; 0 if it is in another one."""
    if position.history != history:
        return 0
    seal = seal_of(position.number) if position.seal else 0
    return position.number if seal in (0, position.seal) else 0


def consumer_offset(replicas: Sequence[Replica], history: str, seal_of: Callable[[int], int]) -> int:
    """The lowest offset of the replicas, without guests; 0 without replicas."""
    fleet = [replica for replica in replicas if not replica.guest]
    return min((offset_in(history, seal_of, replica.applied) for replica in fleet), default=0)


def forgettable(replicas: Sequence[Replica], now_ns: int, retention_ns: int) -> list[str]:
    """Names of replicas that were away for longer than the retention, except the last replica of a consumer."""
    present = [replica for replica in replicas if replica.stream is not None and not replica.guest]
    away = [replica for replica in replicas if replica.stream is None]
    away.sort(key=lambda replica: (replica.since_ns, replica.acked_unix_ns))
    if not present:
        away = away[:-1]
    return [replica.name for replica in away if replica.since_ns < now_ns - retention_ns]


def may_leave(replica: Replica | None, instance: str) -> Decision:
    """Whether to forget a replica when one of its instances says goodbye without a stream."""
    if replica is None:
        return Decision(False, "there is no replica of that name")
    if instance and instance == replica.instance:
        return Decision(True, "it said goodbye")
    if instance and not replica.instance and not replica.stream and not replica.left:
        return Decision(True, "it said goodbye, and no other of its name connected since the service started")
    return Decision(False, "another replica of that name has connected")
