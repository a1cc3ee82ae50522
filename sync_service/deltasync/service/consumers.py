"""Making, changing and deleting consumers, with their views: by operators, the configuration and the probes."""

import asyncio
from collections.abc import Sequence

from deltasync.base.arguments import check_name
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, LimitReached, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.consumers.consumer import Consumer, ConsumerOptions
from deltasync.consumers.pause import ITSELF
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.log.volume import VolumeFailed
from deltasync.model.feed import Feed
from deltasync.service.models import Models
from deltasync.service.self_test import ProbeStatus, probe_of
from deltasync.views.registry import ViewRegistry


class Consumers:
    """The consumers of this process's models. Used in the event loop. Changes name `by` whom they are asked for.

    Attributes:
        shortcomings: what keeps a consumer from being as the configuration says, by its name.
    """

    def __init__(self, models: Models, registry: ConsumerRegistry, views: ViewRegistry, events: Events) -> None:
        self._models = models
        self._registry = registry
        self._views = views
        self._events = events
        self.shortcomings = dict[str, str]()
        self._unwritten = dict[str, tuple[ConsumerOptions, str]]()  # And who has asked for each.
        self._elsewhere = dict[str, tuple[ConsumerOptions, str]]()  # Of models that are not here.
        registry.elsewhere = self._not_here

    def get(self, name: str) -> Consumer:
        """The consumer of that name, whose model this process owns.

        Raises:
            NotFound: there is none; the message names those that exist.
            NotOwner: another process has its model.
            ServiceUnavailable: it is about to be made, or this process is not among the others now.
        """
        consumer = self._registry.get(name)
        self._models.owners.check(consumer.model)  # Another process may have taken it over meanwhile.
        return consumer

    def feed(self, consumer: Consumer) -> Feed | None:
        """What a consumer's replicas are fed from: its view, or the model itself; None while there is no model."""
        return self._views.get(consumer) or self._models.get(consumer.model)

    @property
    def troubles(self) -> list[str]:
        """What keeps single consumers from being as the configuration says, in words."""
        return [f"consumer {name!r}: {text}" for name, text in sorted(self.shortcomings.items())]

    async def create(self, name: str, model: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
            NotOwner: another process has the model, or is to have it.
        """
        check_name("consumer", name)
        await self._models.owners.claim(check_name("model", model))
        async with self._models.changing:
            return await self._create(name, model, policy, by)

    async def ensure(self, options: ConsumerOptions, by: str = ITSELF) -> Consumer:
        """Make a consumer if it is missing; give one that exists the policy, if there is one.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model.
            NotOwner: another process has the model, or is to have it.
        """
        await self._models.owners.claim(options.model)
        async with self._models.changing:
            existing = self._registry.consumers.get(options.name)
            policy = options.policy or (existing.policy if existing else Policy())
            if existing and existing.model == options.model:
                return await self._update(options.name, policy, by)
            return await self._create(options.name, options.model, policy, by)

    async def update(self, name: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        async with self._models.changing:
            return await self._update(name, policy, by)

    async def delete(self, name: str, by: str = ITSELF) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: there is none of that name.
            ServiceUnavailable: its model is still recovering.
        """
        async with self._models.changing:
            self._models.check_recovered(self._registry.get(name).model)
            try:
                await self._registry.delete(name)
            finally:  # Else a new consumer of that name would have a view that serves the old one.
                await self._views.forget(name)
        await self._models.owners.forget_consumer(name)
        self._forget_configured(name)
        self._events.emit(EventKind.CONSUMER_CHANGED, "deleted", consumer=name, by=by)

    async def _create(self, name: str, model: str, policy: Policy, by: str) -> Consumer:
        self._check(policy, model)
        await self._models.owners.reserve_consumer(check_name("consumer", name), model)
        consumer = await self._registry.create(name, model, policy)
        await self._follow(consumer)
        text = f"sent {_words(policy)}"
        self._events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    async def _update(self, name: str, policy: Policy, by: str) -> Consumer:
        before = self._registry.get(name).policy
        if policy != before:  # A policy accepted earlier goes on, whatever tables were added since.
            self._check(policy, self._registry.get(name).model)
        consumer = await self._registry.update(name, policy)
        await self._follow(consumer)
        if policy != before:
            text = f"sent {_words(policy)}; before that {_words(before)}"
            self._events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    def _check(self, policy: Policy, model: str) -> None:
        if (specs := self._models.specs(model)) is not None:
            policy.check(specs)

    async def _follow(self, consumer: Consumer) -> None:
        """Make the view that a consumer needs, if its model is here."""
        if model := self._models.get(consumer.model):
            await self._views.follow(consumer, model)

    def _not_here(self, consumer: str) -> DeltasyncError | None:
        """The error for a consumer that another process owns or is to make, else None."""
        try:
            self._models.check_confirmed()
            configured = self._elsewhere.get(consumer)
            if model := self._models.owners.model_of(consumer) or (configured and configured[0].model):
                self._models.owners.check(model)
                return ServiceUnavailable(f"consumer {consumer!r} is about to be made; try again")
        except ServiceUnavailable as error:
            return error
        return None

    # The consumers of the configuration.

    async def configure(self, options: Sequence[ConsumerOptions], by: str) -> None:
        """Make the consumers of a configuration, which replaces any earlier one. A consumer that cannot be as it
        says stays as it is, and the others go on. `configure_again` tries those that a volume has refused.

        Raises:
            InvalidInput: a name that cannot be one.
            StorageFailed: one could not be written down, for another reason.
        """
        self.shortcomings = {}
        self._unwritten = {}
        self._elsewhere = {}
        for each in options:
            check_name("consumer", each.name)
            check_name("model", each.model)
            await self._configure(each, by)

    async def configure_again(self) -> None:
        """Try again the consumers that a volume has refused, and those of models that have come here."""
        for left in (self._unwritten, self._elsewhere):
            for name, (options, by) in list(left.items()):
                if left.get(name) == (options, by):  # Not if another configuration has come meanwhile.
                    await self._configure(options, by)

    async def _configure(self, options: ConsumerOptions, by: str) -> None:
        self._forget_configured(options.name)
        self._elsewhere[options.name] = options, by  # Also meanwhile: who asks for it is to try again.
        try:
            await self.ensure(options, by)
        except ServiceUnavailable:  # The process that owns its model has the same configuration.
            return
        except (Contradiction, InvalidInput, LimitReached) as error:
            self._fall_short("its configuration is refused", options, error)
        except VolumeFailed as error:
            self._unwritten[options.name] = options, by
            self._fall_short("its configuration waits to be written down", options, error)
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
        """Make the consumers of the probes of all living processes whose models are here or are to be; again where
        one was deleted. Until cancelled: what keeps one from being made ends nothing.
        """
        while True:
            for process in self._models.owners.processes():
                name = probe_of(process.name)
                shortcoming = await self._make_probe(name, by)
                if name == mine.name:
                    mine.shortcoming = shortcoming
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _make_probe(self, name: str, by: str) -> str:
        """Make a probe's consumer; returns what keeps it from being made, empty if nothing does."""
        if name in self._registry.consumers:
            return ""
        try:
            await self.ensure(ConsumerOptions(name, name), by)
        except ServiceUnavailable:  # The owner of its model makes it, or this process does once it has it.
            return ""
        except DeltasyncError as error:
            return f"consumer {name!r} cannot be made: {error}"
        except Exception as error:  # noqa: BLE001  # a probe must end no service
            text = "the consumer of a probe, which is tried again"
            self._events.emit(EventKind.FAILED, text, error, consumer=name)
            return f"consumer {name!r} cannot be made: {error}"
        return ""


_AGAIN_SECONDS = 1.0


def _words(policy: Policy) -> str:
    return policy.words or "everything"
