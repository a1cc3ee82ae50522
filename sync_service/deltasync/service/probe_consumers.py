"""The consumers by which probes read back what they publish."""

import asyncio

from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import DeltasyncError, ServiceUnavailable
from deltasync.core.events import EventKind
from deltasync.core.probe_status import ProbeStatus, probe_of
from deltasync.service.service import Service

_AGAIN_SECONDS = 1.0


async def have_probe_consumers(service: Service, mine: ProbeStatus, by: str) -> None:
    """Make the consumers of the probes of all processes that are alive, those whose models are here, or are to be;
    again where one was deleted. Until cancelled: what keeps one from being made ends nothing.
    """
    while True:
        for process in service.owners.processes():
            name = probe_of(process.name)
            shortcoming = await _have(service, name, by)
            if name == mine.name:
                mine.shortcoming = shortcoming
        await asyncio.sleep(_AGAIN_SECONDS)


async def _have(service: Service, name: str, by: str) -> str:
    """What keeps a probe's consumer from being made; empty if nothing does."""
    if name in service.registry.consumers:
        return ""
    try:
        await service.ensure_consumer(ConsumerOptions(name, name), by)
    except ServiceUnavailable:  # Whoever has its model makes it, or this process does once it has it.
        return ""
    except DeltasyncError as error:
        return f"consumer {name!r} cannot be made: {error}"
    except Exception as error:  # noqa: BLE001  # a probe must end no service
        service.events.emit(
            EventKind.FAILED, "the consumer of a probe, which is tried again", error, consumer=name
        )
        return f"consumer {name!r} cannot be made: {error}"
    return ""
