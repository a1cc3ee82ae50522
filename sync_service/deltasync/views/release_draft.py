"""A release before it is made: the rows that it takes, and what is known of those that it leaves."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch
from deltasync.feeds.frozen_release import Head
from deltasync.feeds.scratch import Room
from deltasync.feeds.statistics import Amount, Backlog, ReleaseStatistics, total
from deltasync.kernels.ranking import split_amounts
from deltasync.views.ranking import DirtyRows, Mask, Pick
from deltasync.views.release_log import Piece, ReleaseLog
from deltasync.views.store import NewestRelease, ViewState
from deltasync.views.table import ViewTable
from deltasync.wire.row_messages import chunked

# Rows of a release beyond this are kept in an unlinked file until they are written.
_MEMORY_BYTES = 32 << 20


@dataclass
class TableDraft:
    """What a release takes of one table.

    Attributes:
        table: the table.
        dirty: its dirty rows.
        since: [dirty rows] int64, the version since which each is dirty.
        taken: which of them the release takes; without those that could not be written.
        norm: the L2 norm of all rows of the model's table.
    """

    table: ViewTable
    dirty: DirtyRows
    since: NDArray[np.int64]
    taken: Mask
    norm: float

    def needs(self, piece: RowBatch) -> bool:
        """Whether some of the rows of a piece are forced."""
        return bool(self.dirty.forced[np.searchsorted(self.dirty.ids, piece.ids)].any())

    def give_up(self, piece: RowBatch) -> None:
        """Leave the rows of a piece, which could not be written, for a later release."""
        self.taken[np.searchsorted(self.dirty.ids, piece.ids)] = False

    @property
    def taken_ids(self) -> Ids:
        """The rows that it takes."""
        return self.dirty.ids[np.flatnonzero(self.taken)]  # A few times as fast as by a mask.

    def amounts(self) -> tuple[Amount, Backlog]:
        """How much it takes, and what it leaves."""
        size, every = self.dirty.row_bytes, len(self.taken)
        rows, of_taken, of_left, oldest = split_amounts(self.dirty.norms, self.since, self.taken)
        taken = Amount(int(rows), int(rows) * size, math.sqrt(of_taken))
        left = Amount(every - taken.rows, every * size - taken.bytes, math.sqrt(of_left))
        return taken, Backlog(left, self.norm, int(oldest))


@dataclass
class ReleaseDraft:
    """A release that is being made.

    Attributes:
        head: what replicas hold once they have it.
        tables: what it takes, by slot.
        reason: why these rows.
        log: what hands its rows to the log.
        written: the pieces that the log has; none before `settle`.
    """

    head: Head
    tables: list[TableDraft]
    reason: str
    log: ReleaseLog
    written: list[Piece] = field(default_factory=list)

    def settle(self, before: ViewState) -> tuple[ViewState, StorageFailed | None]:
        """Wait until the log has the rows, and that there is a release of them; rows that it has not are left for
        later. Blocks; returns the state `before`, as it is once the release is made, and why rows are left.

        Raises:
            StorageFailed: none of them is to be released. So it is where the log lacks some that are forced: these
                belong together.
        """
        after = self.state_after(before)
        self.written, refused, failure = self.log.settle(after.newest if after.head != before.head else None)
        if failure and any(self.tables[piece.slot].needs(piece.rows) for piece in refused):
            raise failure
        for piece in refused:
            self.tables[piece.slot].give_up(piece.rows)
        return (self.state_after(before) if failure else after), failure

    def state_after(self, before: ViewState) -> ViewState:
        """The state once it is made; where it takes no rows, with the release of before and the backlog of now."""
        amounts = {draft.table.source.spec.name: draft.amounts() for draft in self.tables}
        backlogs = {name: backlog for name, (_, backlog) in amounts.items()}
        state = replace(before, compared_version=self.head.version, backlog=backlogs, mixed=False)
        taken = total(amount for amount, _ in amounts.values())
        left = total(each.amount for each in backlogs.values())
        if taken.rows:
            return replace(state, newest=new_release(self.head, taken, left, self.reason))
        if state.newest:
            statistics = replace(state.newest.statistics, backlog=left)
            return replace(state, newest=replace(state.newest, statistics=statistics))
        return state

    def sent_rows(self) -> list[tuple[int, RowBatch]]:
        """The rows that the log has, by slot, as replicas are sent them."""
        return [(piece.slot, self.tables[piece.slot].table.sent_rows(piece.rows)) for piece in self.written]


def draw(
    tables: Sequence[ViewTable],
    dirty: Sequence[DirtyRows],
    picked: Pick,
    head: Head,
    log: ReleaseLog,
    scratch: Path,
) -> ReleaseDraft:
    """Copy the picked rows, encoded, and hand them to the log, on the model's thread. Many of them are copied into
    an unlinked file in `scratch`.

    Raises:
        StorageFailed: there is no room for them.
        DamagedRows: some of the model's rows do not fit their digests.
    """
    rows_of = [int(np.count_nonzero(mask)) for mask in picked.taken]
    sizes = [rows * table.held.spec.row_bytes for rows, table in zip(rows_of, tables, strict=True)]
    room = Room(sizes, scratch if sum(sizes) > _MEMORY_BYTES else None, f"a release of {len(sizes)} tables")
    drafts = [
        TableDraft(table, rows, table.dirty.since, taken, table.source.norm)
        for table, rows, taken in zip(tables, dirty, picked.taken, strict=True)
    ]
    for slot, draft in enumerate(drafts):
        for index, rows in enumerate(_rows(draft, room) if rows_of[slot] else ()):
            log.add(Piece(slot, index, rows))
    return ReleaseDraft(head, drafts, picked.reason, log)


def _rows(draft: TableDraft, room: Room) -> Iterator[RowBatch]:
    """What a release takes of a table, piece by piece, and at the end what is no more."""
    table, spec = draft.table, draft.table.held.spec
    taken = np.flatnonzero(draft.taken)
    deleted = table.dirty.deleted[taken]
    live = taken[~deleted] if deleted.any() else taken
    encoded = room.array((len(live), spec.dim), spec.dtype)
    for piece in chunked(table.batch(draft.dirty.ids[live], encoded, draft.dirty.norms[live])):
        yield table.drawn(piece)
    if len(live) < len(taken):
        yield from chunked(table.deletes(draft.dirty.ids[taken[deleted]]))


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
