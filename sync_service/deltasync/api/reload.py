"""Reload roles, consumers and limits on SIGHUP."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from deltasync.access.limits import Limits
from deltasync.base.errors import DeltasyncError
from deltasync.base.events import EventKind, Events
from deltasync.base.settings import changed
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.service.consumers import Consumers
from deltasync.service.options import ServiceOptions

# Reads all settings again. Blocks, and raises InvalidInput if they are wrong.
Reader = Callable[[], ServiceOptions]
# Reloads the roles file. Raises nothing.
RolesReload = Callable[[], Awaitable[None]]
# Model and policy by consumer.
Policies = Mapping[str, tuple[str, Policy]]

_BY = "SIGHUP"


class Reload:
    """Applies a changed configuration. For the event loop."""

    def __init__(
        self,
        options: ServiceOptions,
        consumers: Consumers,
        registry: ConsumerRegistry,
        limits: Limits,
        events: Events,
    ) -> None:
        self._options = options
        self._consumers, self._registry, self._limits, self._events = consumers, registry, limits, events

    async def run(
        self, hung_up: asyncio.Event, read: Reader | None, reload_roles: RolesReload | None = None
    ) -> None:
        """Reload roles and configuration whenever `hung_up` is set, until cancelled. Survives all errors."""
        while True:
            await hung_up.wait()
            hung_up.clear()
            if reload_roles:
                await reload_roles()
            if read is None:
                text = "no configuration file; start the service with --config to reload consumers and limits"
                self._events.emit(EventKind.CONFIGURATION_RELOADED, text)
                continue
            try:
                reloaded = await asyncio.to_thread(read)
            except DeltasyncError as error:
                self._events.emit(EventKind.CONFIGURATION_REFUSED, "nothing changed", error)
            except Exception as error:  # noqa: BLE001  # must not end the service
                self._events.emit(EventKind.FAILED, "cannot read the configuration", error)
            else:
                await self._configure(reloaded)

    async def _configure(self, settings: ServiceOptions) -> None:
        options, limits = settings.consumers, self._limits.take(settings.limits)
        _, later = changed(self._options, settings)
        before, failure = self._policies(), None
        try:
            await self._consumers.configure(options, _BY)
        except Exception as error:  # noqa: BLE001  # must not end the service
            failure = error
        consumers = outcome(before, self._policies(), options, self._consumers.shortcomings)
        restart = f"after the next start: {', '.join(later)}" if later else ""
        text = "; ".join(filter(None, [limits, consumers, restart]))
        if failure:
            self._events.emit(EventKind.FAILED, f"only part of the configuration was applied: {text}", failure)
        else:
            self._events.emit(EventKind.CONFIGURATION_RELOADED, text)

    def _policies(self) -> Policies:
        return {name: (each.model, each.policy) for name, each in self._registry.consumers.items()}


def outcome(
    before: Policies, after: Policies, configured: Sequence[ConsumerOptions], refused: Mapping[str, str]
) -> str:
    """Describe the changes made by a configuration."""
    names = [each.name for each in configured]
    names_by_outcome = {
        "created": [name for name in names if name in after and name not in before],
        "changed": [name for name in names if name in before and after.get(name) != before[name]],
        "unchanged": [name for name in names if after.get(name) == before.get(name) and name not in refused],
        "refused": [name for name in names if name in refused],
        "not in the configuration and unchanged": sorted(after.keys() - names),
    }
    words = "; ".join(f"{what}: {', '.join(some)}" for what, some in names_by_outcome.items() if some)
    return words or "no consumers"
