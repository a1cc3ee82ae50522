"""Reading the roles, consumers and limits of a configuration again on SIGHUP, while the service runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from deltasync.access.limits import LimitOptions, Limits
from deltasync.base.errors import DeltasyncError
from deltasync.base.events import EventKind, Events
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.service.consumers import Consumers


@dataclass(frozen=True)
class Reloaded:
    """The part of a configuration that may change while the service runs."""

    consumers: tuple[ConsumerOptions, ...]
    limits: LimitOptions


# Reads the configuration; blocks, and raises InvalidInput if it is wrong.
Reader = Callable[[], Reloaded]
# Reads the roles file again; raises nothing.
RolesReload = Callable[[], Awaitable[None]]
# Model and policy, by the consumer's name.
Policies = Mapping[str, tuple[str, Policy]]

_BY = "SIGHUP"


class Reload:
    """Takes a configuration that has changed. Used in the event loop."""

    def __init__(self, consumers: Consumers, registry: ConsumerRegistry, limits: Limits, events: Events) -> None:
        self._consumers, self._registry, self._limits, self._events = consumers, registry, limits, events

    async def run(
        self, hung_up: asyncio.Event, read: Reader | None, reload_roles: RolesReload | None = None
    ) -> None:
        """Read the roles and the configuration again whenever `hung_up` is set, until cancelled. No error ends
        this.
        """
        while True:
            await hung_up.wait()
            hung_up.clear()
            if reload_roles:
                await reload_roles()
            if read is None:
                text = (
                    "there is no file: start the service with --config to have its consumers and limits read again"
                )
                self._events.emit(EventKind.CONFIGURATION_RELOADED, text)
                continue
            try:
                reloaded = await asyncio.to_thread(read)
            except DeltasyncError as error:
                self._events.emit(EventKind.CONFIGURATION_REFUSED, "nothing has changed", error)
            except Exception as error:  # noqa: BLE001  # it must not end the service
                self._events.emit(EventKind.FAILED, "the configuration could not be read", error)
            else:
                limits = self._limits.take(reloaded.limits)
                await self._configure(reloaded.consumers, limits)

    async def _configure(self, options: Sequence[ConsumerOptions], limits: str) -> None:
        before, failure = self._policies(), None
        try:
            await self._consumers.configure(options, _BY)
        except Exception as error:  # noqa: BLE001  # it must not end the service
            failure = error
        consumers = outcome(before, self._policies(), options, self._consumers.shortcomings)
        text = "; ".join(filter(None, [limits, consumers]))
        if failure:
            self._events.emit(EventKind.FAILED, f"the configuration is taken over in part: {text}", failure)
        else:
            self._events.emit(EventKind.CONFIGURATION_RELOADED, text)

    def _policies(self) -> Policies:
        return {name: (each.model, each.policy) for name, each in self._registry.consumers.items()}


def outcome(
    before: Policies, after: Policies, configured: Sequence[ConsumerOptions], refused: Mapping[str, str]
) -> str:
    """What a configuration has changed, in words.

    Args:
        before: the consumers before.
        after: the consumers now.
        configured: the consumers of the configuration.
        refused: why some of these are not as it says, by name.
    """
    names = [each.name for each in configured]
    names_by_outcome = {
        "made": [name for name in names if name in after and name not in before],
        "changed": [name for name in names if name in before and after.get(name) != before[name]],
        "as before": [name for name in names if after.get(name) == before.get(name) and name not in refused],
        "refused": [name for name in names if name in refused],
        "not in it, and left as they are": sorted(after.keys() - names),
    }
    words = "; ".join(f"{what}: {', '.join(some)}" for what, some in names_by_outcome.items() if some)
    return f"{words or 'no consumers'}; other settings are read at the next start"
