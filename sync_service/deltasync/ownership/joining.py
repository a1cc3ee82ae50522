"""A process that is about to take its place among others: until then it answers for nothing."""

from typing import NoReturn

from deltasync.core.errors import NotOwner
from deltasync.core.owner import Owner
from deltasync.ownership.alone import Alone


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
