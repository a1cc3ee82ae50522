"""Operators' actions: delete rows, tables and models, pause and resume consumers, verify replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from numpy.typing import ArrayLike

from deltasync.base.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.logs import Progress
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import first_of
from deltasync.base.words import counted, listed
from deltasync.consumers.consumer import ITSELF, ComparisonStatus, Consumer, Pause, Replica, VerificationResult
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.rows import DeleteRequest
from deltasync.core.tables import TableSpec
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.model.model_store import note_removal, remove_model, remove_records
from deltasync.service.models import Models, ranks_of
from deltasync.views.registry import ViewRegistry


@dataclass(frozen=True)
class PendingDelete:
    """A request to delete rows of a model, and why it is pending."""

    model: str
    request: DeleteRequest
    reason: str


class Removals:
    """Removes rows, tables, models and replicas; `by` names the caller. Used in the event loop.

    A removal is durable when its method returns. The next start finishes a removal that the end of the service
    interrupted.
    """

    def __init__(
        self, models: Models, registry: ConsumerRegistry, events: Events, deletion_seconds: float
    ) -> None:
        """`deletion_seconds`: see `ServiceOptions`."""
        self._models, self._registry, self._events = models, registry, events
        self._deletion_seconds = deletion_seconds

    async def delete_rows(self, model: str, table: str, ids: ArrayLike, by: str = ITSELF) -> PendingDelete:
        """Ask the trainer of a model to delete rows."""
        self._models.model(model)  # First: an unknown model needs another error than one that no ranks publish.
        coordinator = ranks_of(self._models, model)

        def tables() -> list[TableSpec]:
            if self._models.coordinators.get(model) is not coordinator:
                raise ServiceUnavailable(f"model {model!r} was deleted or reloaded meanwhile; try again")
            return [each.spec for each in self._models.model(model).tables]

        request = await coordinator.deletes.ask(table, ids, tables, by)
        return PendingDelete(model, request, coordinator.waits_for(request))

    def pending_deletes(self) -> list[PendingDelete]:
        """The deletes of rows that trainers have not carried out yet, by model and number."""
        return [
            PendingDelete(name, request, coordinator.waits_for(request))
            for name, coordinator in sorted(self._models.coordinators.items())
            for request in coordinator.deletes.requests.values()
        ]

    async def forget_replica(self, consumer: str, replica: str, by: str) -> None:
        """Forget a replica that is away; no lag includes it any more.

        If it returns, it continues from its rows.
        """
        await self._registry.forget(consumer, replica)
        text = "an operator removed it"
        self._events.emit(EventKind.REPLICA_FORGOTTEN, text, consumer=consumer, replica=replica, by=by)

    async def delete_model(self, name: str, by: str) -> None:
        """Delete a model with its tables, its log and its pending requests."""
        # In a separate task, which continues if the caller disconnects.
        await asyncio.shield(asyncio.create_task(self._delete_model(name, by)))

    async def give_up_model(self, name: str, by: str) -> None:
        """Remove the log of a model that cannot be recovered without help. Its consumers stay, and so do its
        checkpoints until newer ones replace them. A trainer then publishes every row.
        """
        await asyncio.shield(asyncio.create_task(self._give_up_model(name, by)))

    async def delete_table(self, model: str, table: str, by: str) -> None:
        """Delete a table with its rows and its pending requests; replicas and views continue without it."""
        await asyncio.shield(asyncio.create_task(self._delete_table(model, table, by)))

    async def _delete_model(self, name: str, by: str) -> None:
        models = self._models
        async with models.changing:
            model, coordinator = models.model(name), models.coordinators.get(name)
            if coordinator and (ranks := coordinator.connected):
                raise Contradiction(f"model {name!r} is published by {_ranks(ranks)}: stop the trainer first")
            if consumers := [each.name for each in self._registry.of_model(name)]:
                raise Contradiction(f"model {name!r} has consumers ({listed(consumers)}): delete them first")
            await asyncio.wrap_future(note_removal(model.log, name))
            self._events.emit(EventKind.MODEL_DELETED, model=name, by=by)
            await models.end(model)
            removing = in_own_thread(remove_model, model.log, name, model.checkpoints)
            removal = models.begin_removal(name, removing)
        await removal  # Without the lock, because object storage may not answer.
        await models.owners.forget(name)

    async def _give_up_model(self, name: str, by: str) -> None:
        models = self._models
        async with models.changing:
            if (why := models.stuck.pop(name, None)) is None:
                models.model(name)
                raise Contradiction(f"model {name!r} is recovered: to remove it, use deltasync models delete")
            self._events.emit(EventKind.MODEL_DELETED, f"given up: {why}", model=name, by=by)
            coordinator = models.opened.pop(name, None)
            removal = models.begin_removal(name, self._give_up(name, why, coordinator))
        await removal  # Without the lock, which a cut of the model may wait for that is being sealed.

    async def _give_up(self, name: str, why: str, coordinator: CutCoordinator | None) -> None:
        models = self._models
        try:
            if coordinator:
                await coordinator.retire()
                await models.end(coordinator.model)
            await in_own_thread(remove_records, models.storage.logs.of(name), name)
            models.forget_recovery(name)
        except BaseException:
            models.stuck[name] = why
            raise

    async def _delete_table(self, name: str, table: str, by: str) -> None:
        async with self._models.changing:
            model, coordinator = self._models.model(name), ranks_of(self._models, name)
            specs = [each.spec for each in model.tables]
            if table not in {each.name for each in specs}:
                names = listed(each.name for each in specs) or "none"
                raise NotFound(f"model {name!r} has no table {table!r}", detail=f"; its tables: {names}")
            if maps := [each.name for each in specs if each.of == table]:
                raise Contradiction(f"table {table!r} has maps ({', '.join(maps)}): delete them first")
            if followers := [each.name for each in self._registry.of_model(name) if each.follows]:
                raise Contradiction(
                    f"table {table!r} may be in the kept version that consumers follow ({listed(followers)}): let "
                    "them follow the newest version first (deltasync consumers follow NAME --live)"
                )
            async with _between_cuts(coordinator, self._deletion_seconds):
                if ranks := coordinator.publishing(table):
                    by_ranks = f"{_ranks(ranks)} of run {coordinator.run_id}"
                    raise Contradiction(f"table {table!r} is published by {by_ranks}: stop the trainer first")
                spec = next(each for each in specs if each.name == table)
                consumers = self._registry.of_model(name)
                if paused := [each.name for each in consumers if each.pause and each.policy.follows(spec)]:
                    raise Contradiction(
                        f"table {table!r}: the replicas of paused consumers keep it ({listed(paused)}): resume "
                        "them first (deltasync consumers resume NAME)"
                    )
                coordinator.forget_table(table)
                await model.tables.remove(table)
            self._events.emit(EventKind.TABLE_DELETED, model=name, table=table, by=by)


@asynccontextmanager
async def _between_cuts(coordinator: CutCoordinator, seconds: float) -> AsyncIterator[None]:
    """Wait for `CutCoordinator.between_cuts`, with an error after a while: the caller blocks other changes."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(seconds):
                await stack.enter_async_context(coordinator.between_cuts())
        except TimeoutError as error:
            model = coordinator.model
            reason = model.failure or "one is still being applied; try again"
            raise ServiceUnavailable(f"model {model.name!r} is busy with cuts: {reason}") from error
        yield


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class ConsumerPauses:
    """Pauses and resumes consumers. Used in the event loop."""

    def __init__(self, models: Models, registry: ConsumerRegistry, views: ViewRegistry, events: Events) -> None:
        self._models = models
        self._registry = registry
        self._views = views
        self._events = events

    async def pause(self, name: str, reason: str, by: str) -> Consumer:
        """Pause a consumer: its replicas keep their current rows, also after a restart of the service."""
        pause, consumer = Pause.now(by, reason), self._registry.get(name)
        self._events.emit(EventKind.CONSUMER_PAUSED, reason, consumer=consumer.name, by=by)
        return await self._registry.pause(name, pause)

    async def resume(self, name: str, by: str) -> Consumer:
        """Resume a consumer: its replicas get all rows that they lack."""
        async with self._models.changing:
            consumer = self._registry.get(name)
            self._models.check_recovered(consumer.model)
            if pause := consumer.pause:
                await self._registry.resume(name, self._prepare)
                self._accept(consumer.model)
                self._events.emit(EventKind.CONSUMER_RESUMED, f"it was {pause.description}", consumer=name, by=by)
            return consumer

    def _accept(self, model: str) -> None:
        """Accept the norms of a quarantine once no consumer is paused for it."""
        coordinator = self._models.coordinators.get(model)
        if coordinator and self._registry.quarantine_of(model) is None:
            coordinator.guard.accept()

    async def _prepare(self, consumer: Consumer) -> None:
        """Rebuild the feed of a consumer as of now, without the versions of the pause."""
        if model := self._models.get(consumer.model):
            await self._views.follow(consumer, model, resumes=True)
            model.releases.forget()


