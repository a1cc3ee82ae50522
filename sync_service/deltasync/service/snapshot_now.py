"""A snapshot of a model that goes on meanwhile, for whoever wants one: the loop of a service, or a backup."""

import asyncio
import contextlib
from collections.abc import Mapping

from deltasync.core.errors import NotFound, ServiceUnavailable, StorageFailed
from deltasync.feeds.model import Model
from deltasync.service.service import Service
from deltasync.service.snapshot_making import SnapshotMaker
from deltasync.service.snapshot_source import Source, source_of
from deltasync.snapshots.manifest import Manifest
from deltasync.snapshots.place import SnapshotPlace
from deltasync.views.view import View


async def make_snapshot(service: Service, name: str, place: SnapshotPlace, earlier: Manifest | None) -> Manifest:
    """Make a snapshot of a model; nothing is stored again that an `earlier` one has in the same place.

    Whoever leaves ends it.

    Raises:
        NotFound: there is no such model, or nothing of it is published.
        StorageFailed: it could not be stored, or the log is full and waits for it.
        ServiceUnavailable: the model is recovering or was taken away, or the service ends.
    """
    model, left = service.model(name), False

    def check() -> None:
        if left:
            raise ServiceUnavailable("whoever has asked for it has left")
        _check(service, model)

    await service.registry.offsets_written()
    views = views_of(service, model)
    with contextlib.ExitStack() as pins:
        source = await _pinned(model, views, pins)
        maker = SnapshotMaker(place, source, model.log, earlier, check)
        making = asyncio.create_task(asyncio.to_thread(maker.make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:  # The thread reads what is pinned.
            left = True
            await asyncio.wait({making})
            making.exception()  # Nobody is there whom to tell it.
            raise


def views_of(service: Service, model: Model) -> dict[str, View]:
    """The views that a service has of a model, by consumer."""
    return {name: view for name, view in service.views.by_consumer().items() if view.model is model}


async def _pinned(model: Model, views: Mapping[str, View], pins: contextlib.ExitStack) -> Source:
    """What there is of a model, of which the log keeps what comes after."""
    pins.enter_context(model.store.pin.held(model.store.flushed))
    for view in views.values():
        pins.enter_context(view.pin.held(0))
    source: Source | None = await model.on_thread(source_of, model, views)
    if source is None:
        raise NotFound(f"nothing of model {model.name!r} is published")
    return source


def _check(service: Service, model: Model) -> None:
    if service.draining.is_set():
        raise ServiceUnavailable("the service is shutting down")
    if service.models.get(model.name) is not model:
        raise ServiceUnavailable(f"model {model.name!r} is not here any more")
    if model.log.refusing and not model.log.shared:
        raise StorageFailed("the log is full, and keeps what a snapshot is to have: try again")
