"""The interface to ownership of models, for a service of one process or of a cluster."""

from collections.abc import Collection, Sequence
from typing import NoReturn, Protocol

from deltasync.base.errors import NotFound, NotOwner, Owner
from deltasync.cluster.bucket import Member


class Owners(Protocol):
    """The owners of models. Used in the event loop.

    Methods that wait for brokers are coroutines, and raise `ServiceUnavailable` if brokers do not answer.
    """

    @property
    def me(self) -> Member:
        """This process."""

    @property
    def confirmed(self) -> bool:
        """Whether this process may serve its models: brokers confirmed a heartbeat within the lease."""

    def check(self, model: str) -> None:
        """Raise `NotOwner`, with the process to ask if there is one, unless this process serves a model or would
        own it if it is new.
        """

    def owner_of(self, model: str) -> Owner | None:
        """The live owner of a model; None without one."""

    def models(self) -> Collection[str]:
        """All models of the cluster that this process knows."""

    def model_of(self, consumer: str) -> str | None:
        """The model of a consumer; None if there is no such consumer."""

    def consumers_of(self, model: str) -> Collection[str]:
        """The names of the consumers that follow a model."""

    def processes(self) -> Sequence[Member]:
        """The live processes of the cluster, including this one, by name."""

    def gone(self) -> Sequence[Member]:
        """The processes whose lease expired without a goodbye, by name."""

    async def claim(self, model: str) -> Owner:
        """Own a model if this process already does or is its heir. Its log is open here when this returns.

        Otherwise, or if this process cannot take it over now, raise `NotOwner`.
        """

    async def move(self, model: str, to: str) -> None:
        """Save a model (`Host.save`) and hand it over; `NotFound` if process `to` is away or draining."""

    async def lost(self, model: str, reason: str) -> None:
        """Give up a model after another process took over its log."""

    async def forget(self, model: str) -> None:
        """Remove the log and the claim of a deleted model."""

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Reserve the name of a consumer for a model owned here. Idempotent.

        Raise `Contradiction` if a consumer of another model has it.
        """

    async def forget_consumer(self, name: str) -> None:
        """Free the name of a consumer of a model owned here. Idempotent."""

    async def drain(self) -> None:
        """Take over no more models; save the models owned here and hand them over one by one."""


class Host(Protocol):
    """Opens and closes models in this process as their owner changes."""

    async def take(self, model: str, owner: Owner) -> None:
        """Open a model's log as `owner`, fence off other processes, recover the tables, and reserve its consumers.

        After any error the model is released, and this or another process retries later.
        """

    async def give_up(self, model: str, reason: str) -> None:
        """End a model's streams and close its log. Also called after `take` failed or was cancelled."""

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted, or was never published."""

    async def save(self, model: str) -> None:
        """Write a checkpoint, to shorten the log that the next owner has to read. May fail."""

    async def models_with_log(self) -> Collection[str]:
        """The names of all models that have a log, in any process."""


class SingleProcess:
    """The `Owners` of a single process, which owns all models and needs no brokers.

    Its log has the names of all consumers.
    """

    confirmed = True

    def __init__(self, me: Member) -> None:
        self.me = me

    def check(self, model: str) -> None:
        """Do nothing: this process serves all models."""

    def owner_of(self, _model: str) -> Owner | None:
        """This process."""
        return self.me.owner()

    def models(self) -> Collection[str]:
        """None besides those of the service itself."""
        return ()

    def model_of(self, _consumer: str) -> str | None:
        """None besides those of the service itself."""
        return None

    def consumers_of(self, _model: str) -> Collection[str]:
        """None besides those of the service itself."""
        return ()

    def processes(self) -> Sequence[Member]:
        """This process."""
        return [self.me]

    def gone(self) -> Sequence[Member]:
        """None."""
        return ()

    async def claim(self, _model: str) -> Owner:
        """Do nothing."""
        return self.me.owner()

    async def move(self, model: str, to: str) -> None:
        """Refuse: there is no other process."""
        raise NotFound(
            f"model {model!r} cannot move to {to!r}: this process is not in a cluster and owns its log alone"
        )

    async def lost(self, model: str, reason: str) -> None:
        """Refuse: no other process can own it."""
        raise NotOwner(f"model {model!r}: {reason}")

    async def forget(self, model: str) -> None:
        """Do nothing."""

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Do nothing."""

    async def forget_consumer(self, name: str) -> None:
        """Do nothing."""

    async def drain(self) -> None:
        """Do nothing: no other process could take the models."""


class JoiningProcess(SingleProcess):
    """The `Owners` of a process that has not joined its cluster yet: it owns nothing and knows no others."""

    confirmed = False

    def check(self, model: str) -> None:
        """Raise NotOwner."""
        self._refuse(model)

    def owner_of(self, _model: str) -> Owner | None:
        """None: this process has not read the bucket yet."""
        return None

    async def claim(self, model: str) -> Owner:
        """Raise NotOwner."""
        self._refuse(model)

    async def reserve_consumer(self, _name: str, model: str) -> None:
        """Raise NotOwner."""
        self._refuse(model)

    def _refuse(self, model: str) -> NoReturn:
        raise NotOwner(f"model {model!r}: this process is joining the cluster; try again")
