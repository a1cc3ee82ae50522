"""The brake: holding a consumer's replicas at what they have, and letting them go on."""

from deltasync.consumers.consumer import Consumer
from deltasync.consumers.pause import Pause
from deltasync.core.events import EventKind
from deltasync.service.service import Service


class Brake:
    """Pauses and resumes the consumers of a service. Used in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pull(self, name: str, reason: str, by: str) -> Consumer:
        """Hold a consumer's replicas at what they have, from now on, whatever is published; over restarts.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a reason that is too long, or is not printable.
            StorageFailed: it could not be written down, and holds until the service ends.
        """
        pause, registry = Pause.now(by, reason), self._service.registry
        consumer = registry.get(name)
        self._service.events.emit(EventKind.CONSUMER_PAUSED, reason, consumer=consumer.name, by=by)
        return await registry.pause(name, pause)

    async def release(self, name: str, by: str) -> Consumer:
        """Let a consumer go on, with all that its replicas lack.

        Raises:
            NotFound: there is none of that name.
            ServiceUnavailable: its model is still recovering.
            StorageFailed: it could not be written down; it is paused as before.
        """
        service = self._service
        async with service.changing:
            consumer = service.registry.get(name)
            service.check_recovered(consumer.model)
            if pause := consumer.pause:
                await service.registry.resume(name, self._prepare)
                self._accept(consumer.model)
                service.events.emit(EventKind.CONSUMER_RESUMED, f"it was {pause.words}", consumer=name, by=by)
            return consumer

    def _accept(self, model: str) -> None:
        """Take what was in quarantine for the history of its tables, once nobody is kept from it."""
        coordinator = self._service.coordinators.get(model)
        if coordinator and self._service.registry.quarantine_of(model) is None:
            coordinator.sealer.guard.accept()

    async def _prepare(self, consumer: Consumer) -> None:
        """Have what its replicas are fed from, as it is now: not a version that they were to be kept from."""
        if model := self._service.models.get(consumer.model):
            await self._service.views.begin(consumer, model)
            model.releases.forget()
