"""A service of one process, which owns whatever there is."""

from collections.abc import Collection, Sequence

from deltasync.core.errors import NotFound, NotOwner
from deltasync.core.owner import Owner
from deltasync.ownership.member import Member


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
