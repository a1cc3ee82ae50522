"""Lags and metrics on request, and a periodic overview of the service."""

import asyncio
import contextlib
import json
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace

from deltasync.access.rights import Access
from deltasync.base.clock import LONG_BOUNDS
from deltasync.base.events import EventCounts, EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import Signal, first_of
from deltasync.consumers.consumer import Consumer
from deltasync.model.feed import FeedStatus, nothing_published
from deltasync.service.options import ServiceOptions
from deltasync.status.lag import report
from deltasync.status.metrics import Figures, exposition
from deltasync.status.overview import (
    consumer_statuses,
    kept_statuses,
    last_cuts,
    model_statuses,
    other_processes,
    rank_statuses,
    refusal_of,
    table_statuses,
    this_process,
    version_statuses,
    volume_statuses,
)
from deltasync.status.process import CUTS, EVENTS, KEPT, Sources
from deltasync.status.records import ConsumerStatus, Lag, ModelStatus, Overview

_NOTHING_NEW = "the service still serves its stored rows, but a volume refuses new ones"


class Answers:
    """Computes lags and metrics of a service. Used in the event loop.

    It computes in other threads, at most one for metrics and one for lags. It never waits for a cut or a disk.
    """

    def __init__(self, sources: Sources, metrics_seconds: float = ServiceOptions.metrics_seconds) -> None:
        """`metrics_seconds`: see `ServiceOptions`."""
        self._sources, self._metrics_seconds = sources, metrics_seconds
        self._lags = asyncio.Lock()
        self._exposition: asyncio.Task[bytes] | None = None
        self._begun = 0.0

    async def consumer(self, name: str) -> ConsumerStatus:
        """The status of a consumer."""
        consumer = self._sources.consumers.get(name)
        self._sources.models.check_recovered(consumer.model)
        async with self._lags:
            status = self._status(consumer)
            return await asyncio.to_thread(report, consumer.copy(), status, time.time_ns())

    async def changed(self, name: str) -> ConsumerStatus:
        """The status of a consumer after a change, also while its model is recovering."""
        consumer = self._sources.consumers.get(name)
        if consumer.model not in self._sources.models.recovering:
            return await self.consumer(name)
        every = consumer_statuses(self._sources.models, self._sources.registry, [])
        return next(each for each in every if each.consumer == name)

    async def consumers(self, models: Collection[str] | None = None) -> list[ConsumerStatus]:
        """The status of all consumers, or those of some models, by name. Recovering models are left out."""
        async with self._lags:
            statuses, now_ns = await self._statuses(models), time.time_ns()
            return await asyncio.to_thread(lambda: [report(*each, now_ns) for each in statuses])

    async def listed(self) -> list[ConsumerStatus]:
        """The consumers of this process as in a list, with those of recovering models."""
        known = await self.consumers()
        return consumer_statuses(self._sources.models, self._sources.registry, known)

    def models(self) -> list[ModelStatus]:
        """The models of this process, and those that no process owns."""
        return model_statuses(self._sources.models, self._sources.checkpoints, self._sources.versions)

    async def _statuses(self, models: Collection[str] | None) -> list[tuple[Consumer, FeedStatus]]:
        """Copies of the consumers with their statuses. Yields to the event loop after each one."""
        recovering, statuses = self._sources.models.recovering, list[tuple[Consumer, FeedStatus]]()
        for _, each in sorted(self._sources.registry.consumers.items()):
            if each.model not in recovering and (models is None or each.model in models):
                statuses.append((each.copy(), self._status(each)))
                await asyncio.sleep(0)
        return statuses

    async def metrics(self) -> bytes:
        """The metrics as Prometheus text."""
        now = time.monotonic()
        if self._exposition is None or (self._exposition.done() and now >= self._begun + self._metrics_seconds):
            computed = asyncio.to_thread(exposition, self._figures(), time.time_ns())
            self._exposition, self._begun = asyncio.create_task(computed), now
        return await asyncio.shield(self._exposition)

    def _figures(self) -> Figures:
        sources, models, logs = self._sources, self._sources.models, self._sources.models.storage.logs
        return Figures(
            consumers=[
                (each.copy(), self._status(each))
                for each in sources.registry.consumers.values()
                if each.model not in models.recovering
            ],
            models=self.models(),
            tables=[each for name in models for each in table_statuses(models, name)],
            process=this_process(sources, [], None),
            stages={name: each.recent.durations for name, each in models.items()},
            volumes=sources.volumes.all,
            events=EventCounts(sources.event_counts),
            limits=sources.limits.copy(),
            commits=logs.commits,
            log_bytes=sum(log.used_bytes() for log in logs.each()),
            alive=len(models.owners.processes()),
            risks=len(logs.accepted_risks),
            checkpoint_failures=sources.checkpoints.failures,
            certificates_expire=sources.process.certificates_expire,
        )

    def _status(self, consumer: Consumer) -> FeedStatus:
        sources, models = self._sources, self._sources.models
        feed = sources.consumers.feed(consumer)
        status = feed.status(consumer.policy) if feed else nothing_published(consumer.model, models)
        if trouble := sources.volumes.trouble:  # The replicas may be in sync, but they get no updates.
            status = replace(status, failure=status.failure or f"{_NOTHING_NEW}: {trouble}")
        if refusal := refusal_of(models, consumer.model):
            status = replace(status, refused=refusal.reason)
        return replace(
            status,
            trouble=status.trouble or sources.consumers.shortcomings.get(consumer.name, ""),
            unsaved=sources.checkpoints.failure(consumer.model),
        )


