"""Looks at everything now and then, for those who watch and for whoever looks later.

However many watch, it is looked at once: they are all given the same bytes.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict

from deltasync.core.durations import LONG_BOUNDS
from deltasync.core.events import EventKind
from deltasync.core.signals import Signal, first_of
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.history import LagHistories
from deltasync.status.overview import (
    CUTS,
    EVENTS,
    Overview,
    consumer_overview,
    model_overviews,
    other_processes,
    process_overview,
    recent_cuts,
    volume_overviews,
)
from deltasync.status.trainers import trainer_lines

# Seconds between two looks, while somebody watches and while nobody does; and times what one takes, at least.
_WATCHED_SECONDS, _UNWATCHED_SECONDS = 1.0, 5.0
_WATCHED_TIMES, _UNWATCHED_TIMES = 4, 20


class Sampler:
    """Samples of a service. Used in the event loop.

    Attributes:
        histories: of the consumers' lag.
    """

    def __init__(self, service: Service, answers: Answers) -> None:
        self.histories = LagHistories()
        self._service, self._answers = service, answers
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
        """Everything as it is now."""
        service, consumers = self._service, []
        for lag in await self._answers.lags():
            consumers.append(consumer_overview(service, lag))
        volumes = await asyncio.to_thread(volume_overviews, service.volumes.all)
        return Overview(
            unix_ms=time.time_ns() // 10**6,
            freshness_bounds=list(LONG_BOUNDS),
            processes=[process_overview(service, volumes)],
            missing=other_processes(service),
            models=model_overviews(service),
            trainers=trainer_lines(service),
            consumers=consumers,
            cuts=recent_cuts(service, CUTS),
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
