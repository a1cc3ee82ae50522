"""The interface to ownership of models, for a service of one process or of a cluster."""

from collections.abc import Collection, Sequence
from typing import NoReturn, Protocol

from deltasync.base.errors import NotFound, NotOwner, Owner
from deltasync.cluster.bucket import Member


class Owners:
    """The owners of models, here for a single process, which owns them all. `SharedOwners` is for a cluster.

    Used in the event loop. Methods that wait for brokers are coroutines, and raise `ServiceUnavailable` if brokers
    do not answer.
    """

    def __init__(self, me: Member) -> None:
        self._me = me

    @property
    def me(self) -> Member:
        """This process."""
        return self._me

    @property
    def confirmed(self) -> bool:
        """Whether this process may serve its models: brokers confirmed a heartbeat within the lease."""
        return True

    def check(self, model: str) -> None:
        """Raise `NotOwner` unless this process serves a model, or would own it if it is new.

        The error names the process to ask, if there is one.
        """

    def owner_of(self, model: str) -> Owner | None:  # noqa: ARG002
        """The live owner of a model; None without one."""
        return self.me.owner()

    def models(self) -> Collection[str]:
        """The models that other processes of the cluster may have."""
        return ()

    def model_of(self, consumer: str) -> str | None:  # noqa: ARG002
        """The model of a consumer; None if the cluster does not know it."""
        return None

    def consumers_of(self, model: str) -> Collection[str]:  # noqa: ARG002
        """The names of the consumers of a model that the cluster knows."""
        return ()

    def processes(self) -> Sequence[Member]:
        """The live processes of the cluster, including this one, by name."""
        return [self.me]

    def gone(self) -> Sequence[Member]:
        """The processes whose lease expired without a goodbye, by name."""
        return ()

    async def claim(self, model: str) -> Owner:  # noqa: ARG002
        """Own a model if this process already does or is its heir. Its log is open here when this returns.

        Otherwise, or if this process cannot take it over now, raise `NotOwner`.
        """
        return self.me.owner()

    async def move(self, model: str, to: str) -> None:
        """Save a model (`Host.save`) and hand it over; `NotFound` if process `to` is away or draining."""
        raise NotFound(
            f"model {model!r} cannot move to {to!r}: this process is not in a cluster and owns its log alone"
        )

    async def lost(self, model: str, reason: str) -> None:
        """Give up a model after another process took over its log."""
        raise NotOwner(f"model {model!r}: {reason}")

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


class JoiningProcess(Owners):
    """The `Owners` of a process that has not joined its cluster yet: it owns nothing and knows no others."""

    @property
    def confirmed(self) -> bool:
        """False."""
        return False

    def check(self, model: str) -> None:
        """Raise NotOwner."""
        self._refuse(model)

    def owner_of(self, model: str) -> Owner | None:  # noqa: ARG002
        """None: this process has not read the bucket yet."""
        return None

    async def claim(self, model: str) -> Owner:
        """Raise NotOwner."""
        self._refuse(model)

    async def reserve_consumer(self, name: str, model: str) -> None:  # noqa: ARG002
        """Raise NotOwner."""
        self._refuse(model)

    def _refuse(self, model: str) -> NoReturn:
        raise NotOwner(f"model {model!r}: this process is joining the cluster; try again")


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
