"""Looks at everything now and then, for those who watch and for whoever looks later.

However many watch, it is looked at once: they are all given the same bytes.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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
    consumer_overviews,
    model_overviews,
    other_processes,
    process_overview,
    volume_overviews,
)
from deltasync.status.trainers import trainer_lines
from deltasync.status.versions import last_cuts, version_lines

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
