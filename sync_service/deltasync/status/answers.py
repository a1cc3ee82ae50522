"""Answers to what operators ask: the event loop only notes what they are of, and goes on."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace

from deltasync.consumers.consumer import Consumer
from deltasync.core.events import EventCounts
from deltasync.core.limits import Limits
from deltasync.feeds.standing import Standing, nothing_published
from deltasync.service.service import Service
from deltasync.status.lag import ConsumerLag
from deltasync.status.metrics import Figures, ModelFigures, exposition
from deltasync.status.overview import unowned_models
from deltasync.status.process_metrics import ProcessFigures
from deltasync.status.report import report
from deltasync.status.trainers import rank_state

# For so long all who ask are given the same metrics: at most, they are computed ten times a second.
_SHARED_SECONDS = 0.1
_NOTHING_NEW = "what there is goes on being served, and nothing new can be written"


class Answers:
    """Answers what operators ask of a service. Used in the event loop.

    An answer is computed in one of the loop's threads, however long it takes, and waits for no cut and no disk. At
    most two threads are used at once, one for metrics and one for lags: those who write checkpoints find others.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lags = asyncio.Lock()
        self._exposition: asyncio.Task[bytes] | None = None
        self._begun = 0.0

    async def lag(self, name: str) -> ConsumerLag:
        """How far a consumer is behind.

        Raises:
            NotFound: there is none of that name.
            NotOwner: another process has its model.
            ServiceUnavailable: its model is still recovering.
        """
        consumer = self._service.consumer(name)
        self._service.check_recovered(consumer.model)
        async with self._lags:
            standing = self._standing(consumer)
            return await asyncio.to_thread(report, consumer.copy(), standing, time.time_ns())

    async def lags(self, models: Collection[str] | None = None) -> list[ConsumerLag]:
        """How far all consumers are behind, or those of some models, by name; not those of recovering ones."""
        async with self._lags:
            found, now_ns = await self._standings(models), time.time_ns()
            return await asyncio.to_thread(lambda: [report(*each, now_ns) for each in found])

    async def _standings(self, models: Collection[str] | None) -> list[tuple[Consumer, Standing]]:
        """Consumers and where their feeds stand, one after the other: in between, others have the event loop."""
        service, found = self._service, list[tuple[Consumer, Standing]]()
        for _, each in sorted(service.registry.consumers.items()):
            if each.model not in service.recovering and (models is None or each.model in models):
                found.append((each.copy(), self._standing(each)))
                await asyncio.sleep(0)
        return found

    async def metrics(self) -> bytes:
        """The metrics in Prometheus' text format. Those who ask at nearly the same time share them."""
        now = time.monotonic()
        if self._exposition is None or (self._exposition.done() and now >= self._begun + _SHARED_SECONDS):
            computed = asyncio.to_thread(exposition, self._figures(), time.time_ns())
            self._exposition, self._begun = asyncio.create_task(computed), now
        return await asyncio.shield(self._exposition)

    def _figures(self) -> Figures:
        service = self._service
        consumers = [
            (each.copy(), self._standing(each))
            for each in service.registry.consumers.values()
            if each.model not in service.recovering
        ]
        return Figures(
            consumers=consumers,
            models=[
                ModelFigures(
                    name=model.name,
                    newest_version=model.seals.newest_version,
                    published_rows=service.coordinators[model.name].sealer.rows,
                    published_bytes=service.coordinators[model.name].sealer.bytes,
                    tables=[table.spec for table in model.tables],
                    failed=bool(model.failure or model.failed),
                    event_time_unix_ns=model.event_time_of(model.seals.newest_version),
                    parts=model.recent.durations,
                    ranks=[rank_state(each) for each in service.coordinators[model.name].sessions.values()],
                )
                for model in service.models.values()
            ],
            reloading=[name for name in service.reloading.reasons if name not in service.models],
            events=EventCounts(service.event_counts),
            log_bytes=sum(log.used_bytes() for log in service.logs.each()),
            commits=service.logs.commits,
            volumes=service.volumes.all,
            certificates_expire=service.certificates_expire,
            limits=self._limits(),
            process=self._process(),
        )

    def _process(self) -> ProcessFigures:
        service = self._service
        owners, models = service.owners, service.models.items()
        return ProcessFigures(
            confirmed=owners.confirmed,
            alive=len(owners.processes()),
            unowned=len(unowned_models(service)),
            made_unix_ns={name: each.checkpointed.made_unix_ns for name, each in models if each.checkpointed},
            unsaved_bytes={name: each.bytes_since_checkpoint for name, each in models},
            failures=service.checkpoints.failures,
            probe=service.probe,
            risks=len(service.logs.accepted_risks),
        )

    def _limits(self) -> Limits:
        limits = self._service.limits.copy()
        limits.taken["log_queue_bytes"] = sum(log.queue.bytes for log in self._service.logs.each())
        limits.taken["models"] = self._service.unpublished.models_in_all
        limits.taken["consumers"] = len(self._service.registry.consumers)
        return limits

    def _standing(self, consumer: Consumer) -> Standing:
        feed, service = self._service.feed(consumer), self._service
        found = feed.standing(consumer.policy) if feed else nothing_published(consumer.model, service.models)
        if trouble := service.volumes.trouble:  # Whatever they hold, nothing newer can come.
            found = replace(found, failure=found.failure or f"{_NOTHING_NEW}: {trouble}")
        coordinator = service.coordinators.get(consumer.model)
        refusal = coordinator.sealer.refusal if coordinator else None
        if refusal:
            found = replace(found, refused=refusal.reason)
        return replace(
            found,
            trouble=found.trouble or service.configuration.shortcomings.get(consumer.name, ""),
            unsaved=service.checkpoints.failure(consumer.model),
        )
