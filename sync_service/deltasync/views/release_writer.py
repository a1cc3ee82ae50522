"""Making one release, on the model's thread: looking at what is dirty, and giving what was picked."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, Values
from deltasync.core.value_types import encode
from deltasync.storage.log import Log
from deltasync.views.ranking import DirtyRows, Floats, Mask
from deltasync.views.table import ViewTable
from deltasync.wire.rows import CHUNK_BYTES

# Records handed to the log and not yet on disk: what bounds the memory of a large release.
_UNWRITTEN_RECORDS = 16


def look(tables: Sequence[ViewTable], seen: int, policy: Policy, overdue_version: int) -> list[DirtyRows]:
    """The dirty rows of every table. Rows that are dirty since `overdue_version` or before are overdue."""
    found = []
    for table in tables:
        ids, norms = table.look(seen)
        never_sent, old = table.never_sent(ids), table.since[ids] <= overdue_version
        found.append(DirtyRows(ids, norms, never_sent, old, policy.row_bytes(table.source.spec)))
    return found


@dataclass(frozen=True)
class _Piece:
    """Some rows of a table, on their way to the log and then into the view."""

    table: ViewTable
    ids: Ids
    encoded: Values
    norms: Floats
    written: Future[None]


class ReleaseWriter:
    """Writes the rows of releases into the log, and then into the view.

    Attributes:
        log_bytes: bytes of its records in the log, less those that were dropped.
    """

    def __init__(self, log: Log, name: str) -> None:
        self._log = log
        self._name = name
        self.log_bytes = 0

    def give(
        self, tables: Sequence[ViewTable], dirty: Sequence[DirtyRows], taken: Sequence[Mask], number: int
    ) -> StorageFailed | None:
        """Give the taken rows as release `number`. Rows that could not be written stay dirty; returns why."""
        failure: StorageFailed | None = None
        unwritten: deque[_Piece] = deque()
        for piece in self._pieces(tables, dirty, taken, number):
            unwritten.append(piece)
            if len(unwritten) > _UNWRITTEN_RECORDS:
                failure = _settle(unwritten.popleft(), number) or failure
        while unwritten:
            failure = _settle(unwritten.popleft(), number) or failure
        return failure

    def _pieces(
        self, tables: Sequence[ViewTable], dirty: Sequence[DirtyRows], taken: Sequence[Mask], number: int
    ) -> Iterator[_Piece]:
        for slot, (table, rows, mask) in enumerate(zip(tables, dirty, taken, strict=True)):
            ids, norms = rows.ids[mask], rows.norms[mask]
            step = max(1, CHUNK_BYTES // table.held.spec.row_bytes)
            for index, start in enumerate(range(0, len(ids), step)):
                piece = slice(start, start + step)
                yield self._piece(table, ids[piece], norms[piece], (number, slot, index))

    def _piece(self, table: ViewTable, ids: Ids, norms: Floats, key: tuple[int, int, int]) -> _Piece:
        encoded = encode(table.source.rows_of(ids), table.delivery.value_type)
        record = table.record(ids, encoded, norms)
        self.log_bytes += sum(memoryview(each).nbytes for each in record)
        return _Piece(table, ids, encoded, norms, self._log.append(self._name, *key, *record))


def _settle(piece: _Piece, number: int) -> StorageFailed | None:
    try:
        piece.written.result()
    except StorageFailed as error:
        return error
    piece.table.give(piece.ids, piece.encoded, piece.norms, number)
    return None
