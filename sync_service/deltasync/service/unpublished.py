"""Models of which nothing is published: ranks have opened them, and nobody else is told that they are there."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltasync.core.events import EventKind
from deltasync.publish.coordinator import CutCoordinator
from deltasync.storage.removal import finish_removal, remove_records

if TYPE_CHECKING:
    from deltasync.service.service import Service


class UnpublishedModels:
    """Those of a service, in memory while there is a stream of a rank that could publish them.

    One becomes a model of the service with its first sealed cut; one that nobody publishes leaves nothing behind.
    Used in the event loop.
    """

    def __init__(self, service: "Service", tasks: asyncio.TaskGroup) -> None:
        self._service = service
        self._tasks = tasks
        self._coordinators = dict[str, CutCoordinator]()
        self._removals = dict[str, asyncio.Task[None]]()

    def __iter__(self) -> Iterator[CutCoordinator]:
        """Where their ranks publish."""
        return iter(list(self._coordinators.values()))

    @property
    def models_in_all(self) -> int:
        """How many models there are, published, recovering or only opened."""
        return len(self._service.models) + len(self._service.recovering) + len(self._coordinators)

    async def open(self, name: str) -> CutCoordinator:
        """Where the ranks of a model of that name publish, for one stream more; see `leave`. While `changing`.

        Raises:
            LimitReached: there would be too many models.
            StorageFailed: another of that name was deleted, and what is left of it cannot be removed.
        """
        if removal := self._removals.get(name):
            await asyncio.wait([removal])
        if name not in self._coordinators:
            service = self._service
            service.limits.check("models", self.models_in_all + 1)
            model = service.make_model(name)
            await asyncio.to_thread(finish_removal, model.log, name, model.checkpoints)
            coordinator = self._coordinators[name] = service.coordinator(model)
            coordinator.whenever_sealed = lambda: self._publish(coordinator)
        self._coordinators[name].streams += 1
        return self._coordinators[name]

    def give_up(self, name: str) -> CutCoordinator | None:
        """Have a model no more, if it is one of these: where its ranks publish."""
        return self._coordinators.pop(name, None)

    def leave(self, coordinator: CutCoordinator) -> None:
        """Note that one of the streams of a model has ended."""
        coordinator.streams -= 1
        self._forget_if_left(coordinator)

    async def look_after(self) -> None:
        """Have what is sealed, and could not be had; forget what was left as a cut was being sealed."""
        for coordinator in self:
            if coordinator.model.seals.newest:
                await self._publish(coordinator)
            else:
                self._forget_if_left(coordinator)

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        await asyncio.gather(*(each.idle() for each in self))

    async def drain(self) -> None:
        """Finish what is being sealed; of the others nothing is left."""
        for coordinator in self:
            await coordinator.drain()
            coordinator.streams = 0
            self._forget_if_left(coordinator)
        await asyncio.gather(*self._removals.values())
        for coordinator in self:  # Sealed, but not had: the next start has them.
            await coordinator.model.stop()

    async def _publish(self, coordinator: CutCoordinator) -> None:
        """Have a model of which the first version is sealed, unless it is there already."""
        service, model = self._service, coordinator.model
        if self._coordinators.get(model.name) is not coordinator:
            return
        try:
            async with service.changing:
                # Before it is there: replicas of a consumer with a policy would be sent its tables without that.
                for consumer in service.registry.of_model(model.name):
                    await service.have_view(consumer, model)
                if self._coordinators.get(model.name) is coordinator:
                    del self._coordinators[model.name]
                    service.add(coordinator)
        except Exception as error:  # noqa: BLE001  # the cut is sealed, whatever becomes of its consumers
            text = "its consumers cannot be given it yet, which is tried again"
            service.events.emit(EventKind.FAILED, text, error, model=model.name)

    def _forget_if_left(self, coordinator: CutCoordinator) -> None:
        name, model = coordinator.model.name, coordinator.model
        if self._coordinators.get(name) is not coordinator or coordinator.streams:
            return
        coordinator.abandon("all ranks of its run have gone")
        if coordinator.open_cut is None and model.seals.newest is None:
            del self._coordinators[name]
            if model.store.written:
                self._removals[name] = self._tasks.create_task(self._remove(coordinator))

    async def _remove(self, coordinator: CutCoordinator) -> None:
        """Remove what a cut that was given up has left; what cannot be removed now is at the next start."""
        service, model = self._service, coordinator.model
        try:
            await service.end_model(coordinator)
            # Its checkpoints, if there are any, are of one that this log has lost: they may be all that is left.
            await asyncio.to_thread(remove_records, model.log, model.name)
            if service.hosting and not service.registry.of_model(model.name):
                await service.hosting.forget(model.name)
        except Exception as error:  # noqa: BLE001  # one model's trouble is its own
            text = "what is left of a cut that was given up is removed at the next start"
            service.events.emit(EventKind.FAILED, text, error, model=model.name)
        finally:
            del self._removals[model.name]
