"""Names of consumers, each of which follows one model, whoever owns it."""

from deltasync.core.errors import Contradiction, ServiceUnavailable
from deltasync.ownership.bucket import Changed
from deltasync.ownership.ledger import Ledger
from deltasync.ownership.table import Table

# So often the bucket is read anew because another process has written the same name.
_TRIES = 3


class ConsumerNames:
    """The names reserved by this process, for the models that it owns. In the event loop."""

    def __init__(self, ledger: Ledger, table: Table) -> None:
        self._ledger, self._table = ledger, table
        self._reserved = dict[str, str]()

    async def reserve(self, name: str, model: str) -> None:
        """Have a name for a model; again changes nothing.

        Raises:
            Contradiction: it is of a consumer of another model.
            ServiceUnavailable: brokers do not answer.
        """
        for _ in range(_TRIES):
            follows = self._table.consumers.get(name, model)
            if follows != model:
                raise Contradiction(f"consumer {name!r} follows another model", detail=f": {follows!r}")
            if await self._wrote(name, model):
                self._reserved[name] = model
                return
        raise ServiceUnavailable(f"consumer {name!r}: its name is being written by other processes; try again")

    async def forget(self, name: str) -> None:
        """Free a name; again changes nothing.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        self._reserved.pop(name, None)
        for _ in range(_TRIES):
            if await self._wrote(name, ""):
                return
        raise ServiceUnavailable(f"consumer {name!r}: its name is being written by other processes; try again")

    def drop(self, model: str) -> None:
        """A model is not owned here any more: its owner says which consumers it has."""
        self._reserved = {name: of for name, of in self._reserved.items() if of != model}

    def unsaid(self, owned: set[str]) -> dict[str, str]:
        """What the bucket does not know of the consumers of models owned here: the model of each, empty for those
        that are no more.
        """
        stored = self._table.stored_consumers
        unsaid = {name: model for name, model in self._reserved.items() if model in owned and name not in stored}
        left = {name for name, model in stored.items() if model in owned and self._reserved.get(name) != model}
        return unsaid | dict.fromkeys(left, "")

    async def say(self, name: str, model: str) -> None:
        """Write one of them down; if the bucket has changed meanwhile, the next time."""
        await self._wrote(name, model)

    async def _wrote(self, name: str, model: str) -> bool:
        if self._table.stored_consumers.get(name, "") == model:
            return True
        try:
            await self._ledger.write_consumer(name, model)
        except Changed:
            await self._ledger.read()
            return False
        return True
