"""Answers to what operators ask: looks at everything now and then, and keeps the last minutes of lag."""

import asyncio
import contextlib
import json
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from deltasync.access.limits import Limits
from deltasync.base.durations import LONG_BOUNDS
from deltasync.base.events import EventCounts, EventKind
from deltasync.base.signals import Signal, first_of
from deltasync.consumers.consumer import Consumer
from deltasync.model.feed import Standing, nothing_published
from deltasync.service.service import Service
from deltasync.status.lag import ConsumerLag
from deltasync.status.metrics import Figures, ModelFigures, ProcessFigures, exposition
from deltasync.status.overview import (
    CUTS,
    EVENTS,
    ConsumerOverview,
    Overview,
    consumer_overviews,
    model_overviews,
    other_processes,
    process_overview,
    unowned_models,
    volume_overviews,
)
from deltasync.status.report import report
from deltasync.status.trainers import last_cuts, rank_state, trainer_lines, version_lines

KEPT_SAMPLES = 600


@dataclass(frozen=True)
class LagHistory:
    """A consumer's lag over time, the oldest sample first: `unix_ms` says when each was taken, milliseconds since
    1970. What was not known is null.
    """

    consumer: str
    unix_ms: list[int]
    state: list[str]
    versions: list[int]
    rows: list[int]
    bytes: list[int]
    seconds: list[float]
    unsent_norm: list[float | None]
    unsent_share: list[float | None]
    released_bytes: list[int]


_COLUMNS = ("versions", "rows", "bytes", "seconds", "unsent_norm", "unsent_share", "released_bytes")
_UNKNOWN = -1.0


class LagHistories:
    """The histories of all consumers. Used in the event loop."""

    def __init__(self) -> None:
        self._samples = dict[str, deque[tuple[int, str, "array[float]"]]]()

    def add(self, unix_ms: int, consumers: Iterable[ConsumerOverview]) -> None:
        """Have one more sample, of the consumers that there are now."""
        before, self._samples = self._samples, {}
        for each in consumers:
            kept = self._samples[each.consumer] = before.get(each.consumer) or deque(maxlen=KEPT_SAMPLES)
            known = (getattr(each, name) for name in _COLUMNS)
            numbers = array("d", (_UNKNOWN if value is None else value for value in known))
            kept.append((unix_ms, each.state, numbers))

    def of(self, consumer: str) -> LagHistory:
        """That of a consumer; without a sample if there is none yet."""
        samples = list(self._samples.get(consumer, ()))
        whole = {
            name: [None if (value := numbers[at]) == _UNKNOWN else value for _, _, numbers in samples]
            for at, name in enumerate(_COLUMNS)
        }
        for name in ("versions", "rows", "bytes", "released_bytes"):
            whole[name] = [None if value is None else int(value) for value in whole[name]]
        times, states = [each[0] for each in samples], [each[1] for each in samples]
        return LagHistory(consumer=consumer, unix_ms=times, state=states, **whole)  # type: ignore[arg-type]


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


# Seconds between two looks, while somebody watches and while nobody does; and times what one takes, at least.
_WATCHED_SECONDS, _UNWATCHED_SECONDS = 1.0, 5.0
_WATCHED_TIMES, _UNWATCHED_TIMES = 4, 20


class Sampler:
    """Samples of a service. Used in the event loop. `of_access` finds what is wrong with who may do what.

    Attributes:
        histories: of the consumers' lag.
        answers: what it asks how far they are behind.
    """

    def __init__(self, service: Service, answers: Answers, of_access: Callable[[], Iterable[str]] = tuple) -> None:
        self.histories = LagHistories()
        self._service, self.answers, self._of_access = service, answers, of_access
        self._looking = asyncio.Lock()
        self._next: asyncio.Task[Overview] | None = None
        self._signal, self._wanted = Signal(), Signal()
        self._watchers, self._bytes = 0, b""

    async def run(self) -> None:
        """Look, until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                await self._sample()
            except Exception as error:  # noqa: BLE001  # it must not end the service
                self._service.events.emit(EventKind.FAILED, "looking at everything, which comes again", error)
            await self._pause(time.monotonic() - begun)

    async def _sample(self) -> None:
        overview = await self.look()
        self.histories.add(overview.unix_ms, overview.consumers)
        self._bytes = await asyncio.to_thread(_written, overview) if self._watchers else b""
        self._signal.wake()

    async def look(self) -> Overview:
        """Everything as it is now. Who asks while it is looked at waits for the next look, with all others."""
        if self._next is None:
            self._next = asyncio.create_task(self._look_in_turn())
        return await asyncio.shield(self._next)

    async def _look_in_turn(self) -> Overview:
        async with self._looking:
            self._next = None  # What is asked from here on is of later.
            return await self._look()

    async def _look(self) -> Overview:
        service = self._service
        lags = await self.answers.lags()
        cuts = last_cuts(service.models.values(), CUTS)
        lines = await asyncio.to_thread(version_lines, cuts)
        volumes = await asyncio.to_thread(volume_overviews, service.volumes.all)
        return Overview(
            unix_ms=time.time_ns() // 10**6,
            freshness_bounds=list(LONG_BOUNDS),
            processes=[process_overview(service, volumes, self._of_access())],
            missing=other_processes(service),
            models=model_overviews(service),
            trainers=trainer_lines(service),
            consumers=consumer_overviews(service, lags),
            cuts=lines,
            events=service.recent_events.newest(EVENTS),
        )

    async def watch(self) -> AsyncIterator[bytes]:
        """Overviews, as JSON: the first one soon, and others as they come, until the service ends."""
        with self._watching():
            while not self._service.draining.is_set():
                await first_of(self._signal.changed(), self._service.draining.wait(), seconds=None)
                if self._bytes:
                    yield self._bytes

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        self._watchers += 1
        self._wanted.wake()
        try:
            yield
        finally:
            self._watchers -= 1

    async def _pause(self, took: float) -> None:
        await asyncio.sleep(max(_WATCHED_TIMES * took, _WATCHED_SECONDS if self._watchers else 0.0))
        if not self._watchers:
            rest = max(_UNWATCHED_SECONDS, _UNWATCHED_TIMES * took) - _WATCHED_TIMES * took
            await first_of(self._wanted.changed(), seconds=rest)


def _written(overview: Overview) -> bytes:
    return json.dumps(asdict(overview), separators=(",", ":")).encode()
