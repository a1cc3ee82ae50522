"""What is done every second: giving up cuts and replicas of which nobody is there, looking whether volumes take
writes again, making room in a log that is full, and telling the system what new threads are called. Models whose
rows do not fit their digests are reloaded at once.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from deltasync.base.events import EventKind
from deltasync.base.process import FreedMemory
from deltasync.base.threads import name_threads
from deltasync.model.model import Model
from deltasync.service.service import Service

_SECONDS = 1.0
# What is freed is kept for the next messages, but no more than that: what a flood has taken is given back.
_FREED_BYTES = 512 << 20


async def housekeeping(service: Service) -> None:
    """Keep the service in order, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_repeat(partial(_keep, service, FreedMemory(_FREED_BYTES)), service))
        tasks.create_task(_repeat(service.volumes.look_after, service))
        tasks.create_task(_watch_models(service, tasks))


async def _watch_models(service: Service, tasks: asyncio.TaskGroup) -> None:
    """Watch each model in a task of its own."""
    known = set[Model]()
    while True:
        for model in set(service.models.values()) - known:
            tasks.create_task(service.reloading.watch(model))
        known = set(service.models.values())
        await service.model_added.changed()


async def _repeat(what: Callable[[], Awaitable[None]], service: Service) -> None:
    while True:
        await asyncio.sleep(_SECONDS)
        try:
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
    for coordinator in (*service.coordinators.values(), *service.unpublished):
        coordinator.abandon_forsaken(time.monotonic())
    await service.unpublished.look_after()
    if not service.volumes.trouble:
        await service.configuration.take_unwritten()
