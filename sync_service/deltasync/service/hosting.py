"""The models that this process owns, on logs that other processes can go on with."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from deltasync.core.errors import NotOwner, StorageFailed
from deltasync.core.events import EventKind
from deltasync.core.owner import Owner
from deltasync.service.moves import Moves
from deltasync.service.service import Service
from deltasync.storage.log_store import LogStore

_SECONDS = 1.0


class SharedLogs(Protocol):
    """Logs of which one process at a time has each. What blocks, blocks."""

    def open(self, model: str, owner: Owner) -> LogStore:
        """Have a model's log: from here on, who had it before can write nothing. Blocks.

        Raises:
            StorageFailed: it cannot be reached, or read.
        """

    def close_log(self, model: str, *, written: bool) -> None:
        """Have a log no more; what is submitted is written before, or refused. Blocks."""

    def lost(self, model: str) -> StorageFailed | None:
        """Why a log that is open is this process's no more, or not what it was; None while it is."""


class Files(Protocol):
    """Where the files of a model come from that another process has had."""

    def make(self, model: str, log: LogStore) -> None:
        """Have files of a model from which, with its log, it can come back. Blocks.

        Raises:
            StorageFailed: they cannot be had now.
        """


class Hosting:
    """Takes models for which this process is made the owner, and gives them up. Used in the event loop."""

    def __init__(self, service: Service, logs: SharedLogs, files: Files) -> None:
        self._service, self._logs, self._files = service, logs, files
        self._moves = Moves(service)
        self._owned = dict[str, Owner]()
        self._turns = dict[str, asyncio.Lock]()

    @property
    def models(self) -> list[str]:
        """Names of those that are here, or about to be."""
        return sorted(self._owned)

    async def take(self, model: str, owner: Owner) -> None:
        """Have a model. If that fails nothing of it is here.

        Raises:
            StorageFailed: its log cannot be reached or read, or there are no files of it to be had.
        """
        async with self._turn(model):
            self._owned[model] = owner
            try:
                log = await asyncio.to_thread(self._logs.open, model, owner)
                await asyncio.to_thread(self._files.make, model, log)
                await self._moves.take(model, log)
            except BaseException:
                await self._give_up(model, _gone(model, None), written=False)
                raise

    async def give_up(self, model: str, heir: Owner | None = None, *, written: bool = False) -> None:
        """Have a model no more, of which another process is the owner, or is to be.

        Args:
            model: its name.
            heir: who; None where nobody knows yet.
            written: whether what is under way is finished first: this process is the owner still.
        """
        async with self._turn(model):
            await self._give_up(model, _gone(model, heir), written=written)

    async def look_after(self) -> None:
        """Give up what is lost; have that again of which the log went back. Until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            for model, owner in list(self._owned.items()):
                if error := self._logs.lost(model):
                    self._service.events.emit(EventKind.FAILED, "its log is lost", error, model=model)
                    await self.give_up(model)
                    del owner

    async def _give_up(self, model: str, refusal: Callable[[], NotOwner], *, written: bool) -> None:
        if self._owned.pop(model, None) is None:
            return
        if not written:  # First: who waits for it to be written would wait for long.
            await asyncio.to_thread(self._logs.close_log, model, written=False)
        await self._moves.give_up(model, refusal, written=written)
        if written:
            await asyncio.to_thread(self._logs.close_log, model, written=True)

    def _turn(self, model: str) -> asyncio.Lock:
        return self._turns.setdefault(model, asyncio.Lock())


def _gone(model: str, heir: Owner | None) -> Callable[[], NotOwner]:
    where = f"process {heir.process} has it" if heir else "another process is to have it"
    return lambda: NotOwner(f"model {model!r} is not here any more: {where}; reconnect", owner=heir)