# Interval between checks that the replica is still connected.
_LOOK_SECONDS = 1.0


async def verify_replica(
    registry: ConsumerRegistry, events: Events, draining: asyncio.Event, consumer: str, replica: str, by: str
) -> VerificationResult:
    """Let a replica read all its rows again and compare them with the rows sent to it."""
    result = await _answer(registry, draining, _connected(registry, consumer, replica), consumer)
    events.emit(EventKind.REPLICA_VERIFIED, _in_words(result), consumer=consumer, replica=replica, by=by)
    return result


def _connected(registry: ConsumerRegistry, consumer: str, name: str) -> Replica:
    replica = registry.get(consumer).replicas.get(name)
    if replica is None:
        raise NotFound(f"consumer {consumer!r} has no replica {name!r}")
    if replica.stream is None:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} is away: start it first")
    if not replica.applied.number:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} has no rows yet: try again later")
    return replica


async def _answer(
    registry: ConsumerRegistry, draining: asyncio.Event, replica: Replica, consumer: str
) -> VerificationResult:
    verification = replica.verification
    number, what = verification.ask(), f"replica {replica.name!r}: reading its rows again"
    progress: Progress | None = None
    while (result := verification.answer_to(number)) is None:
        read, rows = verification.rows
        if rows:
            progress = progress or Progress(what, rows)
            progress.at(read)
        await first_of(verification.signal.changed(), draining.wait(), seconds=_LOOK_SECONDS)
        if draining.is_set():
            raise ServiceUnavailable("the service is shutting down; try again")
        _check_there(registry.get(consumer), replica)
    return result


def _check_there(consumer: Consumer, replica: Replica) -> None:
    if consumer.replicas.get(replica.name) is not replica or replica.stream is None:
        raise ServiceUnavailable(f"replica {replica.name!r} disconnected while it read its rows; try again")


def _in_words(result: VerificationResult) -> str:
    others = [each for each in result.tables if each.status is not ComparisonStatus.EQUAL]
    if not others:
        return f"all rows of {counted(len(result.tables), 'table')} equal those sent"
    return "; ".join(f"table {each.table}: {each.reason}" for each in others)
