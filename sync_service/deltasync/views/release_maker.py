"""Making one release: finding the dirty rows, picking some, and writing them to the log and then into the view."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, RowBatch
from deltasync.feeds.frozen_release import Head
from deltasync.feeds.model import Model
from deltasync.views.ranking import DirtyRows, Floats, Mask, pick
from deltasync.views.statistics import Amount, Backlog, ReleaseStatistics, amount_of, total
from deltasync.views.store import NewestRelease, ViewState, ViewStore
from deltasync.views.table import ViewTable
from deltasync.wire.row_messages import CHUNK_BYTES

# Records handed to the log and not yet on disk: what bounds the memory of a large release.
_UNWRITTEN_RECORDS = 16


@dataclass(frozen=True)
class _Piece:
    """Some rows of a table, on their way to the log and then into the view."""

    table: ViewTable
    rows: RowBatch
    logged: Future[None]


class ReleaseMaker:
    """Makes the releases of one view, on the model's thread: no cut is applied and nothing is frozen meanwhile."""

    def __init__(self, model: Model, store: ViewStore) -> None:
        self._model = model
        self._store = store

    def make(self, policy: Policy, overdue_version: int) -> None:
        """Make the next release. Rows that are dirty since `overdue_version` or before are overdue.

        Raises:
            StorageFailed: not all of it could be written. Rows that were not written are still dirty; if only the
                release itself could not be written down, the next call does that first.
        """
        self._store.retry()
        seal, state = self._model.applied, self._store.state
        if seal is None or state.head is None:
            return
        dirty = find_dirty(state.tables, state.compared_version, policy, overdue_version)
        picked = pick(dirty, policy)
        head = Head(state.head.number + 1, seal.version, seal.step, seal.step_end_unix_ns)
        failure = self._write(state.tables, dirty, picked.taken, head.number)
        backlog = _backlogs(state.tables, dirty)
        compared = replace(state, compared_version=seal.version, backlog=backlog)
        self._store.advance(_released(compared, head, _taken(state.tables, dirty), picked.reason))
        if failure:
            raise failure

    def _write(
        self, tables: Sequence[ViewTable], dirty: Sequence[DirtyRows], taken: Sequence[Mask], number: int
    ) -> StorageFailed | None:
        """Write the taken rows as release `number`. Rows that could not be written stay dirty; returns why."""
        failure: StorageFailed | None = None
        pieces: deque[_Piece] = deque()
        for piece in self._pieces(tables, dirty, taken, number):
            pieces.append(piece)
            if len(pieces) > _UNWRITTEN_RECORDS:
                failure = _finish(pieces.popleft(), number) or failure
        while pieces:
            failure = _finish(pieces.popleft(), number) or failure
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
        rows = table.encoded(ids, norms)
        return _Piece(table, rows, self._store.append(*key, rows))


def find_dirty(
    tables: Sequence[ViewTable], compared_version: int, policy: Policy, overdue_version: int
) -> list[DirtyRows]:
    """The dirty rows of every table, on the model's thread.

    Args:
        tables: the tables of a view.
        compared_version: the version at which they were last compared with the model's.
        policy: what says how rows are sent.
        overdue_version: rows that are dirty since this version or before are overdue.
    """
    found = []
    for table in tables:
        ids, norms = table.find_dirty(compared_version)
        never_sent, overdue = table.never_sent(ids), table.dirty_since[ids] <= overdue_version
        found.append(DirtyRows(ids, norms, never_sent, overdue, policy.row_bytes(table.source.spec)))
    return found


def _finish(piece: _Piece, number: int) -> StorageFailed | None:
    """Write a piece into the view once the log has it."""
    try:
        piece.logged.result()
    except StorageFailed as error:
        return error
    piece.table.write(piece.rows, number)
    return None


def _taken(tables: Sequence[ViewTable], dirty: Sequence[DirtyRows]) -> Amount:
    """How much of the rows found dirty is not dirty any more: what was written."""
    pairs = zip(tables, dirty, strict=True)
    return total(amount_of(rows, table.dirty_since[rows.ids] == 0) for table, rows in pairs)


def _backlogs(tables: Sequence[ViewTable], dirty: Sequence[DirtyRows]) -> dict[str, Backlog]:
    """What is still dirty of the rows found dirty in each table, by its name."""
    return {table.source.spec.name: _backlog(table, rows) for table, rows in zip(tables, dirty, strict=True)}


def _backlog(table: ViewTable, rows: DirtyRows) -> Backlog:
    since = table.dirty_since[rows.ids]
    left = since > 0
    return Backlog(amount_of(rows, left), table.source.norm, int(since[left].min()) if np.any(left) else 0)


def _released(state: ViewState, head: Head, taken: Amount, reason: str) -> ViewState:
    """The state with the new release; where it took no rows, with the one before and the backlog of now."""
    backlog = total(each.amount for each in state.backlog.values())
    if taken.rows:
        return replace(state, newest=new_release(head, taken, backlog, reason))
    if state.newest:
        statistics = replace(state.newest.statistics, backlog=backlog)
        return replace(state, newest=replace(state.newest, statistics=statistics))
    return state


def new_release(head: Head, taken: Amount, backlog: Amount, reason: str) -> NewestRelease:
    """A release that is made now, after which replicas hold `head`."""
    statistics = ReleaseStatistics(
        number=head.number,
        version=head.version,
        made_unix_ns=time.time_ns(),
        taken=taken,
        backlog=backlog,
        reason=reason,
    )
    return NewestRelease(head, statistics)
