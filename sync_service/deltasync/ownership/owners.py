"""Who owns which model: what the rest of the service asks, and what it is told."""

from collections.abc import Collection, Sequence
from typing import Protocol

from deltasync.core.owner import Owner
from deltasync.ownership.member import Member


class Owners(Protocol):
    """Which process owns which model. Used in the event loop; what waits for brokers is a coroutine."""

    @property
    def me(self) -> Member:
        """This process."""

    @property
    def confirmed(self) -> bool:
        """Whether this process may answer for its models: the others have heard of it within the lease."""

    def check(self, model: str) -> None:
        """Make sure that a model is answered for here. Passes, too, for one that nobody has heard of yet and that
        this process would get.

        Raises:
            NotOwner: it is not, or not yet; with the process to ask, where that is known.
        """

    def owner_of(self, model: str) -> Owner | None:
        """Who owns a model; None if nobody does, or whoever did is gone."""

    def models(self) -> Collection[str]:
        """The models that anybody is known to have or have had."""

    def model_of(self, consumer: str) -> str | None:
        """The model that a consumer follows; None if no such consumer is known."""

    def consumers_of(self, model: str) -> Collection[str]:
        """The names of the consumers that are known to follow a model."""

    def processes(self) -> Sequence[Member]:
        """The processes of the service that are alive, this one among them, by name."""

    def gone(self) -> Sequence[Member]:
        """The processes that went silent for longer than the lease without saying goodbye, by name."""

    async def claim(self, model: str) -> Owner:
        """Own a model, if this process has it, or is to have it: when this returns, it was taken.

        Raises:
            NotOwner: another process has it or is to have it, or this one cannot take it now.
            ServiceUnavailable: brokers do not answer.
        """

    async def release(self, model: str, to: str | None = None) -> None:
        """Give a model up, for another process to take: the one named, if it lives.

        Raises:
            NotOwner: this process does not own it.
            NotFound: no such process is alive.
        """

    async def move(self, model: str, to: str) -> None:
        """Save a model (`Models.save`), and give it up for another process to take.

        Raises:
            NotOwner: this process does not own it.
            NotFound: no such process is alive, or it is draining.
        """

    async def lost(self, model: str, reason: str) -> None:
        """Give a model up that was found to be owned by another: its log refuses what this process appends."""

    async def forget(self, model: str) -> None:
        """A model was deleted: nobody is to own it, until somebody claims it anew."""

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Have the name of a consumer for a model owned here. Again changes nothing.

        Raises:
            Contradiction: it follows another model.
            ServiceUnavailable: brokers do not answer.
        """

    async def forget_consumer(self, name: str) -> None:
        """Free the name of a consumer of a model owned here. Again changes nothing."""

    async def drain(self) -> None:
        """Take no more models, and give away those owned here, one after the other, each saved first."""

    async def start(self) -> None:
        """Begin: see who is there, be seen, and take what this process is to have.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """

    async def close(self) -> None:
        """Give all models up, and leave."""


class Models(Protocol):
    """The service's side: what is done with a model when its owner changes."""

    async def take(self, model: str, owner: Owner) -> None:
        """Open its log as `owner`, fence others off it, and recover the tables. Its consumers are reserved here.

        Raises:
            DeltasyncError: it cannot; it is given back, and tried again later, perhaps by another process.
        """

    async def give_up(self, model: str, reason: str) -> None:
        """End its streams, and close its log. Called, too, after `take` failed or was cancelled."""

    async def save(self, model: str) -> None:
        """Write a checkpoint, from which the next owner is quickly at the head. That it fails hinders no move."""

    async def known(self) -> Collection[str]:
        """The names of all models that have a log, whoever owns them.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
