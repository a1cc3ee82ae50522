"""Models that come to this process, and go from it, while it runs: their log is one that others can go on with."""

import asyncio
import shutil
from collections.abc import Callable

from deltasync.consumers.records import recorded_consumers
from deltasync.core.errors import NotOwner
from deltasync.publish.coordinator import CutCoordinator
from deltasync.service.recovery import models_to_recover, recover_model
from deltasync.service.service import Service
from deltasync.storage.log_store import LogStore


class Moves:
    """Takes models, and gives them up. Used in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._logs = dict[str, LogStore]()

    async def take(self, name: str, log: LogStore) -> None:
        """Have what a log has of a model, and of its consumers, once its files are there. It may have nothing yet.

        Raises:
            StorageFailed: a file is damaged or missing, or a record is; or the log could not be written.
        """
        service, self._logs[name] = self._service, log
        recorded = await asyncio.to_thread(models_to_recover, log, service.models_directory)
        service.registry.have(await asyncio.to_thread(recorded_consumers, log), log)
        if record := recorded.get(name):
            service.recovering[name] = record
            await recover_model(service, name, record, patient=True)

    async def give_up(self, name: str, refusal: Callable[[], NotOwner], *, written: bool) -> None:
        """Have a model no more: its ranks and replicas are told so as they come to it, or at once.

        Args:
            name: the model.
            refusal: what they are told.
            written: whether what is under way is to be written down: the log takes it still.
        """
        service = self._service
        async with service.changing:
            service.recovering.pop(name, None)
            coordinator = service.coordinators.pop(name, None)
            service.models.pop(name, None)
            if log := self._logs.pop(name, None):
                service.registry.give_up(name, log, written=written)
            for each in filter(None, (coordinator, service.unpublished.give_up(name))):
                await self._give_up(each, refusal)
            await asyncio.to_thread(shutil.rmtree, service.directory(name), ignore_errors=True)

    async def _give_up(self, coordinator: CutCoordinator, refusal: Callable[[], NotOwner]) -> None:
        model = coordinator.model
        await coordinator.retire(refusal)
        await self._service.views.give_up(model)
        await model.stop()
        await asyncio.to_thread(model.store.retire)
        self._service.limits.taken["bytes_in_all"] -= model.store.table_bytes
