"""What is done every second: flushing tables before the log grows too large, looking for damaged rows and whether
volumes take writes again, giving up cuts and replicas of which nobody is there, and telling
the system what new threads are called.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from deltasync.core.events import EventKind
from deltasync.core.process import FreedMemory
from deltasync.core.threads import name_threads
from deltasync.feeds.model import Model
from deltasync.service.service import Service

_SECONDS = 1.0
# What is freed is kept for the next messages, but no more than that: what a flood has taken is given back.
_FREED_BYTES = 512 << 20


async def housekeeping(service: Service) -> None:
    """Keep the service in order, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(partial(_keep, service, FreedMemory(_FREED_BYTES)), service))
        tasks.create_task(_repeat(service.volumes.look_after, service))
        tasks.create_task(_look_after_models(service, tasks))


async def _look_after_models(service: Service, tasks: asyncio.TaskGroup) -> None:
    """Look after the rows of each model in a task of its own: its thread, or the disk, may be busy for long."""
    known = set[Model]()
    while True:
        for model in set(service.models.values()) - known:
            tasks.create_task(_look_after_model(service, model))
            tasks.create_task(_look_at_all(service, model))
        known = set(service.models.values())
        await service.model_added.changed()


async def _look_after_model(service: Service, model: Model) -> None:
    there = partial(_has, service, model)
    await _repeat(partial(_look_after_rows, service, model), service, there)


def _has(service: Service, model: Model) -> bool:
    return service.models.get(model.name) is model


async def _repeat(
    what: Callable[[], Awaitable[None]], service: Service, wanted: Callable[[], bool] = lambda: True
) -> None:
    while wanted():
        await asyncio.sleep(_SECONDS)
        try:
            if wanted():
                await what()
        except Exception as error:  # noqa: BLE001  # it must not end the service
            service.events.emit(EventKind.FAILED, "housekeeping, which comes again", error)


async def _keep(service: Service, freed: FreedMemory) -> None:
    name_threads()
    service.event_log.tell_repeats()
    for log in service.logs.each():
        log.queue.limit(service.limits.options.log_queue_bytes)  # Which may have been read again.
    await asyncio.to_thread(freed.give_back)
    service.registry.forget_the_gone()
    refusing = [log for log in service.logs.each() if log.refusing]
    full = bool(refusing) and not _is_pinned(service)  # A snapshot is broken off for that, and room made then.
    await _flush(service, 0 if full else service.options.most_unflushed_bytes)
    for coordinator in (*service.coordinators.values(), *service.unpublished):
        coordinator.abandon_forsaken(time.monotonic())
        if full:
            coordinator.note_room()
    await service.unpublished.look_after()
    if not service.volumes.trouble:
        await service.configuration.take_unwritten()
    if full:
        for log in refusing:
            log.refusing = False  # If there is still no room, the next write is refused again.


def _is_pinned(service: Service) -> bool:
    """Whether a snapshot keeps anything in a log."""
    pins = [model.store.pin for model in service.models.values()]
    return any(pin.is_held for pin in [*pins, *(view.pin for view in service.views.by_consumer().values())])


async def _look_after_rows(service: Service, model: Model) -> None:
    """Look for damaged rows of a model and of its views, and mend what there is."""
    await model.damage.look_after(service.events, model=model.name)
    await service.views.look_after_rows(model)


async def _look_at_all(service: Service, model: Model) -> None:
    """Look at all rows once, now: what has changed while the service was down is known long before the sweep comes
    to it. What is found is told, and mended, by who looks after rows.
    """
    try:
        await model.damage.look_at_all(f"model {model.name!r}")
        for consumer, view in service.views.by_consumer().items():
            if view.model is model:
                await view.damage.look_at_all(f"consumer {consumer!r}")
                await view.find_lost()
    except Exception as error:  # noqa: BLE001  # the sweep comes to them
        service.events.emit(EventKind.FAILED, "its rows are looked at slowly", error, model=model.name)


async def _flush(service: Service, flush_bytes: int) -> None:
    """Flush the models and views of which the log holds so many bytes."""
    for model in list(service.models.values()):
        if flush_bytes == 0 or model.should_flush(flush_bytes):
            await _flush_model(service, model)
    await service.views.flush(flush_bytes)


async def _flush_model(service: Service, model: Model) -> None:
    """Flush a model; what goes wrong with one must not keep the others from it."""
    try:
        if await asyncio.to_thread(model.flush):
            service.events.emit(EventKind.FLUSHED, model=model.name, version=model.store.flushed)
    except Exception as error:  # noqa: BLE001  # one model's trouble is its own
        service.events.emit(EventKind.FAILED, "it is flushed again later", error, model=model.name)
