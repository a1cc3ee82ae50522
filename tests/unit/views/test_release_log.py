"""How much of a release is handed to the log before it waits for the disk."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from deltasync.core.rows import RowBatch
from deltasync.core.tables import TableSpec
from deltasync.storage.write_queue import WriteQueue
from deltasync.views.release_log import Piece, ReleaseLog

ROWS = RowBatch.of_table(TableSpec("t", 1, 1), np.zeros(1, np.int64), np.zeros((1, 1), np.float32))


class Written(Future[None]):
    """Done once it is waited for."""

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.set_result(None)
        super().result(timeout)


class Store:
    """Takes pieces, and counts how many of them wait together."""

    def __init__(self, most_bytes: int) -> None:
        self.queue = WriteQueue(most_bytes)
        self.queue.submit(lambda _: None, 0)  # Of somebody else.
        self.writes: list[Future[None]] = []
        self.most = self.released = 0

    def drop(self, number: int) -> Future[None]:
        return Written()

    def append(self, *_: Any) -> Future[None]:
        self.writes.append(Written())
        self.most = max(self.most, sum(not each.done() for each in self.writes))
        return self.writes[-1]

    def write_release(self, *_: Any) -> None:
        self.released += 1


@pytest.mark.parametrize(("most_bytes", "together"), [(1 << 20, 16), (1, 1)])
def test_while_the_log_has_too_much_of_all_one_piece_waits_at_a_time(most_bytes: int, together: int) -> None:
    store = Store(most_bytes)
    release_log = ReleaseLog(store, 1)  # type: ignore[arg-type]
    pieces = [Piece(0, index, ROWS) for index in range(40)]
    for each in pieces:
        release_log.add(each)
    assert len(store.writes) == (together if together > 1 else 0)
    assert release_log.settle(object()) == (pieces, [], None)  # type: ignore[arg-type]
    assert (store.most, store.released, release_log.complete) == (together, 1, True)
