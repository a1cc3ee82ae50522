"""What the replicas of a consumer hold of one table, and which of its rows are dirty."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltasync.core.change_counts import ChangeCounts
from deltasync.core.delivery import Delivery
from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.mode import Mode
from deltasync.core.rows import BLOCK_ROWS, Ids, Norms, RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard
from deltasync.core.threads import MODEL_THREAD, confined
from deltasync.storage.mapped_table import MappedTable, TableLayout, extend_file, extend_files, file_of, map_array
from deltasync.views.ranking import Floats, Mask

_SINCE_TYPE = np.dtype(np.int64)
# Beyond any of fp32 rows; squares of it add up to a finite number.
_LARGEST_NORM = 1e100


class EncodedTable(MappedTable):
    """Rows encoded in a value type, stamped with the release that has them.

    Its digests are of the rows as replicas hold them: decoded, or as they are sent.
    """

    def __init__(self, delivery: Delivery, directory: Path, *, new: bool) -> None:
        self._delivery = delivery
        super().__init__(delivery.encoded_spec, directory, new=new, normed=False)

    def held_digests(self, rows: Values) -> RowDigests:
        """See `StampedTable.held_digests`."""
        return row_digests(self._delivery.held(rows))


@confined(dirty_since=MODEL_THREAD, _norms=MODEL_THREAD)
class ViewTable:
    """One table of a view. Used on the model's thread only, but for `lacking` and `flush`.

    A row is dirty while replicas at the newest release hold something else than the model's row, as it is sent.

    Attributes:
        source: the model's table.
        delivery: what replicas are sent of it.
        folder: where its files are.
        held: what replicas at the newest release hold, in the value type.
        sent: what replicas are sent: `held`, or the norms.
        dirty_since: [N] int64, the version since which a row is dirty, 0 = it is not.
    """

    def __init__(self, source: StampedTable, delivery: Delivery, folder: Path, *, new: bool) -> None:
        self.source = source
        self.delivery = delivery
        self.folder = folder
        self.held = EncodedTable(delivery, folder, new=new)
        self.sent: MappedTable = self.held
        if delivery.mode is Mode.IDS:
            self.sent = MappedTable(delivery.wire_spec, _norms_folder(folder, new), new=new, normed=False)
        since = file_of(delivery.spec, folder, "since")
        self._mapped_since = map_array(since, _SINCE_TYPE, (delivery.spec.rows,), new=new)
        self.dirty_since: NDArray[np.int64] = self._mapped_since
        # Of the rows that are not dirty. Both replaced whole, so that `lacking` may read them in any thread.
        self._clean: ChangeCounts = self.sent.counts.without(self.sent.numbers(np.flatnonzero(self._mapped_since)))
        self._compared_version = 0  # The source's newest version at the last comparison, as far as it is known.
        # [N], as of the last comparison, and right for dirty rows only: one that has not changed since then is as
        # far off as it was. None = not known.
        self._norms: Floats | None = None

    def extend(self, delivery: Delivery) -> "ViewTable":
        """Make room for the rows that the source has grown by. Blocks; any thread.

        Returns:
            The table with that room, of the same files; to be told to `follow` this one before it is used.

        Raises:
            StorageFailed: there is no room; this table is as it was.
        """
        extend_files(TableLayout.of(delivery.encoded_spec, normed=False), self.folder)
        if delivery.mode is Mode.IDS:
            extend_files(TableLayout.of(delivery.wire_spec, normed=False), _norms_folder(self.folder, new=False))
        extend_file(file_of(delivery.spec, self.folder, "since"), delivery.spec.rows * _SINCE_TYPE.itemsize)
        return ViewTable(self.source, delivery, self.folder, new=False)

    def follow(self, before: "ViewTable") -> int:
        """Take the place of a table that had room for fewer rows.

        Returns:
            The last version before any of the source's rows that it had no room for: these were not compared.
        """
        changed = self.changed_since(0)
        numbers = self.source.numbers(changed[changed >= before.delivery.spec.rows])
        return int(numbers.min()) - 1 if len(numbers) else self.source.counts.newest

    def changed_since(self, version: int) -> Ids:
        """Sorted unique ids ([n]) of the rows of the source stamped after a version, as far as there is room."""
        changed = self.source.changed_since(version)
        return changed[: np.searchsorted(changed, len(self.dirty_since))]

    def copy(self, ids: Ids, number: int | None) -> None:
        """Take over rows of the source as they are. Stamp them with `number`; None = as in the source.

        Deleted ones too: a replica may hold them of before, in another form.
        """
        gone = self.source.deleted(ids)
        live = ids[~gone]
        values = self.source.rows_of(live)
        norms = norms_of(values) if self.source.spec.kind.trained else np.zeros(len(live))
        self.write(self.batch(live, self.delivery.encode(values), norms), number or 1)
        self.write(self.deletes(ids[gone]), number or 1)
        if number is None:
            self.held.restamp(ids, self.source.stamps[ids])
        self._clean = self.sent.counts  # No row of a table that is being made is dirty.

    def find_dirty(self, compared_version: int) -> tuple[Ids, Floats]:
        """The dirty rows: sorted ids [n], and the L2 norms [n] of the source's rows less those that replicas hold.

        Args:
            compared_version: the version at the last comparison; rows that have not changed after it are as dirty
                as they were.
        """
        changed = self.changed_since(compared_version)
        self._mark(changed[self.dirty_since[changed] == 0], compared_version + 1)
        if self._norms is None:
            self._norms = np.zeros(len(self.dirty_since))
            changed = np.flatnonzero(self.dirty_since)
        for block in _blocks(len(changed), BLOCK_ROWS):
            ids = changed[block]
            self._norms[ids], differ = self._compare(ids, compared_version)
            self._unmark(ids[~differ])
        dirty = np.flatnonzero(self.dirty_since)
        return dirty, self._norms[dirty]

    def never_sent(self, ids: Ids) -> Mask:
        """Which of these rows no replica was ever sent."""
        never: Mask = self.sent.stamps[ids] == 0
        return never

    def deletes(self, ids: Ids) -> RowBatch:
        """Rows that are no more, as `write` takes them."""
        return RowBatch.deletes(Shard.whole(self.held.spec), ids)

    def encoded(self, ids: Ids) -> Values:
        """Rows of the source ([n, width]) as replicas are to hold them."""
        return self.delivery.encode(self.source.rows_of(ids))

    def batch(self, ids: Ids, encoded: Values, norms: Floats) -> RowBatch:
        """Encoded rows as `write` takes them; with the norms ([n]) of what has changed where those are sent."""
        return RowBatch.of_table(self.held.spec, ids, encoded, None if self.sent is self.held else _as_fp32(norms))

    def write(self, rows: RowBatch, number: int) -> None:
        """Note that replicas at release `number` hold these encoded rows: they are not dirty now."""
        was_clean = rows.ids[self.dirty_since[rows.ids] == 0]
        clean = self._clean.without(self.sent.numbers(was_clean)).plus_rows(len(rows), number)
        self.held.apply(rows, number)
        if rows.deleted and self.sent is not self.held:
            self.sent.apply(RowBatch.deletes(Shard.whole(self.sent.spec), rows.ids), number)
        if rows.norms is not None:
            self.sent.apply(RowBatch.of_table(self.sent.spec, rows.ids, rows.norms[:, None]), number)
        self.dirty_since[rows.ids] = 0
        self._clean = clean

    def lacking(self, number: int, compared_version: int) -> int:
        """How many rows a replica at `number` does not hold as the source has them, at most. Any thread.

        They are the dirty rows, others that were sent after `number`, and those that have changed since the last
        comparison, at `compared_version` or later. Which of the latter are dirty or were sent before is not known:
        these are counted twice.
        """
        compared_version = max(self._compared_version, compared_version)  # First: the counts may only be newer.
        clean, changed = self._clean, self.source.counts.after(compared_version)
        rows = self.source.spec.rows
        return min(rows, rows - clean.rows + clean.after(number) + changed)

    def flush(self) -> None:
        """Wait until everything written before the call is on disk. Blocks; any thread."""
        for mapped in {self.held, self.sent}:
            mapped.flush()
        self._mapped_since.flush()

    def _mark(self, ids: Ids, since: int) -> None:
        """Note that these rows, which were not dirty, are so since a version, and that all rows have been seen."""
        self.dirty_since[ids] = since
        self._clean = self._clean.without(self.sent.numbers(ids))
        self._compared_version = self.source.counts.newest

    def _unmark(self, ids: Ids) -> None:
        """Note that these rows, which were dirty, are not."""
        self.dirty_since[ids] = 0
        self._clean = self._clean.plus(self.sent.numbers(ids))

    def _compare(self, ids: Ids, compared_version: int) -> tuple[Floats, Mask]:
        """The norms of the deltas of these rows, and which of them are dirty."""
        rows, held = self.source.rows_of(ids), self.held.rows_of(ids)
        decoded = self.delivery.decode(held)
        norms = self._distances(rows, decoded)
        # Rows further away than encoding can explain need not be encoded to see that they differ.
        near = ~(norms > self.delivery.largest_distances(held, decoded))
        unsure = np.flatnonzero(near & (self.source.numbers(ids) > compared_version))
        differ = np.ones(len(ids), np.bool_)
        differ[unsure] = _bits_differ(self.delivery.encode(rows[unsure]), held[unsure])
        # That a row is no more differs from zeros, but not to who never had it.
        gone, told = self.source.deleted(ids), self.held.deleted(ids)
        return norms, np.where(gone, ~told & ~self.never_sent(ids), differ | told)

    def _distances(self, rows: Values, others: Values) -> Floats:
        """The L2 norms [n] of what differs between rows; 0 for what is not trained."""
        if not self.source.spec.kind.trained:
            return np.zeros(len(rows))
        # In fp64, in which no difference of two fp32 numbers overflows, nor its square.
        with np.errstate(over="ignore"):
            return norms_of(np.subtract(rows, others, dtype=np.float64))


def norms_of(rows: Values) -> Floats:
    """The L2 norms [n] of rows [n, D]; never infinite, as that of fp64 rows could be."""
    exact = rows.astype(np.float64, copy=False)
    with np.errstate(over="ignore"):
        norms: Floats = np.sqrt(np.einsum("ij,ij->i", exact, exact))
    return np.minimum(norms, _LARGEST_NORM)


def _norms_folder(folder: Path, new: bool) -> Path:
    folder = folder / "norms"
    if new:
        folder.mkdir()
    return folder


def _as_fp32(norms: Floats) -> Norms:
    return np.minimum(norms, np.finfo(np.float32).max).astype(np.float32)


def _bits_differ(some: Values, others: Values) -> Mask:
    """Which rows ([n, width]) differ in any bit."""
    bits = f"u{some.itemsize}"
    differ = np.ascontiguousarray(some).view(bits) != np.ascontiguousarray(others).view(bits)
    anywhere: Mask = differ @ np.ones(some.shape[1], np.bool_)  # Faster than any() along the second axis.
    return anywhere


def _blocks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
