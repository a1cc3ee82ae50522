"""What is done every second: flushing tables before the log grows too large, forgetting replicas long gone."""

import asyncio
import logging

from deltasync.core.errors import StorageFailed
from deltasync.feeds.model import Model
from deltasync.service.service import Service

logger = logging.getLogger(__name__)

_SECONDS = 1.0


async def housekeeping(service: Service) -> None:
    """Keep the service in order, until cancelled."""
    while True:
        await asyncio.sleep(_SECONDS)
        service.registry.forget_the_gone()
        full = service.log.refusing
        await _flush(service, 0 if full else service.options.flush_bytes)
        if full:
            service.log.refusing = False  # If there is still no room, the next write is refused again.


async def _flush(service: Service, flush_bytes: int) -> None:
    """Flush the models and views of which the log holds so many bytes."""
    for model in list(service.models.values()):
        if flush_bytes == 0 or model.should_flush(flush_bytes):
            await _flush_model(model)
    await service.views.flush(flush_bytes)


async def _flush_model(model: Model) -> None:
    try:
        await asyncio.to_thread(model.flush)
    except StorageFailed as error:
        logger.error("model %s is flushed again later: %s", model.name, error)
