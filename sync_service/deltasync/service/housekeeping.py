"""What is done every second: flushing tables before the log grows too large, looking for damaged rows, forgetting
replicas long gone, and telling the system what new threads are called.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from deltasync.core.events import EventKind
from deltasync.core.threads import name_threads
from deltasync.feeds.model import Model
from deltasync.service.service import Service

_SECONDS = 1.0


async def housekeeping(service: Service) -> None:
    """Keep the service in order, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(partial(_keep, service), service))
        tasks.create_task(_look_after_models(service, tasks))


async def _look_after_models(service: Service, tasks: asyncio.TaskGroup) -> None:
    """Look after the rows of each model in a task of its own: its thread, or the disk, may be busy for long."""
    known = set[str]()
    while True:
        for name in service.models.keys() - known:
            known.add(name)
            tasks.create_task(_repeat(partial(_look_after_rows, service, service.models[name]), service))
        await service.model_added.changed()


async def _repeat(what: Callable[[], Awaitable[None]], service: Service) -> None:
    while True:
        await asyncio.sleep(_SECONDS)
        try:
            await what()
        except Exception as error:  # noqa: BLE001  # it must not end the service
            service.events.emit(EventKind.FAILED, "housekeeping, which comes again", error)


async def _keep(service: Service) -> None:
    name_threads()
    service.registry.forget_the_gone()
    full = service.log.refusing
    await _flush(service, 0 if full else service.options.flush_bytes)
    if full:
        service.log.refusing = False  # If there is still no room, the next write is refused again.


async def _look_after_rows(service: Service, model: Model) -> None:
    """Look for damaged rows of a model and of its views, and mend what there is."""
    await model.damage.look_after(service.events, model=model.name)
    await service.views.look_after_rows(model)


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
