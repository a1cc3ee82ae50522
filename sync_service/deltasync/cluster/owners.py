"""What the rest of a service asks about owners, in a service of one process or of several."""

from collections.abc import Collection, Sequence
from typing import NoReturn, Protocol

from deltasync.base.errors import NotFound, NotOwner, Owner
from deltasync.cluster.member import Member


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
        """Save a model (`Host.save`), and give it up for another process to take.

        Raises:
            NotOwner: this process does not own it.
            NotFound: no such process is alive, or it is draining.
        """

    async def lost(self, model: str, reason: str) -> None:
        """Give a model up that was found to be owned by another: its log refuses what this process appends."""

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted; nobody owns it until somebody claims it anew."""

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


class Host(Protocol):
    """Takes models into this process and gives them up, as their owner changes."""

    async def take(self, model: str, owner: Owner) -> None:
        """Open its log as `owner`, fence others off it, and recover the tables. Its consumers are reserved here.

        Raises:
            DeltasyncError: it cannot; it is given back, and tried again later, perhaps by another process.
        """

    async def give_up(self, model: str, reason: str) -> None:
        """End its streams, and close its log. Called, too, after `take` failed or was cancelled."""

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted, or was never published."""

    async def save(self, model: str) -> None:
        """Write a checkpoint, from which the next owner is quickly at the head. That it fails hinders no move."""

    async def known(self) -> Collection[str]:
        """The names of all models that have a log, whoever owns them.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """


class Alone:
    """Everything is owned here, and nobody else is there: an `Owners` that needs no brokers.

    Names of consumers are not kept: the one log has them all.
    """

    confirmed = True

    def __init__(self, me: Member) -> None:
        self.me = me

    def check(self, model: str) -> None:
        """All models are answered for here."""

    def owner_of(self, _model: str) -> Owner | None:
        """This process."""
        return self.me.owner()

    def models(self) -> Collection[str]:
        """None but those that the service knows itself."""
        return ()

    def model_of(self, _consumer: str) -> str | None:
        """None that the service does not know itself."""
        return None

    def consumers_of(self, _model: str) -> Collection[str]:
        """None that the service does not know itself."""
        return ()

    def processes(self) -> Sequence[Member]:
        """This one."""
        return [self.me]

    def gone(self) -> Sequence[Member]:
        """None."""
        return ()

    async def claim(self, _model: str) -> Owner:
        """Nothing is to be done."""
        return self.me.owner()

    async def release(self, model: str, to: str | None = None) -> None:
        """There is nobody to have it.

        Raises:
            NotFound: always.
        """
        name = f" {to!r}" if to else ""
        raise NotFound(
            f"model {model!r} stays: there is no other process{name} to own it; the log is of this one alone"
        )

    async def move(self, model: str, to: str) -> None:
        """There is nobody to have it.

        Raises:
            NotFound: always.
        """
        await self.release(model, to)

    async def lost(self, model: str, reason: str) -> None:
        """No other process can have it.

        Raises:
            NotOwner: always.
        """
        raise NotOwner(f"model {model!r}: {reason}")

    async def forget(self, model: str) -> None:
        """Nothing is to be done."""

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Nothing is to be done."""

    async def forget_consumer(self, name: str) -> None:
        """Nothing is to be done."""

    async def drain(self) -> None:
        """Nothing is to be done: there is nobody to have the models."""

    async def start(self) -> None:
        """Nothing is to be done."""

    async def close(self) -> None:
        """Nothing is to be done."""


class Joining(Alone):
    """Nothing is owned here yet, and nobody else is known: an `Owners` until there is a better one."""

    confirmed = False

    def check(self, model: str) -> None:
        """Always raises NotOwner."""
        self._refuse(model)

    def owner_of(self, _model: str) -> Owner | None:
        """Nobody knows."""
        return None

    async def claim(self, model: str) -> Owner:
        """Always raises NotOwner."""
        self._refuse(model)

    async def reserve_consumer(self, _name: str, model: str) -> None:
        """Always raises NotOwner."""
        self._refuse(model)

    def _refuse(self, model: str) -> NoReturn:
        raise NotOwner(f"model {model!r}: this process is about to join the others; try again")
