"""Changes what consumers follow: the newest version, a kept one, or another consumer at a distance."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from deltasync.base.clock import Moment
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.base.events import EventKind, Events
from deltasync.checkpoints.kept_version import KeptVersion, find_kept
from deltasync.consumers.consumer import ITSELF, Consumer
from deltasync.consumers.follow import (
    LIVE,
    REPEAT_SECONDS,
    Follow,
    HistoryLine,
    Objection,
    RolloutDelay,
    check_past,
    next_version,
)
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.model.model import Model
from deltasync.service.consumers import Consumers
from deltasync.service.kept_versions import SHARE_OF_DISTANCE, kept_of
from deltasync.service.models import Models
from deltasync.service.serving_history import Histories
from deltasync.views.registry import ViewRegistry

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
        histories: Histories,
        events: Events,
        clock: Callable[[], Moment] = Moment.now,
        look_seconds: float = 1.0,
    ) -> None:
        self._look_seconds = look_seconds
        self._models = models
        self._registry = registry
        self._consumers = consumers
        self._views = views
        self._histories = histories
        self._events = events
        self._clock = clock
        self._looked = dict[str, Moment]()  # When it last looked for a later version, by consumer.

    async def follow(self, name: str, version: str, by: str = ITSELF) -> Consumer:
        """Let a consumer follow a kept version, by its name or number, or the newest one ("live")."""
        if version == LIVE:  # Without waiting for object storage.
            async with self._models.changing:
                return await self._set(self._consumers.get(name), None, "follows the newest version", by)
        consumer = self._consumers.get(name)
        async with self._models.releasing(consumer.model):
            before, model = consumer.follows, self._models.model(consumer.model)
            kept = find_kept(await kept_of(model), model.name, version)
            return await self._change(
                consumer, model, before, Follow(kept, self._clock().unix_ns, by), kept.description, by
            )

    async def follow_consumer(
        self, name: str, distance: RolloutDelay, version: str = "", by: str = ITSELF
    ) -> Consumer:
        """Let a consumer follow another one at a distance.

        It begins at `version`. If that is empty, it begins at the kept version that it follows now, or else at the
        newest one that the other consumer allows.
        """
        longest = self._histories.keep_seconds - 2 * REPEAT_SECONDS
        if distance.behind_seconds > longest:
            raise InvalidInput(
                f"behind_seconds: {distance.behind_seconds:g}, but the history of consumers allows at most "
                f"{max(0.0, longest):g}: increase --history-seconds"
            )
        consumer, other = self._consumers.get(name), self._consumers.get(distance.after)
        async with self._models.releasing(consumer.model):
            before, model = consumer.follows, self._models.model(consumer.model)
            self._check_order(consumer, other)
            every = await kept_of(model)
            kept = [each for each in every if _is_past(each, model)]
            if version:
                first, why = find_kept(every, model.name, version), "as requested"
            elif consumer.follows:
                first, why = consumer.follows.kept, "where it is"
            else:
                lines = await self._lines(distance)
                found, why = next_version(None, distance, kept, lines, other.objection)
                if found is None:
                    raise NotFound(
                        f"no kept version of model {model.name!r} can be the first for consumer {name!r}: {why}; "
                        "wait, or name the first one with --version"
                    )
                first = found
            follows = Follow(first, self._clock().unix_ns, by, distance)
            return await self._change(
                consumer, model, before, follows, f"{first.description}, {distance.description}: {why}", by
            )

    async def object(self, name: str, reason: str, by: str = ITSELF) -> Consumer:
        """Raise an objection to what a consumer serves. An earlier one in force keeps its start and its author."""
        consumer = self._consumers.get(name)
        before = consumer.objection
        objection = Objection(self._clock().unix_ns, by, reason, before.number + 1 if before else 1)
        if before and before.in_force:
            return consumer
        await self._registry.object(name, objection)
        self._events.emit(EventKind.CONSUMER_OBJECTS, reason, consumer=name, model=consumer.model, by=by)
        return consumer

    async def withdraw(self, name: str, by: str = ITSELF) -> Consumer:
        """Withdraw the objection of a consumer, if one is in force.

        Followers then go on to versions that are kept from now on, not to earlier ones.
        """
        consumer = self._consumers.get(name)
        if (objection := consumer.objection) and objection.in_force:
            newest_id = self._models.model(consumer.model).checkpoints.newest_id
            withdrawn = replace(objection, until_unix_ns=self._clock().unix_ns, until_id=newest_id)
            await self._registry.object(name, withdrawn)
            text = f"withdrawn: {objection.reason}"
            self._events.emit(EventKind.CONSUMER_OBJECTS, text, consumer=name, model=consumer.model, by=by)
        return consumer

    async def run(self) -> None:
        """Let consumers at a distance go on, or back, until cancelled. It reports failures and tries again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat(self.heed))
            # In another task, because object storage may not answer for a while.
            tasks.create_task(self._repeat(self.go_on))

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            await look()

    async def heed(self) -> None:
        """Let each consumer at a distance stay, or go back, if the other one objects."""
        await self._look(self._go_back, "the service could not move it back after an objection")

    async def go_on(self) -> None:
        """Let each consumer at a distance go on to a later version if the other one allows it."""
        await self._look(self._go_on, "it cannot look for a later version")

    async def _look(self, look_at: Callable[[Consumer, RolloutDelay], Awaitable[None]], failure: str) -> None:
        for consumer in list(self._registry.consumers.values()):
            if (distance := consumer.distance) and consumer.model in self._models:
                try:
                    await look_at(consumer, distance)
                except DeltasyncError as error:
                    consumer.waits = f"{failure}: {error}" if consumer.distance else ""
                    self._events.emit(
                        EventKind.FAILED, f"{failure}; the service tries again", error, consumer=consumer.name
                    )

    async def _go_back(self, consumer: Consumer, distance: RolloutDelay) -> None:
        objection, follows, model = self._objection(distance), consumer.follows, self._models[consumer.model]
        if objection and objection.in_force and follows:
            # Nobody can release the version before this one, so that this does not wait for object storage.
            version, consumer.waits = next_version(follows, distance, [], [], objection)
            if version:
                async with self._models.changing:
                    if self._is_same(consumer, model, follows):
                        await self._move(consumer, follows, version)

    async def _go_on(self, consumer: Consumer, distance: RolloutDelay) -> None:
        name, model, follows, now = consumer.name, self._models[consumer.model], consumer.follows, self._clock()
        pause_ns = int(1e9 * min(_LONGEST_LOOK_SECONDS, _LOOK_SHARE * distance.behind_seconds))
        if name in self._looked and now.after_ns(self._looked[name]) < pause_ns:
            return
        self._looked[name] = now
        async with self._models.releasing(model.name):
            kept = [each for each in await kept_of(model) if _is_past(each, model)]
            lines, objection = await self._lines(distance), self._objection(distance)
            if follows is None or consumer.follows is not follows or (objection and objection.in_force):
                return
            version, consumer.waits = next_version(follows, distance, kept, lines, objection)
            if version is None:
                return
            async with self._models.changing:
                if self._is_same(consumer, model, follows) and self._objection(distance) is objection:
                    await self._move(consumer, follows, version)

    async def _lines(self, distance: RolloutDelay) -> list[HistoryLine]:
        """The history of the consumer that another one follows, as long as kept versions wait for it."""
        return await self._histories.until_now(distance.after, SHARE_OF_DISTANCE * distance.behind_seconds)

    def _objection(self, distance: RolloutDelay) -> Objection | None:
        """The last objection of the consumer that another one follows."""
        other = self._registry.consumers.get(distance.after)
        return other.objection if other else None

    async def _move(self, consumer: Consumer, follows: Follow, version: KeptVersion) -> None:
        """Let a consumer at a distance go on or back. The caller holds `changing`."""
        distance = f", {follows.distance.description}" if follows.distance else ""
        text = f"follows {version.description}{distance}: {consumer.waits}"
        await self._set(consumer, follows.gone_on(version, self._clock().unix_ns, ITSELF), text, ITSELF)

    async def _change(
        self, consumer: Consumer, model: Model, before: Follow | None, follows: Follow, text: str, by: str
    ) -> Consumer:
        """Let a consumer follow a kept version instead of `before`. The caller holds `releasing`."""
        async with self._models.changing:
            if not self._is_same(consumer, model, before):
                raise Contradiction(
                    f"consumer {consumer.name!r} was changed while the service read the kept versions: try again"
                )
            if follows.distance:
                self._consumers.get(follows.distance.after)  # Somebody may have deleted it.
            check_past(follows.kept, model.seals)
            return await self._set(consumer, follows, f"follows {text}", by)

    def _is_same(self, consumer: Consumer, model: Model, follows: Follow | None) -> bool:
        """Whether a consumer still exists, with its model in this process, and follows the same as before."""
        exists = self._registry.consumers.get(consumer.name) is consumer and self._models.get(model.name) is model
        return exists and consumer.follows is follows

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
        """Check that a consumer may follow another one."""
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


def _is_past(kept: KeptVersion, model: Model) -> bool:
    """Whether a kept version belongs to the model's past, and the model was not rolled back beyond it."""
    if model.seals.rolled_back_by(kept.version):
        return False
    try:
        check_past(kept, model.seals)
    except Contradiction:
        return False
    return True
