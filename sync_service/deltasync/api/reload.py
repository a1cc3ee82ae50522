"""Taking over the consumers and limits of a configuration that has changed, while the service runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from deltasync.access.limits import LimitOptions
from deltasync.base.errors import DeltasyncError
from deltasync.base.events import EventKind
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy
from deltasync.service.service import Service


@dataclass(frozen=True)
class Reloaded:
    """What is taken of a configuration while the service runs."""

    consumers: tuple[ConsumerOptions, ...]
    limits: LimitOptions


# Reads the configuration anew; blocks, and raises InvalidInput where it says what cannot be.
Reader = Callable[[], Reloaded]
# Takes over the roles; raises nothing.
RolesReload = Callable[[], Awaitable[None]]
# Model and policy, by the consumer's name.
Known = Mapping[str, tuple[str, Policy]]

_BY = "SIGHUP"


async def reload_on(
    wanted: asyncio.Event, service: Service, read: Reader | None, reload_roles: RolesReload | None = None
) -> None:
    """Take over the roles and the configuration whenever it is wanted, until cancelled. What goes wrong ends
    nothing.
    """
    while True:
        await wanted.wait()
        wanted.clear()
        if reload_roles:
            await reload_roles()
        if read is None:
            text = "there is no file: start the service with --config to have its consumers and limits read again"
            service.events.emit(EventKind.CONFIGURATION_RELOADED, text)
            continue
        try:
            found = await asyncio.to_thread(read)
        except DeltasyncError as error:
            service.events.emit(EventKind.CONFIGURATION_REFUSED, "nothing has changed", error)
        except Exception as error:  # noqa: BLE001  # it must not end the service
            service.events.emit(EventKind.FAILED, "the configuration could not be read", error)
        else:
            limits = service.limits.take(found.limits)
            await _take_over(service, found.consumers, limits)


async def _take_over(service: Service, wanted: Sequence[ConsumerOptions], limits: str) -> None:
    before, failure = _known(service), None
    try:
        await service.configuration.take(wanted, _BY)
    except Exception as error:  # noqa: BLE001  # likewise
        failure = error
    consumers = outcome(before, _known(service), wanted, service.configuration.shortcomings)
    text = "; ".join(filter(None, [limits, consumers]))
    if failure:
        service.events.emit(EventKind.FAILED, f"the configuration is taken over in part: {text}", failure)
    else:
        service.events.emit(EventKind.CONFIGURATION_RELOADED, text)


def _known(service: Service) -> Known:
    return {name: (each.model, each.policy) for name, each in service.registry.consumers.items()}


def outcome(before: Known, after: Known, wanted: Sequence[ConsumerOptions], refused: Mapping[str, str]) -> str:
    """What has become of consumers, in words.

    Args:
        before: those that there were.
        after: those that there are.
        wanted: those of the configuration.
        refused: why some of these cannot be as it says, by name.
    """
    names = [each.name for each in wanted]
    found = {
        "made": [name for name in names if name in after and name not in before],
        "changed": [name for name in names if name in before and after.get(name) != before[name]],
        "as before": [name for name in names if after.get(name) == before.get(name) and name not in refused],
        "refused": [name for name in names if name in refused],
        "not in it, and left as they are": sorted(after.keys() - names),
    }
    words = "; ".join(f"{what}: {', '.join(some)}" for what, some in found.items() if some)
    return f"{words or 'no consumers'}; other settings are read at the next start"
