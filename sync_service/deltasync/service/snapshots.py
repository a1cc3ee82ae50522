"""Snapshots of the models that a service has: made now and then while cuts go on, and old ones removed."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass

from deltasync.core.errors import Contradiction
from deltasync.core.events import EventKind
from deltasync.core.words import counted
from deltasync.feeds.model import Model
from deltasync.service.service import Service
from deltasync.service.snapshot_now import make_snapshot, views_of
from deltasync.snapshots.manifest import Manifest
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import snapshots_of as stored_snapshots
from deltasync.snapshots.reading import unused_objects
from deltasync.views.view import View

_LOOK_SECONDS = 1.0
# After a failure, times as many again, at most the interval.
_FIRST_PAUSE_SECONDS = 5.0
# What an unfinished snapshot may still be to name.
_YOUNG_NS = 3600 * 10**9


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions:
    """Which snapshots are made, and how many are kept.

    Attributes:
        url: where they are: a folder, or object storage.
        seconds: how often one is made of a model that has changed.
        keep: how many of a model are kept.
        keep_seconds: those that are younger are kept, too.
        bytes: one is made at once when the log has so many bytes of newer rows.
    """

    url: str
    seconds: float = 600.0
    keep: int = 3
    keep_seconds: float = 0.0
    bytes: int = 1 << 30


@dataclass
class _State:
    """Of a model: its newest snapshot, when the next is due by `monotonic`, and what went wrong."""

    newest: Manifest | None = None
    due: float = 0.0
    pause: float = _FIRST_PAUSE_SECONDS
    failure: str = ""
    looked: bool = False


class SnapshotLoop:
    """Makes the snapshots of a service's models. Used in the event loop.

    Attributes:
        place: where they are.
        failures: how many could not be made.
    """

    def __init__(self, service: Service, options: SnapshotOptions, place: SnapshotPlace) -> None:
        self._service, self._options, self.place = service, options, place
        self._states = dict[str, _State]()
        self._turns = dict[str, asyncio.Lock]()
        self.failures = 0

    @property
    def troubles(self) -> list[str]:
        """What keeps snapshots from being made, in words."""
        here = self._service.models
        return [
            f"snapshots of model {n!r}: {s.failure}" for n, s in self._states.items() if s.failure and n in here
        ]

    def failure(self, model: str) -> str:
        """Why the last try to make one of a model has failed; empty if it has not."""
        state = self._states.get(model)
        return state.failure if state else ""

    def newest(self, model: str) -> Manifest | None:
        """The newest snapshot that this process knows of."""
        state = self._states.get(model)
        return state.newest if state else None

    async def run(self) -> None:
        """Make those that are due, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name, model in list(self._service.models.items()):
                if self._is_due(name, model):
                    # `make` has logged the failure and tries again later. Whatever it is, the service goes on.
                    with contextlib.suppress(Exception):
                        await self.make(name)

    async def make(self, name: str) -> Manifest:
        """Make a snapshot of a model now.

        Raises:
            NotFound: there is no such model, or nothing of it is published.
            StorageFailed: it could not be made.
            ServiceUnavailable: the service is shutting down.
        """
        async with self._turns.setdefault(name, asyncio.Lock()):
            state, began = self._states.setdefault(name, _State()), time.monotonic()
            try:
                manifest = await self._make(name, state)
            except Exception as error:
                self._note_failure(name, state, error)
                raise
            state.newest, state.failure, state.pause = manifest, "", _FIRST_PAUSE_SECONDS
            state.due = began + self._options.seconds
            text = f"{counted(manifest.bytes, 'byte')}, {manifest.new_bytes()} of them new"
            self._service.events.emit(EventKind.SNAPSHOT_MADE, text, model=name, version=manifest.version)
            return manifest

    def forget(self, name: str) -> None:
        """Know nothing of a model any more, which another process has."""
        self._states.pop(name, None)

    def _is_due(self, name: str, model: Model) -> bool:
        state = self._states.setdefault(name, _State(due=time.monotonic() + self._options.seconds))
        newest = state.newest.version if state.newest else 0
        if model.seals.newest_version <= newest or time.monotonic() < state.due - self._options.seconds:
            return False
        full = model.log.shared and (model.log.refusing or model.should_flush(self._options.bytes))
        return time.monotonic() >= state.due or (full and not state.failure)

    def _note_failure(self, name: str, state: _State, error: Exception) -> None:
        self.failures += 1
        state.failure = str(error)
        state.due = time.monotonic() + state.pause
        state.pause = min(2 * state.pause, self._options.seconds)
        self._service.events.emit(EventKind.FAILED, "no snapshot, which is tried again", error, model=name)

    async def _make(self, name: str, state: _State) -> Manifest:
        if not state.looked:
            found = await asyncio.to_thread(stored_snapshots, self.place, name)
            state.newest, state.looked = next(iter(found.manifests), None), True
        manifest = await make_snapshot(self._service, name, self.place, state.newest)
        model = self._service.model(name)
        if model.log.shared:  # The log goes on from the one before, too: any may be damaged.
            kept = manifest if model.log.refusing else state.newest
            await asyncio.to_thread(_cut_logs, kept, model, views_of(self._service, model))
        await asyncio.to_thread(_remove_old, self.place, name, self._options)
        return manifest


def snapshots_of(service: Service) -> SnapshotLoop:
    """What makes a service's snapshots.

    Raises:
        Contradiction: there are to be none.
    """
    if service.snapshots is None:
        raise Contradiction("nobody has said where snapshots go: start the service with --snapshots")
    return service.snapshots


def _cut_logs(kept: Manifest | None, model: Model, views: Mapping[str, View]) -> None:
    """Drop what the log has up to what a snapshot has."""
    if kept and kept.history == model.history:
        model.store.cut_log(kept.first)
        for name in kept.views.keys() & views.keys():
            if kept.views[name].record["history"] == views[name].history:
                views[name].cut_log(kept.views[name].first)


def _remove_old(place: SnapshotPlace, model: str, options: SnapshotOptions) -> None:
    """Remove snapshots of which there are enough newer ones, and what none of those that are kept names."""
    manifests, now = stored_snapshots(place, model).manifests, time.time_ns()
    kept = [
        each
        for number, each in enumerate(manifests)
        if number < options.keep or now - each.made_unix_ns < options.keep_seconds * 1e9
    ]
    for each in manifests:
        if each not in kept:
            place.remove(each.name)
    for name in list(unused_objects(place, model, kept)):
        if now - int(name.rpartition("/")[2].partition("-")[0]) > _YOUNG_NS:
            place.remove(name)
