"""What is done every second: flushing tables before the log grows too large, looking for damaged rows, forgetting
replicas long gone, and telling the system what new threads are called.
"""

import asyncio
from collections.abc import Awaitable, Callable

from deltasync.core.damage import ranges
from deltasync.core.events import EventKind
from deltasync.core.threads import name_threads
from deltasync.feeds.damage import Damage
from deltasync.feeds.model import Model
from deltasync.service.service import Service

_SECONDS = 1.0


async def housekeeping(service: Service) -> None:
    """Keep the service in order, until cancelled."""
    # Side by side: a model's thread, on which its rows are looked at, may be busy until the log is full.
    await asyncio.gather(_repeat(_keep, service), _repeat(_look_after_all_rows, service))


async def _repeat(what: Callable[[Service], Awaitable[None]], service: Service) -> None:
    while True:
        await asyncio.sleep(_SECONDS)
        try:
            await what(service)
        except Exception as error:  # noqa: BLE001  # it must not end the service
            service.events.emit(EventKind.FAILED, "housekeeping, which comes again", error)


async def _keep(service: Service) -> None:
    name_threads()
    service.registry.forget_the_gone()
    full = service.log.refusing
    await _flush(service, 0 if full else service.options.flush_bytes)
    if full:
        service.log.refusing = False  # If there is still no room, the next write is refused again.


async def _look_after_all_rows(service: Service) -> None:
    await asyncio.gather(*(_look_after_rows(service, model) for model in list(service.models.values())))


async def _look_after_rows(service: Service, model: Model) -> None:
    """Look for damaged rows of a model and of its views, and mend what there is."""
    try:
        await model.sweep()
        _tell(service, EventKind.ROWS_DAMAGED, "other bits than were stored in ", model, model.untold_damage())
        _tell(service, EventKind.ROWS_MENDED, "", model, await model.mend() if model.damage else {})
    except Exception as error:  # noqa: BLE001  # one model's trouble is its own
        service.events.emit(EventKind.FAILED, "its rows are looked at again later", error, model=model.name)
    await service.views.look_after_rows(model)


def _tell(service: Service, kind: EventKind, text: str, model: Model, damage: Damage) -> None:
    for table, ids in damage.items():
        service.events.emit(kind, f"{text}{ranges(ids)}", model=model.name, table=table)


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
