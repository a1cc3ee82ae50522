"""What operators do: pause and resume consumers, remove tables and models, have replicas verified."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from deltasync.base.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.base.events import EventKind
from deltasync.base.progress import Progress
from deltasync.base.signals import first_of
from deltasync.base.words import listed
from deltasync.consumers.consumer import Consumer, Pause, Replica, Verified
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.verified import VerifiedStatus
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.model.model_store import note_removal, remove_model
from deltasync.service.service import Service

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


# So often it is seen whether the replica is still there.
_LOOK_SECONDS = 1.0


async def verify_replica(service: Service, consumer: str, replica: str, by: str) -> Verified:
    """Have a replica read all its rows again, and compare what it finds with what it was sent.

    Raises:
        NotFound: there is no such consumer, or no such replica of it.
        Contradiction: it is away, or holds nothing yet.
        ServiceUnavailable: it has gone meanwhile, or the service ends.
    """
    found = await _answer(service, _connected(service.registry, consumer, replica), consumer)
    service.events.emit(EventKind.REPLICA_VERIFIED, _in_words(found), consumer=consumer, replica=replica, by=by)
    return found


def _connected(registry: ConsumerRegistry, consumer: str, name: str) -> Replica:
    replica = registry.get(consumer).replicas.get(name)
    if replica is None:
        raise NotFound(f"consumer {consumer!r} has no replica {name!r}")
    if replica.stream is None:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} is away: it can show nothing")
    if not replica.applied.number:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} holds nothing yet")
    return replica


async def _answer(service: Service, replica: Replica, consumer: str) -> Verified:
    verification = replica.verification
    number, what = verification.ask(), f"replica {replica.name!r}: reading its rows again"
    progress: Progress | None = None
    while (found := verification.answer_to(number)) is None:
        read, rows = verification.rows
        if rows:
            progress = progress or Progress(what, rows)
            progress.at(read)
        await first_of(verification.signal.changed(), service.draining.wait(), seconds=_LOOK_SECONDS)
        if service.draining.is_set():
            raise ServiceUnavailable("the service is shutting down; ask again")
        _check_there(service.registry.get(consumer), replica)
    return found


def _check_there(consumer: Consumer, replica: Replica) -> None:
    if consumer.replicas.get(replica.name) is not replica or replica.stream is None:
        raise ServiceUnavailable(f"replica {replica.name!r} has gone before it had read all its rows; ask again")


def _in_words(found: Verified) -> str:
    others = [each for each in found.tables if each.status is not VerifiedStatus.EQUAL]
    if not others:
        return f"all rows of {len(found.tables)} tables were read again: they are as they were sent"
    return "; ".join(f"table {each.table}: {each.reason}" for each in others)
