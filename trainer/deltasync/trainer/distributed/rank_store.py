"""Texts that ranks share through the store of the process group, without collectives."""

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

# The first warning comes while the user still watches the start; later ones must not fill the log.
_FIRST_SECONDS, _EACH_SECONDS = 10.0, 60.0
_MOST = 8


def wait_aloud(arrived: Callable[[float], bool], what: Callable[[], str]) -> None:
    """Wait for other ranks, with a warning after ten seconds and then every minute.

    Args:
        arrived: waits up to this number of seconds and returns whether the ranks have arrived.
        what: returns what this rank waits for; called for each warning.
    """
    waited = 0.0
    for seconds in chain([_FIRST_SECONDS], repeat(_EACH_SECONDS)):
        if arrived(seconds):
            return
        waited += seconds
        logger.warning("rank %d has waited %.0f s for %s", this_rank(), waited, what())


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 5 others`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some([*map(str, ranks)])}"


def some(names: Sequence[str]) -> str:
    """The first eight names, and the number of the others: `a, b, c, d, e, f, g, h and 390 others`."""
    left = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {counted(left, 'other')}" if left > 0 else "")


# Number of stores by key. All ranks make stores in the same order, and so find each other's texts by number.
_MADE = Counter[str]()


class RankStore:
    """The latest text of each rank. All `ranks` make their stores in the same order.

    Attributes:
        rank: this rank.
        ranks: all ranks that write, in order.
    """

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Open the store without writing.

        Args:
            name: purpose of the store, in messages.
            ranks: the ranks that write; None = all ranks of the process group.
        """
        self._name, self.rank = name, this_rank()
        self.ranks = all_ranks() if ranks is None else list(ranks)
        self._text = ""
        self._store: Any = None
        if len(self.ranks) > 1:
            # After a restart by torchrun, the store still has the texts of the earlier processes.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            key = f"deltasync/{attempt}/{name}/{crc32(repr(self.ranks).encode())}"
            _MADE[key] += 1
            world: Any = dist.group.WORLD
            self._store = PrefixStore(f"{key}/{_MADE[key]}", world.get_group_store())

    def write(self, text: str) -> None:
        """Write this rank's text. Does nothing if the store is gone.

        Takes microseconds, because a TCPStore does not answer a write.
        """
        self._text = text
        if self._store:
            with suppress(RuntimeError):
                self._store.set(str(self.rank), text)

    def settle(self) -> None:
        """Wait up to a second until the store has this rank's text."""
        if self._store:
            with suppress(RuntimeError):
                self._store.wait([str(self.rank)], timedelta(seconds=1))

    def wait_for_all(self) -> None:
        """Wait until each rank has written a text.

        Raises:
            DeltasyncError: a rank has written none within the store's timeout.
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
                raise DeltasyncError(f"{missing()} did not reach {self._name} within {longest}")
            return False

        wait_aloud(arrived, lambda: f"{missing()} to reach {self._name}, as all ranks must")

    def read(self) -> list[str]:
        """The texts in the order of `ranks`, once each rank has written one.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._store is None:
            return [self._text]
        return [text.decode() for text in self._store.multi_get([*map(str, self.ranks)])]

    def leave(self) -> None:
        """After `read`: wait until all ranks have read, because the process of one of them may host the store."""
        if self._store:
            with suppress(RuntimeError):  # The host has ended, which it did after all had read.
                self._store.set(f"{self.rank} has read", "")
                self._store.wait([f"{rank} has read" for rank in self.ranks], timedelta(seconds=_READ_SECONDS))


# A rank that has started to wait reads within this time, unless it has ended.
_READ_SECONDS = 60


def _timeout(store: Any) -> timedelta:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    timeout: timedelta = store.timeout
    return timeout
