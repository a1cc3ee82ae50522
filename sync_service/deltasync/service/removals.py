"""What operators remove for good: replicas that do not come back, tables and models that nobody publishes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from deltasync.core.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.core.events import EventKind
from deltasync.core.words import listed
from deltasync.publish.coordinator import CutCoordinator
from deltasync.service.service import Service
from deltasync.storage.removal import note_removal, remove_model

# A cut that is being applied is waited for no longer.
_LONGEST_SECONDS = 10.0


class Removals:
    """Removes what a service has: durable once a method returns, and told, with `by` whom it was asked for.
    Used in the event loop. What is half done when the service ends is finished at the next start.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def forget_replica(self, consumer: str, replica: str, by: str) -> None:
        """Forget a replica that is away: no lag counts it. If it comes back, it goes on from what it holds.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is connected.
        """
        await self._service.registry.forget(consumer, replica)
        text = "an operator has said that it does not come back"
        self._service.events.emit(EventKind.REPLICA_FORGOTTEN, text, consumer=consumer, replica=replica, by=by)

    async def delete_model(self, name: str, by: str) -> None:
        """Delete a model, with its tables, its log and all that is asked of it.

        Raises:
            NotFound: there is none of that name.
            ServiceUnavailable: it is still recovering.
            Contradiction: a rank is connected, or a consumer follows it.
        """
        # In a task of its own: whoever asks may leave, and must not stop it half way.
        await asyncio.shield(asyncio.create_task(self._delete_model(name, by)))

    async def delete_table(self, model: str, table: str, by: str) -> None:
        """Delete a table, with its rows and what is asked of it; replicas and views go on without it.

        Raises:
            NotFound: there is no such model, or no such table in it.
            ServiceUnavailable: the model is recovering, or its cuts cannot be applied.
            Contradiction: a connected rank publishes it, or another table belongs to it.
        """
        await asyncio.shield(asyncio.create_task(self._delete_table(model, table, by)))

    async def _delete_model(self, name: str, by: str) -> None:
        service = self._service
        async with service.changing:
            model, coordinator = service.model(name), service.coordinators[name]
            if ranks := coordinator.connected:
                raise Contradiction(f"model {name!r} is published by {_ranks(ranks)}: stop the trainer first")
            if consumers := [each.name for each in service.registry.of_model(name)]:
                raise Contradiction(f"consumers follow model {name!r}: {listed(consumers)}: delete them first")
            await asyncio.wrap_future(note_removal(model.log, name))
            service.events.emit(EventKind.MODEL_DELETED, model=name, by=by)
            await service.end_model(coordinator)
            await asyncio.to_thread(remove_model, model.log, name, model.checkpoints)
        if service.hosting:
            await service.hosting.forget(name)

    async def _delete_table(self, name: str, table: str, by: str) -> None:
        service = self._service
        async with service.changing:
            model, coordinator = service.model(name), service.coordinators[name]
            specs = [each.spec for each in model.tables]
            if table not in {each.name for each in specs}:
                names = listed(each.name for each in specs) or "none"
                raise NotFound(f"model {name!r} has no table {table!r}", detail=f"; its tables: {names}")
            if maps := [each.name for each in specs if each.of == table]:
                raise Contradiction(f"{', '.join(maps)} belong to table {table!r}: delete them first")
            async with _between_cuts(coordinator):
                if ranks := coordinator.publishing(table):
                    said = f"table {table!r} is published by {_ranks(ranks)} of run {coordinator.run_id}"
                    raise Contradiction(f"{said}: stop the trainer first")
                coordinator.forget_table(table)
                before = model.table_bytes
                await model.remove_table(table)
                service.limits.taken["bytes_in_all"] -= before - model.table_bytes
            service.events.emit(EventKind.TABLE_DELETED, model=name, table=table, by=by)


@asynccontextmanager
async def _between_cuts(coordinator: CutCoordinator) -> AsyncIterator[None]:
    """As the coordinator's, unless a cut cannot be applied, or takes long: nobody else is to wait for that."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_LONGEST_SECONDS):
                await stack.enter_async_context(coordinator.sealer.between_cuts())
        except TimeoutError as error:
            model = coordinator.model
            reason = model.failure or "one takes long; try again"
            raise ServiceUnavailable(f"cuts of model {model.name!r} cannot be applied now: {reason}") from error
        yield


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
