"""The consumers of a service, and the replicas of each one's fleet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future

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
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.offsets import OffsetLog, offset_name, recorded_consumers
from deltasync.consumers.pause import (
    ITSELF,
    Pause,
    Quarantine,
    extended,
    joined,
    pause_record,
    quarantine_of_record,
    quarantine_record,
)
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.log_store import Logs, LogStore
from deltasync.log.records import pack_json, reading, unpack_json

_LONGEST_INSTANCE = 64


class ConsumerRegistry:
    """All consumers of the models that this process has.

    Attributes:
        consumers: these, by name.
        elsewhere: makes the error for a consumer that another process owns, else returns None.
    """

    def __init__(
        self, logs: Logs, replica_retention_seconds: float, events: Events, limits: Limits | None = None
    ) -> None:
        self._logs = logs
        self._limits = limits or Limits()
        self._limits.count("consumers", self._number)
        self._events = events
        self._creating = asyncio.Lock()
        self._retention_ns = int(replica_retention_seconds * 1e9)
        self.consumers = dict[str, Consumer]()
        self.elsewhere: Callable[[str], DeltasyncError | None] = lambda _: None
        self._offsets = dict[LogStore, OffsetLog]()
        for log in logs.each():
            self.have(recorded_consumers(log), log)

    def have(self, consumers: Mapping[str, Consumer], log: LogStore) -> None:
        """Have the consumers that a log has."""
        self.consumers |= consumers
        recorded = [offset_name(each.name, name) for each in consumers.values() for name in each.replicas]
        self._offsets[log] = OffsetLog(log, self._events, recorded)

    def end_streams(self, model: str) -> None:
        """End the streams of all consumers of a model, which is about to be another process's."""
        for consumer in self.of_model(model):
            consumer.moved = True
            for replica in consumer.replicas.values():
                _end_stream(replica)
            consumer.brake.wake()
            consumer.signal.wake()

    def give_up(self, model: str, log: LogStore, *, written: bool) -> None:
        """Have the consumers of a model no more, whose log another process has from here on: their streams end,
        and nothing is written down any more but, if it is to be `written`, what they have acknowledged.
        """
        self.end_streams(model)
        for consumer in self.of_model(model):
            del self.consumers[consumer.name]
        offsets = self._offsets.pop(log, None)
        if offsets and written:
            offsets.write_all()

    def get(self, name: str) -> Consumer:
        """The consumer of that name.

        Raises:
            NotFound: there is none; the message names those that exist.
            NotOwner: another process has its model.
        """
        if name not in self.consumers:
            if not_here := self.elsewhere(name):
                raise not_here
            raise NotFound(f"no consumer {name!r}", detail=f"; consumers: {listed(self.consumers) or 'none yet'}")
        return self.consumers[name]

    def _number(self) -> int:
        return len(self.consumers)

    def of_model(self, model: str) -> list[Consumer]:
        """The consumers that follow a model."""
        return [consumer for consumer in self.consumers.values() if consumer.model == model]

    async def create(self, name: str, model: str, policy: Policy) -> Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Where a version of the model is in quarantine, it is paused from its beginning: there are no other rows.

        Raises:
            InvalidInput: a name that cannot be one.
            Contradiction: it exists for another model, or with another policy.
            LimitReached: there would be too many consumers.
        """
        check_name("consumer", name)
        check_name("model", model)
        async with self._creating:
            existing = self.consumers.get(name)
            if existing and existing.model != model:
                raise Contradiction(
                    f"consumer {name!r} exists for model {existing.model!r}: delete it first, or give the one for "
                    f"{model!r} another name"
                )
            if existing and existing.policy != policy:
                raise Contradiction(f"consumer {name!r} exists with another policy: update it instead")
            if existing:
                return existing
            self._limits.check_more("consumers")
            quarantine = self.quarantine_of(model)
            pause = Pause.now(ITSELF, quarantine=quarantine) if quarantine else None
            consumer = Consumer(name, model, time.time_ns(), policy, pause=pause)
            await self._write(consumer, policy, pause)
            self.consumers[name] = consumer
            if pause:
                self._events.emit(EventKind.CONSUMER_PAUSED, pause.why, consumer=name, by=pause.by)
            return consumer

    async def update(self, name: str, policy: Policy) -> Consumer:
        """Give a consumer another policy.

        Raises:
            NotFound: there is none of that name.
        """
        async with self._creating:
            consumer = self.get(name)
            if consumer.policy != policy:
                await self._write(consumer, policy, consumer.pause)
                consumer.policy = policy
                consumer.signal.wake()
            return consumer

    async def pause(self, name: str, pause: Pause) -> Consumer:
        """Hold a consumer's replicas at what they have, from now on; durable once this returns.

        Where there is a pause already, that goes on: since then, by whom that was, and for both reasons.

        Raises:
            NotFound: there is none of that name.
            StorageFailed: it could not be written down, and holds until the service ends.
        """
        self._hold(name, pause)  # Before all that waits for something.
        async with self._creating:
            consumer = self._hold(name, pause)  # It may have been deleted, or gone on, before this one's turn.
            await self._write(consumer, consumer.policy, consumer.pause)
        return consumer

    def _hold(self, name: str, pause: Pause) -> Consumer:
        consumer = self.get(name)
        consumer.pause = joined(consumer.pause, pause)
        return consumer

    async def hold_back(self, model: str, version: int, reason: str) -> None:
        """Put a version of a model in quarantine; durable once this returns.

        All consumers of the model are held at what they have, and so is who is made before operators have let all
        of them go on. Who has paused one before is still named.

        Raises:
            StorageFailed: it could not be written down, and holds until the service ends.
        """
        async with self._creating:
            quarantine = extended(self.quarantine_of(model), version, reason)
            written = [self._logs.of(model).put(f"quarantine/{model}", pack_json(quarantine_record(quarantine)))]
            for consumer in self.of_model(model):
                before, pause = consumer.pause, Pause.now(ITSELF, quarantine=quarantine)
                consumer.pause = joined(before, pause)
                if before is None or before.quarantine is None:  # Else it is kept from one version more.
                    self._events.emit(EventKind.CONSUMER_PAUSED, pause.why, consumer=consumer.name, by=ITSELF)
                written.append(self._put_consumer(consumer, consumer.policy, consumer.pause))
            await asyncio.gather(*map(asyncio.wrap_future, written))

    def quarantine_of(self, model: str) -> Quarantine | None:
        """The versions of a model that its consumers are kept from; None if there are none."""
        record = self._logs.of(model).items(f"quarantine/{model}").get("")
        with reading(f"record quarantine/{model}"):
            return quarantine_of_record(unpack_json(record)) if record else None

    async def _end_quarantine(self, model: str) -> None:
        """Let consumers that are made follow a model at once, if operators have let all that it has go on."""
        kept = any(each.pause and each.pause.quarantine for each in self.of_model(model))
        if not kept and self.quarantine_of(model):
            try:
                await asyncio.wrap_future(self._logs.of(model).put(f"quarantine/{model}", None))
            except StorageFailed as error:  # Whoever was let go on does.
                text = "could not be removed; after a restart the one written before counts"
                self._events.emit(EventKind.FAILED, text, error, record=f"quarantine/{model}")

    async def resume(self, name: str, prepare: Callable[[Consumer], Awaitable[None]]) -> Consumer:
        """Let a consumer go on, once `prepare` has made what its replicas are fed from.

        Raises:
            NotFound: there is none of that name.
            StorageFailed: it could not be written down, or prepared; it is paused as before.
        """
        async with self._creating:
            consumer = self.get(name)
            pause = consumer.pause
            await self._write(consumer, consumer.policy, None)
            try:
                await prepare(consumer)
            except BaseException:  # Also where who asks has gone: a restart must not let it go on.
                await self._write(consumer, consumer.policy, consumer.pause)
                raise
            if consumer.pause is pause:  # Nobody has paused it again meanwhile.
                consumer.pause = None
                consumer.brake.wake()
                consumer.signal.wake()
            await self._end_quarantine(consumer.model)
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
        log = self._logs.of(consumer.model)
        offsets = self._offsets[log].all_forgotten(name)
        await asyncio.wrap_future(log.put_all({**offsets, f"consumer/{name}": None}))

    def connect(
        self, consumer: Consumer, name: str, stream: asyncio.Event, instance: str = "", by: str = ""
    ) -> Replica:
        """Note that a replica, of the identity `by`, has opened a stream, which replaces an older one of its name.

        Raises:
            InvalidInput: a name that cannot be one, or an instance that is too long.
            ServiceUnavailable: one of that name, of another identity, is connected.
            LimitReached: the consumer would have too many replicas.
        """
        if len(instance) > _LONGEST_INSTANCE:
            raise InvalidInput(f"instance: expected at most {_LONGEST_INSTANCE} characters")
        replica = consumer.replicas.get(check_name("replica", name)) or Replica(name)
        if replica.stream and replica.by != by:
            text = f"replica {name!r} of consumer {consumer.name!r} is connected as another identity"
            raise ServiceUnavailable(f"{text}: give this one another name, or wait until that has gone")
        if name not in consumer.replicas:
            self._limits.check("replicas_per_consumer", len(consumer.replicas) + 1)
        self._note_taken_over(consumer, replica, instance, by)
        consumer.replicas[name] = replica
        _end_stream(replica)
        replica.stream = stream
        replica.instance = instance
        replica.since_ns = steady_ns()
        replica.by = by
        consumer.signal.wake()
        return replica

    def _note_taken_over(self, consumer: Consumer, replica: Replica, instance: str, by: str) -> None:
        """Tell that a replica becomes another identity's, or that of another process while it is connected."""
        other_process = replica.stream and replica.instance != instance
        if other_process or replica.by not in (None, by):
            owner = replica.by or "a client without a token or certificate"
            text = f"it belonged to {owner}" + (", which is still connected" if replica.stream else "")
            self._events.emit(EventKind.REPLICA_TAKEN_OVER, text, consumer=consumer.name, replica=replica.name)

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
        """Note that a stream of a replica has ended, and why; `forget` one that will not come back. So is one that
        has never held anything, for nobody is to leave names behind; unless the service has ended the stream, and
        it is `expected` back; and one that is a guest, however it has ended.
        """
        if replica.stream is not stream:
            return
        replica.stream = None
        replica.since_ns = steady_ns()
        replica.left = why
        nobody = not (replica.has_held or expected)
        if (forget or nobody or replica.guest) and self.consumers.get(consumer.name) is consumer:
            self._forget(consumer, replica.name)

    async def forget(self, name: str, replica: str) -> None:
        """Forget a replica that is away; durable once this returns.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is connected.
        """
        consumer = self.get(name)
        if replica not in consumer.replicas:
            known = f"; replicas: {listed(consumer.replicas) or 'none'}"
            raise NotFound(f"no replica {replica!r} of consumer {name!r}", detail=known)
        if consumer.replicas[replica].stream:
            raise Contradiction(f"replica {replica!r} of consumer {name!r} is connected: stop it first")
        self._remove(consumer, replica)
        log = self._logs.of(consumer.model)
        await asyncio.wrap_future(log.put_all(self._offsets[log].forgotten(name, replica)))

    def leave(self, name: str, replica: str, instance: str, by: str = "") -> None:
        """Forget a replica that says goodbye without a stream, unless another one of its name has come.

        Raises:
            NotPermitted: it is not that of the identity `by`.
        """
        consumer = self.consumers.get(name)
        found = consumer.replicas.get(replica) if consumer else None
        if found and found.by not in (None, by):
            raise NotPermitted(f"replica {replica!r} of consumer {name!r} is another identity's")
        decision = may_leave(found, instance)
        if consumer and found and decision.yes:
            if found.stream is None:  # Else that will tell.
                self._events.emit(EventKind.REPLICA_FORGOTTEN, decision.reason, consumer=name, replica=replica)
            _end_stream(found)
            found.stream = None  # What it still has to say counts no more.
            self._forget(consumer, replica)

    def acknowledge(self, consumer: Consumer, replica: Replica, applied: Position) -> None:
        """Move a replica's offset, without waiting for the disk: delivery is at least once anyway."""
        moved = replica.applied != applied
        if moved or applied.seal:  # Else one is known that the history no longer has.
            replica.applied = applied
            replica.has_held |= applied.number > 0
        replica.acked_unix_ns, replica.acked_ns = time.time_ns(), steady_ns()
        if not moved:
            return  # Idle replicas show now and then what they hold: no reason to write, or to wake anybody.
        consumer.signal.wake()
        if self.consumers.get(consumer.name) is not consumer or replica.guest:
            return  # Deleted meanwhile, or nobody waits for it: nothing of it is to be written down.
        self._offsets[self._logs.of(consumer.model)].note(consumer.name, replica)

    def write_offsets(self) -> None:
        """Submit to the log what replicas have acknowledged: it is about to be closed."""
        for offsets in self._offsets.values():
            offsets.write_all()

    async def offsets_written(self, log: LogStore) -> None:
        """Wait until a log has what replicas have acknowledged by now."""
        if offsets := self._offsets.get(log):
            await offsets.written()

    def forget_the_gone(self) -> None:
        """Forget replicas that have been away for long, so that they no longer hold their consumer's offset."""
        for consumer in self.consumers.values():
            for name in forgettable(list(consumer.replicas.values()), steady_ns(), self._retention_ns):
                self._forget(consumer, name)
                text = f"it was away for more than {self._retention_ns / 1e9:.15g} seconds"
                self._events.emit(EventKind.REPLICA_FORGOTTEN, text, consumer=consumer.name, replica=name)

    def _forget(self, consumer: Consumer, name: str) -> None:
        self._remove(consumer, name)
        self._offsets[self._logs.of(consumer.model)].forget(consumer.name, name)

    def _remove(self, consumer: Consumer, replica: str) -> None:
        del consumer.replicas[replica]
        consumer.signal.wake()

    async def _write(self, consumer: Consumer, policy: Policy, pause: Pause | None) -> None:
        await asyncio.wrap_future(self._put_consumer(consumer, policy, pause))

    def _put_consumer(self, consumer: Consumer, policy: Policy, pause: Pause | None) -> Future[None]:
        created = consumer.created_unix_ns
        record = {"model": consumer.model, "created_unix_ns": created, "policy": policy.as_dict()}
        record |= pause_record(pause)
        return self._logs.of(consumer.model).put(f"consumer/{consumer.name}", pack_json(record))


