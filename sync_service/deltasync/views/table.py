"""What the replicas of a consumer hold of one table, and which of its rows are dirty: they should hold another."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deltasync.core.delivery import Delivery
from deltasync.core.digests import BLOCK_ROWS
from deltasync.core.mode import Mode
from deltasync.core.rows import Ids, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import ID_TYPE
from deltasync.core.value_types import decode, encode, encoded_table, largest_distances
from deltasync.storage.mapped_table import MappedTable, file_of, map_array
from deltasync.views.ranking import Floats, Mask

_COUNT = struct.Struct("<Q")
# Blocks in which whole columns of stamps are scanned.
_SCAN_ROWS = 1 << 20


class EncodedTable(MappedTable):
    """Rows in a value type, stamped with the release that gave them; its digest is of what they stand for."""

    def __init__(self, delivery: Delivery, directory: Path, *, new: bool) -> None:
        super().__init__(encoded_table(delivery.spec, delivery.value_type), directory, new=new)
        self._delivery = delivery

    def decoded(self, rows: Values) -> Values:
        """The values that encoded rows stand for."""
        return decode(rows, self._delivery.value_type, self._delivery.spec.dtype)


class ViewTable:
    """One table of a view: used on the model's thread only, but for `flush`.

    Attributes:
        source: the model's table.
        delivery: what replicas are given of it.
        held: what replicas at the newest release hold, in the value type.
        sent: what replicas are sent: `held`, or the norms.
        since: [N] int64, the version since which a row is dirty, 0 = it is not.
    """

    def __init__(self, source: StampedTable, delivery: Delivery, directory: Path, *, new: bool) -> None:
        self.source = source
        self.delivery = delivery
        self.held = EncodedTable(delivery, directory, new=new)
        self.sent: MappedTable = self.held
        if delivery.mode is Mode.IDS:
            self.sent = MappedTable(delivery.wire_spec, _norms_folder(directory, new), new=new)
        since = file_of(delivery.spec, directory, "since")
        self._mapped_since = map_array(since, np.dtype(np.int64), (delivery.spec.rows,), new=new)
        self.since: NDArray[np.int64] = self._mapped_since
        # Of dirty rows, as of the last look: what has not changed since is as far off as it was. None = not known.
        self._norms: Floats | None = None

    def copy(self, ids: Ids, release: int | None) -> None:
        """Take over rows of the source as they are. They are stamped with `release`, or else as in the source."""
        rows = self.source.rows_of(ids)
        self.give(ids, encode(rows, self.delivery.value_type), norms_of(rows), release or 1)
        if release is None:
            self.held.stamps[ids] = self.source.stamps[ids]

    def look(self, seen: int) -> tuple[Ids, Floats]:
        """The dirty rows: sorted ids [n], and the norms [n] of what the source holds less what replicas hold.

        Args:
            seen: the version at the last look; rows that have not changed since are still as dirty as they were.
        """
        changed = self.source.changed_since(seen)
        self.since[changed[self.since[changed] == 0]] = seen + 1
        if self._norms is None:
            self._norms = np.zeros(len(self.since))
            changed = np.flatnonzero(self.since)
        for block in _blocks(len(changed), BLOCK_ROWS):
            ids = changed[block]
            self._norms[ids], differ = self._compare(ids, seen)
            self.since[ids[~differ]] = 0
        dirty = np.flatnonzero(self.since)
        return dirty, self._norms[dirty]

    def never_sent(self, ids: Ids) -> Mask:
        """Which of these rows no replica was ever given."""
        never: Mask = self.sent.stamps[ids] == 0
        return never

    def give(self, ids: Ids, encoded: Values, norms: Floats, release: int) -> None:
        """Note that replicas at `release` hold these rows ([n, width], encoded): they are no longer dirty."""
        self.held.apply(ids, encoded, release)
        if self.sent is not self.held:
            self.sent.apply(ids, _as_fp32(norms)[:, None], release)
        self.since[ids] = 0

    def record(self, ids: Ids, encoded: Values, norms: Floats) -> tuple[bytes | memoryview, ...]:
        """The log's record of rows about to be given, in pieces; `replay` takes it back."""
        pieces = (_COUNT.pack(len(ids)), ids.data, np.ascontiguousarray(encoded).data)
        return pieces if self.sent is self.held else (*pieces, _as_fp32(norms).data)

    def replay(self, record: memoryview, release: int) -> None:
        """Give the rows of a record once more."""
        (count,) = _COUNT.unpack_from(record)
        width, dtype = self.held.spec.dim, self.held.spec.dtype
        ids = np.frombuffer(record, ID_TYPE, count, _COUNT.size)
        encoded = np.frombuffer(record, dtype, count * width, _COUNT.size + ids.nbytes)
        norms = np.frombuffer(record, np.float32, -1, _COUNT.size + ids.nbytes + encoded.nbytes)
        self.give(ids, encoded.reshape(count, width), norms.astype(np.float64), release)

    def count_lacking(self, release: int, seen: int) -> int:
        """How many rows a replica at `release` does not hold as the source has them."""
        return sum(
            int(
                np.count_nonzero(
                    (self.sent.stamps[block] > release)
                    | (self.since[block] > 0)
                    | (self.source.stamps[block] > seen)
                )
            )
            for block in _blocks(self.source.spec.rows, _SCAN_ROWS)
        )

    def flush(self) -> None:
        """Wait until everything written before the call is on disk. Blocks; any thread."""
        for mapped in {self.held, self.sent}:
            mapped.flush()
        self._mapped_since.flush()

    def _compare(self, ids: Ids, seen: int) -> tuple[Floats, Mask]:
        rows, held = self.source.rows_of(ids), self.held.rows_of(ids)
        decoded, value_type = self.held.decoded(held), self.delivery.value_type
        # In fp64, in which no difference of two fp32 numbers overflows, nor its square.
        delta = np.subtract(rows, decoded, dtype=np.float64)
        norms: Floats = np.sqrt(np.einsum("ij,ij->i", delta, delta))
        # Rows further away than encoding can explain need not be encoded to see that they differ.
        near = ~(norms > largest_distances(held, decoded, value_type))
        unsure = np.flatnonzero(near & (self.source.stamps[ids] > seen))
        differ = np.ones(len(ids), np.bool_)
        differ[unsure] = _bits_differ(encode(rows[unsure], value_type), held[unsure])
        return norms, differ

    def count_digests(self) -> None:
        """Find the digests anew, after a restart."""
        for mapped in {self.held, self.sent}:
            mapped.count_digest()


def norms_of(rows: Values) -> Floats:
    """The L2 norms [n] of rows [n, D]."""
    exact = rows.astype(np.float64)
    norms: Floats = np.sqrt(np.einsum("ij,ij->i", exact, exact))
    return norms


def _norms_folder(directory: Path, new: bool) -> Path:
    folder = directory / "norms"
    if new:
        folder.mkdir()
    return folder


def _as_fp32(norms: Floats) -> Values:
    return np.minimum(norms, np.finfo(np.float32).max).astype(np.float32)


def _bits_differ(some: Values, others: Values) -> Mask:
    """Whether two rows ([n, width]) differ in any bit."""
    bits = f"u{some.itemsize}"
    differ = np.ascontiguousarray(some).view(bits) != np.ascontiguousarray(others).view(bits)
    anywhere: Mask = differ @ np.ones(some.shape[1], np.bool_)  # Faster than any() along the second axis.
    return anywhere


def _blocks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