# The pause between two samples, with and without watchers: in seconds, and as a multiple of a sample's duration.
_WATCHED_SECONDS, _UNWATCHED_SECONDS = 1.0, 5.0


_WATCHED_TIMES, _UNWATCHED_TIMES = 4, 20


class Sampler:
    """Samples a service's overview periodically. Used in the event loop."""

    def __init__(
        self,
        sources: Sources,
        events: Events,
        access: Access | None = None,
        metrics_seconds: float = ServiceOptions.metrics_seconds,
    ) -> None:
        self.sources, self.histories = sources, LagHistories()
        self.answers = Answers(sources, metrics_seconds)
        self._events, self._access = events, access
        self._looking = asyncio.Lock()
        self._next: asyncio.Task[Overview] | None = None
        self._signal, self._watched = Signal(), Signal()
        self._watchers, self._bytes = 0, b""

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await self._sample()
            except Exception as error:  # noqa: BLE001  # a failed sample must not end the service
                self._events.emit(EventKind.FAILED, "the overview failed and will be retried", error)
            await self._pause(time.monotonic() - begun)

    async def _sample(self) -> None:
        overview = await self.look()
        self.histories.add(overview.unix_ms, overview.consumers)
        self._bytes = await asyncio.to_thread(_written, overview) if self._watchers else b""
        self._signal.wake()

    async def look(self) -> Overview:
        """Compute a new overview. Callers that arrive during a computation share the next one."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_in_turn())
        return await asyncio.shield(self._next)

    async def _look_in_turn(self) -> Overview:
        async with self._looking:
            self._next = None  # Later callers need a newer overview.
            return await self._look()

    async def _look(self) -> Overview:
        sources, models = self.sources, self.sources.models
        consumers = await self.answers.listed()
        cuts = await asyncio.to_thread(version_statuses, last_cuts(models.values(), CUTS))
        volumes = await in_own_thread(volume_statuses, sources.volumes.all)
        return Overview(
            unix_ms=time.time_ns() // 10**6,
            freshness_bounds=list(LONG_BOUNDS),
            processes=[this_process(sources, volumes, self._access)],
            missing=other_processes(models.owners),
            models=self.answers.models(),
            trainers=rank_statuses(models.coordinators),
            consumers=consumers,
            cuts=cuts,
            kept=kept_statuses(sources.versions, KEPT),
            events=sources.recent_events.newest(EVENTS),
        )

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield each new overview as JSON until the service shuts down."""
        with self._watching():
            draining = self.sources.process.draining
            while not draining.is_set():
                await first_of(self._signal.changed(), draining.wait(), seconds=None)
                if self._bytes:
                    yield self._bytes

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._watchers += 1
        self._watched.wake()
        try:
            yield
        finally:
            self._watchers -= 1

    async def _pause(self, took: float) -> None:
        await asyncio.sleep(max(_WATCHED_TIMES * took, _WATCHED_SECONDS if self._watchers else 0.0))
        if not self._watchers:
            rest = max(_UNWATCHED_SECONDS, _UNWATCHED_TIMES * took) - _WATCHED_TIMES * took
            await first_of(self._watched.changed(), seconds=rest)


def _written(overview: Overview) -> bytes:
    return json.dumps(asdict(overview), separators=(",", ":")).encode()


KEPT_SAMPLES = 600
_NUMBERS = [each.name for each in fields(Lag)]
_UNKNOWN = -1.0


@dataclass(frozen=True)
class LagHistory:
    """Samples of a consumer's lag, oldest first.

    `unix_ms` has their times, milliseconds since 1970, and `lag` each number of the lag. Unknown numbers are null.
    """

    consumer: str
    unix_ms: list[int]
    state: list[str]
    lag: dict[str, list[float | None]]


class LagHistories:
    """The lag histories of all consumers. Used in the event loop."""

    def __init__(self) -> None:
        self._samples = dict[str, deque[tuple[int, str, "array[float]"]]]()

    def add(self, unix_ms: int, consumers: Iterable[ConsumerStatus]) -> None:
        """Add a sample of each consumer, and drop the histories of deleted consumers."""
        before, self._samples = self._samples, {}
        for each in consumers:
            samples = self._samples[each.consumer] = before.get(each.consumer) or deque(maxlen=KEPT_SAMPLES)
            values = (getattr(each.lag, name, None) for name in _NUMBERS)
            numbers = array("d", (_UNKNOWN if value is None else value for value in values))
            samples.append((unix_ms, each.state, numbers))

    def of(self, consumer: str) -> LagHistory:
        """The history of a consumer, possibly without samples."""
        samples = list(self._samples.get(consumer, ()))
        lag = {
            name: [None if (value := numbers[at]) == _UNKNOWN else value for _, _, numbers in samples]
            for at, name in enumerate(_NUMBERS)
        }
        return LagHistory(consumer, [each[0] for each in samples], [each[1] for each in samples], lag)
