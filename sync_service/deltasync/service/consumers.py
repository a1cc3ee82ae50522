"""Creates, changes and deletes consumers for operators, the configuration and probes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, LimitReached, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.words import duration, listed
from deltasync.consumers.consumer import ITSELF, Consumer, ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.log.volume import VolumeFailed
from deltasync.model.feed import Feed
from deltasync.service.models import Models
from deltasync.views.registry import ViewRegistry

# Name of the probe's model and of its consumer. In a cluster, each process adds its own name.
PROBE = "deltasync-probe"

# A row that takes longer counts as a failure.
PATIENCE_SECONDS = 10.0


def probe_of(process: str) -> str:
    """Name of the model and consumer of a process's probe; a single process has the empty name."""
    return f"{PROBE}-{process}" if process else PROBE


@dataclass
class ProbeStatus:
    """The results of a probe. Written by its own thread, read by any.

    Attributes:
        name: name of its model and consumer.
        every_seconds: interval between rows.
        seconds: time from publishing the last row until the replica had it; None before the first.
        since_ns: when that row arrived, or else when the probe began, by `steady_ns`.
        turns: number of rows that arrived.
        failures: number of rows that did not arrive in time.
        failure: why the last row did not arrive; empty if it did.
        shortcoming: why its consumer cannot be created; empty if it can.
    """

    name: str = PROBE
    every_seconds: float = 0.0
    seconds: float | None = None
    since_ns: int = field(default_factory=steady_ns)
    turns: int = 0
    failures: int = 0
    failure: str = ""
    shortcoming: str = ""

    def record(self, seconds: float) -> None:
        """Record that a row has arrived."""
        self.seconds = seconds
        self.since_ns = steady_ns()
        self.failure = ""
        self.turns += 1

    def record_failure(self, failure: str) -> None:
        """Record that a row has not arrived."""
        self.failures += 1
        self.failure = failure

    @property
    def trouble(self) -> str:
        """Why the probe fails; empty if a row has arrived recently."""
        if reasons := "; ".join(filter(None, (self.failure, self.shortcoming))):
            return reasons
        if self.seconds is None:
            return "no row has arrived yet"
        late = self.age_seconds > self.every_seconds + PATIENCE_SECONDS
        return f"no row has arrived for {duration(self.age_seconds)}" if late else ""

    @property
    def age_seconds(self) -> float:
        """Seconds since the last row arrived, or since the probe began."""
        return round((steady_ns() - self.since_ns) / 1e9, 3)


