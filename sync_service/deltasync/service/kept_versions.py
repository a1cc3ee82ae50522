"""Keeps versions of models, by request and by schedule."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from deltasync.base.errors import Contradiction, DeltasyncError, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import listed
from deltasync.checkpoints.kept_version import KeptVersion, check_kept_name, find_kept
from deltasync.consumers.pause import ITSELF
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.model.model import Model
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions

_LOOK_SECONDS = 1.0
# A consumer at a distance goes on later than the distance if replicas of the other one prove a version late.
_SHARE_OF_DISTANCE = 2
# Pause before the next attempt to read the kept versions of a model.
_READ_AGAIN_SECONDS = 10.0


class Versions:
    """Keeps and releases versions of the models of this process. Used in the event loop; `by` names the caller."""

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        checkpoints: Checkpoints,
        options: ServiceOptions,
        events: Events,
    ) -> None:
        self._models = models
        self._registry = registry
        self._checkpoints = checkpoints
        self._options = options
        self._events = events
        self._changing = asyncio.Lock()

    def listed(self) -> Mapping[str, Sequence[KeptVersion]]:
        """The kept versions of each model, oldest first, without reading them.

        A model is missing until `run` has read them once.
        """
        known = {name: model.checkpoints.known_kept for name, model in self._models.items()}
        return {name: kept for name, kept in known.items() if kept is not None}

    async def keep(self, model: str, name: str = "", by: str = ITSELF) -> KeptVersion:
        """Keep the newest version of a model. When this returns, it is durable, also at the service's URL.

        Raises:
            InvalidInput: the name cannot be one.
            Contradiction: another kept version has the name.
            NotFound: there is no such model, or it has no published version.
            NotCopied: the checkpoint could not be copied to the service's URL.
            DeltasyncError: see `Checkpoints.write`.
        """
        if name:
            check_kept_name(name)
        async with self._changing:
            serving = self._models.model(model)
            for each in await kept_of(serving):
                if name and each.name == name:
                    raise Contradiction(
                        f"model {model!r} has a kept version {name!r}, version {each.version}: use another name, "
                        f"or release it first (deltasync versions release {model} {name})"
                    )
            manifest = await self._checkpoints.make(model)
            seal = next((seal for seal in serving.seals if seal.checksum == manifest.seal), None)
            if seal is None:
                raise StorageFailed(f"version {manifest.version} of model {model!r} was discarded; try again")
            kept = KeptVersion(
                model=model,
                name=name,
                id=manifest.id,
                seal=seal,
                bytes=manifest.bytes,
                kept_unix_ns=time.time_ns(),
                by=by,
            )
            await in_own_thread(serving.checkpoints.keep, kept, manifest)
        self._events.emit(EventKind.VERSION_KEPT, kept.words, model=model, version=kept.version, by=by)
        return kept

    async def kept(self, model: str) -> list[tuple[KeptVersion, int | None]]:
        """The kept versions of a model, oldest first, each with the bytes of the files that nothing else needs.

        These bytes are None for a version whose checkpoint cannot be read.

        Raises:
            NotFound: there is no such model.
            StorageFailed: the checkpoints cannot be read at present.
        """
        serving = self._models.model(model)
        return [(each, serving.checkpoints.own_bytes(each)) for each in await kept_of(serving)]

    async def release(self, model: str, reference: str, by: str = ITSELF) -> KeptVersion:
        """Stop keeping a version. The next checkpoint removes its files.

        Raises:
            NotFound: there is no such model, or no such kept version of it.
            Contradiction: a consumer follows it.
            StorageFailed: the checkpoints could not be read or written.
        """
        serving = self._models.model(model)
        kept = find_kept(await kept_of(serving), model, reference)
        await self._release(serving, kept, by)
        return kept

    async def _release(self, model: Model, kept: KeptVersion, by: str) -> None:
        async with self._models.releasing(model.name):  # No consumer begins to follow it meanwhile.
            if names := self.followers(kept):
                raise Contradiction(
                    f"{kept.words} of model {model.name!r} is followed by {listed(names)}: let them follow "
                    "another version first (deltasync consumers follow)"
                )
            model.checkpoints.hide(kept)
        await in_own_thread(model.checkpoints.release, kept)
        self._events.emit(EventKind.VERSION_RELEASED, kept.words, model=model.name, version=kept.version, by=by)

    def followers(self, kept: KeptVersion) -> list[str]:
        """The names of the consumers that follow a kept version, or may go back to it."""
        return self.followers_of(kept.model).get(kept.id, [])

    def followers_of(self, model: str) -> Mapping[str, list[str]]:
        """The same for all kept versions of a model, by the ids of their checkpoints."""
        names = defaultdict[str, list[str]](list)
        for consumer in self._registry.of_model(model):
            for each in sorted(consumer.follows.ids) if consumer.follows else ():
                names[each].append(consumer.name)
        return {id: sorted(some) for id, some in names.items()}  # noqa: A001

    async def run(self) -> None:
        """List the kept versions of each model once, and keep and release versions by schedule, until cancelled.

        It reports failures and tries again.
        """
        every = self._options.keep_every_seconds
        due, unread = dict[Model, float](), dict[Model, float]()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now, models = time.monotonic(), list(self._models.values())
            unread = {each: unread.get(each, now) for each in models if each.checkpoints.known_kept is None}
            for model, at in list(unread.items()):
                if now >= at:
                    unread[model] = now + _READ_AGAIN_SECONDS
                    await self._read(model)
            if every is None:
                continue
            due = {each: due.get(each, now + every) for each in models}
            for model, at in list(due.items()):
                if now >= at and model.head:
                    due[model] = now + every
                    await self._keep_by_schedule(model)

    async def _read(self, model: Model) -> None:
        try:
            await kept_of(model)
        except DeltasyncError as error:
            text = "the kept versions could not be read; the service tries again"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)

    async def _keep_by_schedule(self, model: Model) -> None:
        try:
            before = await kept_of(model)
            if not before or before[-1].seal.checksum != model.position.seal:
                await self.keep(model.name)
            distances = [each.distance for each in self._registry.of_model(model.name) if each.distance]
            behind = max((each.behind_seconds for each in distances), default=0.0)
            for each in outdated(await kept_of(model), self._options, behind, time.time_ns()):
                if not self.followers(each):
                    await self._release(model, each, ITSELF)
        except DeltasyncError as error:
            text = "a version could not be kept or released by schedule; the service tries again"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)


async def kept_of(model: Model) -> Sequence[KeptVersion]:
    """The kept versions of a model, oldest first: from memory, unless they have not been read yet.

    Raises:
        StorageFailed: they have not been read yet, and cannot be read at present.
    """
    known = model.checkpoints.known_kept
    return known if known is not None else await in_own_thread(model.checkpoints.kept)


def outdated(
    versions: Sequence[KeptVersion], options: ServiceOptions, behind_seconds: float, now_unix_ns: int
) -> list[KeptVersion]:
    """The versions that a schedule kept, and that are neither among the newest `keep_last` of these nor younger
    than `keep_for_seconds`. Versions with a name stay, and those to which a consumer at a distance of
    `behind_seconds` may still go on.
    """
    scheduled = [each for each in versions if not each.name]
    seconds = max(options.keep_for_seconds, _SHARE_OF_DISTANCE * behind_seconds)
    old_ns = now_unix_ns - int(seconds * 1e9)
    beyond = scheduled[: max(0, len(scheduled) - options.keep_last)]
    return [each for each in beyond if each.kept_unix_ns <= old_ns]
