"""Keeps versions of models, by request and by schedule."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from deltasync.base.clock import Moment
from deltasync.base.errors import Contradiction, DeltasyncError, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import listed
from deltasync.checkpoints.kept_version import KeptVersion, check_kept_name, find_kept
from deltasync.checkpoints.manifest import Manifest
from deltasync.consumers.consumer import ITSELF, Consumer
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.model.model import Model
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.service.serving_history import LONGEST_LOOK_NS

# A consumer at a distance goes on later than the distance if the other one pauses on the way.
SHARE_OF_DISTANCE = 2


class Versions:
    """Keeps and releases versions of the models of this process. Used in the event loop; `by` names the caller."""

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        checkpoints: Checkpoints,
        options: ServiceOptions,
        events: Events,
        clock: Callable[[], Moment] = Moment.now,
    ) -> None:
        self._models = models
        self._registry = registry
        self._checkpoints = checkpoints
        self._options = options
        self._events = events
        self._clock, self._looked = clock, clock()
        self._changing = asyncio.Lock()
        self._watched = WeakKeyDictionary[Model, float]()  # Seconds for which services have watched each model.
        self._schedules = WeakKeyDictionary[Model, _Schedule]()
        self._unread = WeakKeyDictionary[Model, Moment]()  # When to try again to list the versions of a model.

    def listed(self) -> Mapping[str, Sequence[KeptVersion]]:
        """The kept versions of each model, oldest first, without reading them.

        A model is missing until `run` has read them once.
        """
        known = {name: model.checkpoints.known_kept for name, model in self._models.items()}
        return {name: kept for name, kept in known.items() if kept is not None}

    async def keep(self, model: str, name: str = "", by: str = ITSELF) -> KeptVersion:
        """Keep the newest version of a model. When this returns, it is durable, also at the service's URL."""
        if name:
            check_kept_name(name)
        async with self._changing:
            serving = self._models.model(model)
            for each in await self._kept(serving):
                if name and each.name == name:
                    raise Contradiction(
                        f"model {model!r} has a kept version {name!r}, version {each.version}: use another name, "
                        f"or release it first (deltasync versions release {model} {name})"
                    )
            return await self._keep(serving, await self._checkpoints.make(model), name, by)

    async def _keep(self, model: Model, manifest: Manifest, name: str, by: str) -> KeptVersion:
        """Keep a checkpoint. The caller holds `_changing`."""
        seal = next((seal for seal in model.seals if seal.checksum == manifest.seal), None)
        if seal is None:
            raise StorageFailed(f"version {manifest.version} of model {model.name!r} was discarded; try again")
        kept = KeptVersion(
            model=model.name,
            name=name,
            id=manifest.id,
            seal=seal,
            bytes=manifest.bytes,
            kept_unix_ns=self._clock().unix_ns,
            by=by,
            watched_seconds=self._watched[model],
        )
        await in_own_thread(model.checkpoints.keep, kept, manifest)
        self._events.emit(EventKind.VERSION_KEPT, kept.description, model=model.name, version=kept.version, by=by)
        return kept

    async def kept(self, model: str) -> list[tuple[KeptVersion, int | None]]:
        """The kept versions of a model, oldest first, each with the bytes of the files that nothing else needs.

        These bytes are None for a version whose checkpoint cannot be read.
        """
        serving = self._models.model(model)
        return [(each, serving.checkpoints.own_bytes(each)) for each in await kept_of(serving)]

    async def release(self, model: str, reference: str, by: str = ITSELF) -> KeptVersion:
        """Stop keeping a version. The next checkpoint removes its files."""
        serving = self._models.model(model)
        kept = find_kept(await kept_of(serving), model, reference)
        await self._release(serving, kept, by)
        return kept

    async def _release(self, model: Model, kept: KeptVersion, by: str) -> None:
        async with self._models.releasing(model.name):  # No consumer begins to follow it meanwhile.
            if names := self.followers(kept):
                raise Contradiction(
                    f"{kept.description} of model {model.name!r} is followed by {listed(names)}: let them follow "
                    "another version first (deltasync consumers follow)"
                )
            model.checkpoints.hide(kept)
        await in_own_thread(model.checkpoints.release, kept)
        self._events.emit(
            EventKind.VERSION_RELEASED, kept.description, model=model.name, version=kept.version, by=by
        )

    def followers(self, kept: KeptVersion) -> list[str]:
        """The names of the consumers that follow a kept version, or may go back to it."""
        return self.followers_of(kept.model).get(kept.id, [])

    def followers_of(self, model: str) -> Mapping[str, list[str]]:
        """The same for all kept versions of a model, by the ids of their checkpoints."""
        names = defaultdict[str, list[str]](list)
        for consumer in self._registry.of_model(model):
            for kept in consumer.follows.versions if consumer.follows else ():
                names[kept.id].append(consumer.name)
        return {id: sorted(some) for id, some in names.items()}  # noqa: A001

    async def run(self) -> None:
        """List the kept versions of each model once, and keep and release by schedule, until cancelled."""
        while True:
            await asyncio.sleep(self._options.look_seconds)
            await self.look()

    async def look(self) -> None:
        """Do once what is due. It reports failures and tries again."""
        every, now = self._options.keep_every_seconds, self._clock()
        seen_seconds = min(now.after_ns(self._looked), LONGEST_LOOK_NS) / 1e9
        self._looked = now
        for model in list(self._models.values()):
            self._watched[model] = self._watched.get(model, 0.0) + seen_seconds
            unread = model.checkpoints.known_kept is None and now.after_ns(self._unread.get(model, now)) >= 0
            if unread:
                self._unread[model] = now.plus(self._options.kept_retry_seconds)
                await self._read(model)
            if every is None:
                continue
            schedule = self._schedules.setdefault(model, _Schedule(now.plus(every)))
            if model.head and now.after_ns(schedule.next) >= 0:
                await self._keep_by_schedule(model, schedule, every, now)

    async def _read(self, model: Model) -> None:
        try:
            await self._kept(model)
        except DeltasyncError as error:
            text = "the kept versions could not be read; the service tries again"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)

    async def _keep_by_schedule(self, model: Model, schedule: "_Schedule", every: float, now: Moment) -> None:
        # Followers get only what a canary has held. But a canary that never holds the newest version, for example
        # because it is paused, must not stop the schedule.
        canaries = self._canaries(model) if now.after_ns(schedule.due) < every * 1e9 else []

        def wanted(seal: int) -> bool:
            return not canaries or any(each.has_held(seal) for each in canaries)

        if not wanted(model.position.seal):
            return
        schedule.next = now.plus(schedule.pause)
        schedule.pause = min(2 * schedule.pause, every)
        try:
            before = await self._kept(model)
            if before and before[-1].seal.checksum == model.position.seal:
                self._schedules[model] = _Schedule(now.plus(every))
            else:
                async with self._changing:
                    manifest = await self._checkpoints.make(model.name)
                    # A cut may have come meanwhile. Then the next checkpoint has little to write.
                    if wanted(manifest.seal):
                        await self._keep(model, manifest, "", ITSELF)
                        self._schedules[model] = _Schedule(now.plus(every))
            distances = [each.distance for each in self._registry.of_model(model.name) if each.distance]
            behind = max((each.behind_seconds for each in distances), default=0.0)
            watched = self._watched[model]
            for each in outdated(await self._kept(model), self._options, behind, now.unix_ns, watched):
                if not self.followers(each):
                    await self._release(model, each, ITSELF)
        except DeltasyncError as error:
            text = "a version could not be kept or released by schedule; the service tries again"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)

    def _canaries(self, model: Model) -> list[Consumer]:
        """The consumers of a model that get the newest version, have replicas, and are followed by others."""
        consumers = self._registry.of_model(model.name)
        followed = {each.distance.after for each in consumers if each.distance}
        return [each for each in consumers if each.name in followed and each.connected and not each.follows]

    async def _kept(self, model: Model) -> Sequence[KeptVersion]:
        kept = await kept_of(model)
        # After a start, the time goes on from when a version was last kept.
        seconds = max((each.watched_seconds for each in kept), default=0.0)
        self._watched[model] = max(seconds, self._watched.get(model, 0.0))
        return kept