def offset_in(history: str, seal_of: Callable[[int], int], position: Position) -> int:
    """The number of a position in `history`, where numbers have these seals (0 = not known); 0 if it is of another
    history, or of another past.
    """
    if position.history != history:
        return 0
    seal = seal_of(position.number) if position.seal else 0
    return position.number if seal in (0, position.seal) else 0


def consumer_offset(replicas: Sequence[Replica], history: str, seal_of: Callable[[int], int]) -> int:
    """What all of the fleet has: the lowest offset of its replicas, but for guests; 0 without replicas."""
    fleet = [replica for replica in replicas if not replica.guest]
    return min((offset_in(history, seal_of, replica.applied) for replica in fleet), default=0)


def forgettable(replicas: Sequence[Replica], now_ns: int, retention_ns: int) -> list[str]:
    """Replicas that have been away for longer than the retention; the last one of a fleet is kept.

    `now_ns` is by `steady_ns`: nobody is forgotten because a clock was set.
    """
    present = [replica for replica in replicas if replica.stream is not None and not replica.guest]
    away = [replica for replica in replicas if replica.stream is None]
    away.sort(key=lambda replica: (replica.since_ns, replica.acked_unix_ns))
    if not present:
        away = away[:-1]
    return [replica.name for replica in away if replica.since_ns < now_ns - retention_ns]


def may_leave(replica: Replica | None, instance: str) -> Decision:
    """Whether a replica of a name is forgotten once an instance of it says goodbye without a stream."""
    if replica is None:
        return Decision(False, "there is no replica of that name")
    if instance and instance == replica.instance:
        return Decision(True, "it has said goodbye")
    if instance and not replica.instance and not replica.stream and not replica.left:
        return Decision(True, "it has said goodbye, and none of its name has come since the service started")
    return Decision(False, "another replica of that name has come")


def _end_stream(replica: Replica) -> None:
    if replica.stream:
        replica.stream.set()
