"""The consumers that the service's configuration names, and those of its probes."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deltasync.base.arguments import check_name
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, LimitReached, ServiceUnavailable
from deltasync.base.events import EventKind
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.log.volume import VolumeFailed
from deltasync.service.probe import ProbeStatus, probe_of

if TYPE_CHECKING:
    from deltasync.service.service import Service


class Configuration:
    """Has a service have these consumers. Used in the event loop.

    Attributes:
        shortcomings: what keeps a consumer from being as the configuration says, by its name.
    """

    def __init__(self, service: "Service") -> None:
        self._service = service
        self.shortcomings = dict[str, str]()
        self._unwritten = dict[str, tuple[ConsumerOptions, str]]()  # And who has asked for each.
        self._elsewhere = dict[str, tuple[ConsumerOptions, str]]()  # Of models that are not here.

    async def take(self, wanted: Sequence[ConsumerOptions], by: str) -> None:
        """Have the consumers of a configuration, which is the only one from here on. One that cannot be as it says
        stays as it is, the others go on; one that a volume does not take now is had by `take_unwritten`.

        Raises:
            InvalidInput: a name that cannot be one.
            StorageFailed: one could not be written down, for another reason.
        """
        self.shortcomings, self._unwritten, self._elsewhere = {}, {}, {}
        for each in wanted:
            check_name("consumer", each.name)
            check_name("model", each.model)
            await self._take(each, by)

    async def take_unwritten(self) -> None:
        """Try again to have those that a volume did not take, and those of models that have come here."""
        for left in (self._unwritten, self._elsewhere):
            for name, (wanted, by) in list(left.items()):
                if left.get(name) == (wanted, by):  # Not if there is another one by now.
                    await self._take(wanted, by)

    def model_of(self, consumer: str) -> str | None:
        """The model of a consumer that is still to be made, here or where its model is; None of another."""
        wanted = self._elsewhere.get(consumer)
        return wanted[0].model if wanted else None

    def forget(self, name: str) -> None:
        """Forget a consumer that was deleted."""
        self.shortcomings.pop(name, None)
        self._unwritten.pop(name, None)
        self._elsewhere.pop(name, None)

    async def _take(self, wanted: ConsumerOptions, by: str) -> None:
        self.forget(wanted.name)
        self._elsewhere[wanted.name] = wanted, by  # Also meanwhile: who asks for it is to try again.
        try:
            await self._service.ensure_consumer(wanted, by)
        except ServiceUnavailable:  # Who has its model has the same configuration.
            return
        except (Contradiction, InvalidInput, LimitReached) as error:
            self._fall_short("its configuration is refused", wanted, error)
        except VolumeFailed as error:
            self._unwritten[wanted.name] = wanted, by
            self._fall_short("its configuration waits to be written down", wanted, error)
        if self._elsewhere.get(wanted.name) == (wanted, by):
            del self._elsewhere[wanted.name]

    def _fall_short(self, text: str, wanted: ConsumerOptions, error: Exception) -> None:
        self.shortcomings[wanted.name] = f"{text}: {error}"
        self._service.events.emit(EventKind.FAILED, text, error, consumer=wanted.name)


_AGAIN_SECONDS = 1.0


async def have_probe_consumers(service: "Service", mine: ProbeStatus, by: str) -> None:
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


async def _have(service: "Service", name: str, by: str) -> str:
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
