"""Texts of ranks for each other, in the store of the process group. Reading them takes no collective."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, repeat
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from deltasync.base.errors import DeltasyncError
from deltasync.base.words import counted
from deltasync.trainer.distributed.ranks import all_ranks, this_rank

logger = logging.getLogger(__name__)

# The first line tells of a mistake while somebody still looks; those after it must not fill the log.
_FIRST_SECONDS, _EACH_SECONDS = 10.0, 60.0
_MOST = 8


def wait_aloud(arrived: Callable[[float], bool], what: Callable[[], str]) -> None:
    """Wait for other ranks, and log that after ten seconds, and every minute from then on.

    Args:
        arrived: wait this number of seconds at most; return whether the ranks have come.
        what: name what this rank waits for. Called for each line of the log.
    """
    waited = 0.0
    for seconds in chain([_FIRST_SECONDS], repeat(_EACH_SECONDS)):
        if arrived(seconds):
            return
        waited += seconds
        logger.warning("rank %d has waited %.0f s for %s", this_rank(), waited, what())


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 5 others`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some([*map(str, ranks)])}"


def some(names: Sequence[str]) -> str:
    """Names as they are ordered, of many the first: `a, b and 390 others`."""
    left = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {counted(left, 'other')}" if left > 0 else "")


# How often this process has made one of a name: ranks count alike, and so find each other's texts.
_MADE = Counter[str]()


class RankStore:
    """One text of each rank, replaced by newer ones. All `ranks` make their stores in the same order.

    Attributes:
        rank: this one.
        ranks: all that write, in order.
    """

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Write nothing yet.

        Args:
            name: purpose of the store, in messages.
            ranks: None for all ranks of the process group.
        """
        self._name, self.rank = name, this_rank()
        self.ranks = all_ranks() if ranks is None else list(ranks)
        self._text = ""
        self._store: Any = None
        if len(self.ranks) > 1:
            # torchrun restarts ranks with the store that has the texts of those before.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            key = f"deltasync/{attempt}/{name}/{crc32(repr(self.ranks).encode())}"
            _MADE[key] += 1
            world: Any = dist.group.WORLD
            self._store = PrefixStore(f"{key}/{_MADE[key]}", world.get_group_store())

    def write(self, text: str) -> None:
        """Write this rank's text; nothing if the store is gone. Takes microseconds: a TCPStore does not answer."""
        self._text = text
        if self._store:
            with suppress(RuntimeError):
                self._store.set(str(self.rank), text)

    def settle(self) -> None:
        """Wait until the store has what this rank has written, a second at most."""
        if self._store:
            with suppress(RuntimeError):
                self._store.wait([str(self.rank)], timedelta(seconds=1))

    def wait_for_all(self) -> None:
        """Wait until each rank has written a text.

        Raises:
            DeltasyncError: a rank has not within the store's timeout.
        """
        if self._store is None:
            return
        store, keys, started = self._store, [*map(str, self.ranks)], time.monotonic()
        longest = _timeout(store)

        def missing() -> str:
            return named([rank for rank in self.ranks if not store.check([str(rank)])])

        def arrived(seconds: float) -> bool:
            with suppress(dist.DistStoreError):
                store.wait(keys, timedelta(seconds=seconds))
                return True
            if time.monotonic() - started > longest.total_seconds():
                raise DeltasyncError(f"{missing()} did not come to {self._name} within {longest}")
            return False

        wait_aloud(arrived, lambda: f"{missing()} to come to {self._name}, as all ranks have to")

    def read(self) -> list[str]:
        """The texts, in the order of `ranks`; each has written one.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._store is None:
            return [self._text]
        return [text.decode() for text in self._store.multi_get([*map(str, self.ranks)])]


def _timeout(store: Any) -> timedelta:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    timeout: timedelta = store.timeout
    return timeout
