"""What consumers follow: the newest version, a kept one, or another consumer at a distance."""

import asyncio
import time
from dataclasses import replace

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.base.events import EventKind, Events
from deltasync.checkpoints.kept import KeptVersion, find_kept
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.follow import LIVE, Distance, Follow, Objection, check_past, next_version
from deltasync.consumers.history import REPEAT_SECONDS, HistoryLine, read_lines
from deltasync.consumers.pause import ITSELF
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.log.log_store import LogStore
from deltasync.model.model import Model
from deltasync.service.consumers import Consumers
from deltasync.service.models import Models
from deltasync.views.registry import ViewRegistry

_LOOK_SECONDS = 1.0
# How often to look for a later version, as a share of the distance, and at the most.
_LOOK_SHARE, _LONGEST_LOOK_SECONDS = 0.01, 10.0


class Following:
    """Changes what consumers follow. Used in the event loop. `by` names the caller."""

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        consumers: Consumers,
        views: ViewRegistry,
        history_seconds: float,
        events: Events,
    ) -> None:
        self._models = models
        self._registry = registry
        self._consumers = consumers
        self._views = views
        self._history_seconds = history_seconds
        self._events = events
        self._due = dict[str, float]()  # When to look for a later version, by consumer and `time.monotonic`.

    async def follow(self, name: str, version: str, by: str = ITSELF) -> Consumer:
        """Let a consumer follow a kept version, by its name or number, or the newest one ("live").

        Raises:
            NotFound: there is no such consumer, or no such kept version of its model.
            Contradiction: the version belongs to a past that the model has discarded.
            ServiceUnavailable: its model is still recovering.
            StorageFailed: the checkpoints could not be read, or the change could not be written.
        """
        async with self._models.changing:  # Nobody releases the version meanwhile.
            consumer = self._consumers.get(name)
            follows, model = None, self._models.model(consumer.model)
            if version != LIVE:
                kept = find_kept(await _kept(model), model.name, version)
                check_past(kept, model.seals)
                follows = Follow(kept, time.time_ns(), by)
            text = f"follows {follows.kept.words}" if follows else "follows the newest version"
            return await self._set(consumer, follows, text, by)

    async def follow_consumer(
        self, name: str, distance: Distance, version: str = "", by: str = ITSELF
    ) -> Consumer:
        """Let a consumer follow another one at a distance.

        It begins at `version`; without one at the kept version that it follows, or at the newest one that the
        other consumer has proven for long enough.

        Raises:
            NotFound: there is no such consumer, or no such kept version of its model; or none that the other
                consumer has proven for long enough.
            Contradiction: both would follow each other, or they have different models; or the version belongs to a
                past that the model has discarded.
            InvalidInput: the distance is longer than the history of consumers.
            ServiceUnavailable: its model is still recovering.
            StorageFailed: the checkpoints or the log could not be read, or the change could not be written.
        """
        longest = self._history_seconds - 2 * REPEAT_SECONDS
        if distance.behind_seconds > longest:
            raise InvalidInput(
                f"behind_seconds: {distance.behind_seconds:g}, but the history of consumers allows at most "
                f"{max(0.0, longest):g}: increase --history-seconds"
            )
        async with self._models.changing:
            consumer, other = self._consumers.get(name), self._consumers.get(distance.after)
            model = self._models.model(consumer.model)
            self._check_order(consumer, other)
            every = await _kept(model)
            kept = [each for each in every if _is_past(each, model)]
            if version:
                first, why = find_kept(every, model.name, version), "as requested"
            elif consumer.follows:
                first, why = consumer.follows.kept, "where it is"
            else:
                lines = await asyncio.to_thread(_lines, model.log, distance)
                proven, why = next_version(None, distance, kept, lines, other.objection, time.time_ns())
                if proven is None:
                    raise NotFound(
                        f"no kept version of model {model.name!r} can be the first for consumer {name!r}: {why}; "
                        "wait, or name the first one with --version"
                    )
                first = proven
            check_past(first, model.seals)
            follows = Follow(first, time.time_ns(), by, distance)
            return await self._set(consumer, follows, f"follows {first.words}, {distance.words}: {why}", by)

    async def object(self, name: str, reason: str, by: str = ITSELF) -> Consumer:
        """Raise an objection to what a consumer serves. An earlier one in force keeps its start and its author.

        Raises:
            NotFound: no consumer has that name.
            InvalidInput: the reason is empty, too long, or not printable.
            StorageFailed: the objection could not be written.
        """
        consumer, objection = self._consumers.get(name), Objection(time.time_ns(), by, reason)
        if consumer.objection and consumer.objection.in_force:
            return consumer
        await self._registry.object(name, objection)
        self._events.emit(EventKind.CONSUMER_OBJECTS, reason, consumer=name, model=consumer.model, by=by)
        return consumer

    async def withdraw(self, name: str, by: str = ITSELF) -> Consumer:
        """Withdraw the objection of a consumer, if one is in force.

        Raises:
            NotFound: no consumer has that name.
            StorageFailed: the change could not be written.
        """
        consumer = self._consumers.get(name)
        if (objection := consumer.objection) and objection.in_force:
            await self._registry.object(name, replace(objection, until_unix_ns=time.time_ns()))
            text = f"withdrawn: {objection.reason}"
            self._events.emit(EventKind.CONSUMER_OBJECTS, text, consumer=name, model=consumer.model, by=by)
        return consumer

    async def run(self) -> None:
        """Let consumers at a distance go on, or back, until cancelled. It reports failures and tries again."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for consumer in [each for each in self._registry.consumers.values() if each.distance]:
                if consumer.model in self._models:
                    try:
                        await self._go_on(consumer)
                    except DeltasyncError as error:
                        text = "it cannot go on to a later version; the service tries again"
                        self._events.emit(EventKind.FAILED, text, error, consumer=consumer.name)

    async def _go_on(self, consumer: Consumer) -> None:
        name, model, distance = consumer.name, self._models[consumer.model], consumer.distance
        if distance is None:
            return
        other = self._registry.consumers.get(distance.after)
        objection = other.objection if other else None
        if not (objection and objection.in_force):
            if time.monotonic() < self._due.get(name, 0.0):
                return
            pause = min(_LONGEST_LOOK_SECONDS, _LOOK_SHARE * distance.behind_seconds)
            self._due[name] = time.monotonic() + pause
        kept, lines = list[KeptVersion](), list[HistoryLine]()
        if not (objection and objection.in_force):
            kept = [each for each in await _kept(model) if _is_past(each, model)]
            lines = await asyncio.to_thread(_lines, model.log, distance)
        follows = consumer.follows
        if follows is None or follows.distance is not distance:  # An operator was faster.
            return
        version, consumer.waits = next_version(follows, distance, kept, lines, objection, time.time_ns())
        if version is None:
            return
        async with self._models.changing:
            there = self._registry.consumers.get(name) is consumer and self._models.get(model.name) is model
            # Somebody may have released the version, or changed what the consumer follows.
            if there and consumer.follows is follows and version.id in {each.id for each in await _kept(model)}:
                text = f"follows {version.words}, {distance.words}: {consumer.waits}"
                await self._set(consumer, follows.gone_on(version, time.time_ns(), ITSELF), text, ITSELF)

    async def _set(self, consumer: Consumer, follows: Follow | None, text: str, by: str) -> Consumer:
        """Let a consumer follow something else. The caller holds `changing`."""
        before, model, consumer.waits = consumer.follows, self._models.model(consumer.model), ""
        await self._registry.follow(consumer.name, follows)
        try:
            await self._views.follow(consumer, model)
        except BaseException:  # Without a view, its replicas still get the newest version.
            await self._registry.follow(consumer.name, before)
            raise
        if view := self._views.get(consumer):
            view.follow(follows)
        self._events.emit(EventKind.CONSUMER_FOLLOWS, text, consumer=consumer.name, model=consumer.model, by=by)
        return consumer

    def _check_order(self, consumer: Consumer, other: Consumer) -> None:
        """Check that a consumer may follow another one.

        Raises:
            Contradiction: they have different models, or the other one follows it.
        """
        if other.model != consumer.model:
            raise Contradiction(
                f"consumer {other.name!r} has model {other.model!r}, and consumer {consumer.name!r} has model "
                f"{consumer.model!r}: a consumer can follow only one of its own model"
            )
        chain = [consumer.name]
        while other.name not in chain:
            chain.append(other.name)
            if other.distance is None or (later := self._registry.consumers.get(other.distance.after)) is None:
                return
            other = later
        raise Contradiction(
            f"consumers would follow each other in a circle: {' after '.join([*chain, other.name])}"
        )


async def _kept(model: Model) -> list[KeptVersion]:
    return await asyncio.to_thread(model.checkpoints.kept)


def _is_past(kept: KeptVersion, model: Model) -> bool:
    """Whether a kept version belongs to the model's past, and the model was not rolled back beyond it."""
    if model.seals.rolled_back_by(kept.version):
        return False
    try:
        check_past(kept, model.seals)
    except Contradiction:
        return False
    return True


def _lines(log: LogStore, distance: Distance) -> list[HistoryLine]:
    """The history of the other consumer for as long as the distance covers, and some more. Blocks."""
    seconds = distance.behind_seconds + 2 * REPEAT_SECONDS
    return list(read_lines(log, distance.after, max(0, time.time_ns() - int(seconds * 1e9))))