class Consumers:
    """Creates, changes and deletes the consumers of this process. Used in the event loop. `by` names the caller.

    Attributes:
        shortcomings: why a consumer differs from the configuration, by its name.
    """

    def __init__(self, models: Models, registry: ConsumerRegistry, views: ViewRegistry, events: Events) -> None:
        self._models = models
        self._registry = registry
        self._views = views
        self._events = events
        self.shortcomings = dict[str, str]()
        self._unwritten = dict[str, tuple[ConsumerOptions, str]]()  # With the caller.
        self._elsewhere = dict[str, tuple[ConsumerOptions, str]]()  # Their models are in other processes.
        registry.elsewhere = self._not_here

    def get(self, name: str) -> Consumer:
        """The consumer of that name, whose model this process owns."""
        consumer = self._registry.get(name)
        self._models.owners.check(consumer.model)  # Another process may have taken it over meanwhile.
        return consumer

    def feed(self, consumer: Consumer) -> Feed | None:
        """The feed of a consumer's replicas: its view, or the model itself; None while there is no model."""
        return self._views.get(consumer) or self._models.get(consumer.model)

    @property
    def troubles(self) -> list[str]:
        """The consumers that differ from the configuration, and why, in words."""
        return [f"consumer {name!r}: {text}" for name, text in sorted(self.shortcomings.items())]

    async def create(self, name: str, model: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Create a consumer. If it exists with the same policy, do nothing."""
        check_name("consumer", name)
        await self._models.owners.claim(check_name("model", model))
        async with self._models.changing:
            return await self._create(name, model, policy, by)

    async def ensure(self, options: ConsumerOptions, by: str = ITSELF) -> Consumer:
        """Create a consumer, or update the policy of an existing one if the options contain a policy."""
        await self._models.owners.claim(options.model)
        async with self._models.changing:
            existing = self._registry.consumers.get(options.name)
            policy = options.policy or (existing.policy if existing else Policy())
            if existing and existing.model == options.model:
                return await self._update(options.name, policy, by)
            return await self._create(options.name, options.model, policy, by)

    async def update(self, name: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Change the policy of a consumer; its replicas keep their offsets."""
        async with self._models.changing:
            return await self._update(name, policy, by)

    async def delete(self, name: str, by: str = ITSELF) -> None:
        """Forget a consumer, its offsets, its history and its view."""
        async with self._models.changing:
            self._models.check_recovered(self._registry.get(name).model)
            if names := self._registry.followers_of(name):
                raise Contradiction(
                    f"consumer {name!r} is followed by {listed(names)}: let them follow something else first "
                    "(deltasync consumers follow)"
                )
            try:
                await self._registry.delete(name)
            finally:  # Otherwise a new consumer of that name would use the old view.
                await self._views.forget(name)
        await self._models.owners.forget_consumer(name)
        self._forget_configured(name)
        self._events.emit(EventKind.CONSUMER_CHANGED, "deleted", consumer=name, by=by)

    async def _create(self, name: str, model: str, policy: Policy, by: str) -> Consumer:
        self._check(policy, model)
        await self._models.owners.reserve_consumer(check_name("consumer", name), model)
        consumer = await self._registry.create(name, model, policy)
        await self._follow(consumer)
        text = f"policy: {_words(policy)}"
        self._events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    async def _update(self, name: str, policy: Policy, by: str) -> Consumer:
        before = self._registry.get(name).policy
        if policy != before:  # An unchanged policy stays valid, even if tables were added since.
            self._check(policy, self._registry.get(name).model)
        consumer = await self._registry.update(name, policy)
        await self._follow(consumer)
        if policy != before:
            text = f"policy: {_words(policy)}; before: {_words(before)}"
            self._events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    def _check(self, policy: Policy, model: str) -> None:
        if (specs := self._models.specs(model)) is not None:
            policy.check(specs)

    async def _follow(self, consumer: Consumer) -> None:
        """Create the view that a consumer needs, if its model is in this process."""
        if model := self._models.get(consumer.model):
            await self._views.follow(consumer, model)

    def _not_here(self, consumer: str) -> DeltasyncError | None:
        """The error for a consumer that another process owns or is creating, else None."""
        try:
            self._models.check_confirmed()
            configured = self._elsewhere.get(consumer)
            if model := self._models.owners.model_of(consumer) or (configured and configured[0].model):
                self._models.owners.check(model)
                return ServiceUnavailable(f"consumer {consumer!r} is being created; try again")
        except ServiceUnavailable as error:
            return error
        return None

    # The consumers of the configuration.

    async def configure(self, options: Sequence[ConsumerOptions], by: str) -> None:
        """Create or change the consumers of a configuration, which replaces any earlier one.

        A consumer that cannot follow it stays unchanged. `configure_again` retries those that a volume refused to
        write.
        """
        self.shortcomings = {}
        self._unwritten = {}
        self._elsewhere = {}
        for each in options:
            check_name("consumer", each.name)
            check_name("model", each.model)
            await self._configure(each, by)

    async def configure_again(self) -> None:
        """Retry the consumers that a volume refused to write, and those of models that moved to this process."""
        for left in (self._unwritten, self._elsewhere):
            for name, (options, by) in list(left.items()):
                if left.get(name) == (options, by):  # A newer configuration may have replaced it.
                    await self._configure(options, by)

    async def _configure(self, options: ConsumerOptions, by: str) -> None:
        self._forget_configured(options.name)
        self._elsewhere[options.name] = options, by  # Until it is created, callers are asked to retry.
        try:
            await self.ensure(options, by)
        except ServiceUnavailable:  # The process that owns its model has the same configuration.
            return
        except (Contradiction, InvalidInput, LimitReached) as error:
            self._fall_short("its configuration was refused", options, error)
        except VolumeFailed as error:
            self._unwritten[options.name] = options, by
            self._fall_short("its configuration could not be written; this will be retried", options, error)
        if self._elsewhere.get(options.name) == (options, by):
            del self._elsewhere[options.name]

    def _forget_configured(self, name: str) -> None:
        self.shortcomings.pop(name, None)
        self._unwritten.pop(name, None)
        self._elsewhere.pop(name, None)

    def _fall_short(self, text: str, options: ConsumerOptions, error: Exception) -> None:
        self.shortcomings[options.name] = f"{text}: {error}"
        self._events.emit(EventKind.FAILED, text, error, consumer=options.name)

    # The consumers of probes.

    async def keep_probes(self, mine: ProbeStatus, by: str) -> None:
        """Create the consumers of all probes whose models this process owns or will own, until cancelled.

        Creates deleted ones again. An error does not end it.
        """
        while True:
            for process in self._models.owners.processes():
                name = probe_of(process.name)
                shortcoming = await self._make_probe(name, by)
                if name == mine.name:
                    mine.shortcoming = shortcoming
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _make_probe(self, name: str, by: str) -> str:
        """Create a probe's consumer; return the error in words, empty without one."""
        if name in self._registry.consumers:
            return ""
        try:
            await self.ensure(ConsumerOptions(name, name), by)
        except ServiceUnavailable:  # Its model's owner creates it.
            return ""
        except DeltasyncError as error:
            return f"consumer {name!r} cannot be created: {error}"
        except Exception as error:  # noqa: BLE001  # a probe must not end the service
            text = "the probe's consumer could not be created; this will be retried"
            self._events.emit(EventKind.FAILED, text, error, consumer=name)
            return f"consumer {name!r} cannot be created: {error}"
        return ""


_AGAIN_SECONDS = 1.0


def _words(policy: Policy) -> str:
    return policy.description or "every changed row"