async def kept_of(model: Model) -> Sequence[KeptVersion]:
    """The kept versions of a model, oldest first: from memory, unless they have not been read yet."""
    known = model.checkpoints.known_kept
    return known if known is not None else await in_own_thread(model.checkpoints.kept)


@dataclass
class _Schedule:
    """When the next version of a model is due, when to try to keep one, and how long to wait after an attempt."""

    due: Moment
    pause: float = 1.0
    next: Moment = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.due


def outdated(
    versions: Sequence[KeptVersion],
    options: ServiceOptions,
    behind_seconds: float,
    now_unix_ns: int,
    watched_seconds: float,
) -> list[KeptVersion]:
    """The versions that a schedule kept, and that are neither among the newest `keep_last` of these nor younger
    than `keep_for_seconds`, by the wall clock or by the time that services have watched the model. Versions with a
    name stay, and those to which a consumer at a distance of `behind_seconds` may still go on.
    """
    scheduled = [each for each in versions if not each.name]
    seconds = max(options.keep_for_seconds, SHARE_OF_DISTANCE * behind_seconds)

    def age(each: KeptVersion) -> float:
        return max(0.0, min((now_unix_ns - each.kept_unix_ns) / 1e9, watched_seconds - each.watched_seconds))

    beyond = scheduled[: max(0, len(scheduled) - options.keep_last)]
    return [each for each in beyond if age(each) >= seconds]
