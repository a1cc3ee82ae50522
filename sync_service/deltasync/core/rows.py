"""Rows of a shard as they travel: ids and values, and the rules that every sender has to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import InvalidInput
from deltasync.core.tables import ID_TYPE, Shard

Ids: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Some rows of a shard.

    Attributes:
        shard: the shard.
        ids: [n] int64, global row ids, strictly ascending.
        values: [n, columns of the shard], of the table's type.
    """

    shard: Shard
    ids: Ids
    values: Values

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        return self.ids.nbytes + self.values.nbytes

    @classmethod
    def from_bytes(
        cls, shards: Sequence[Shard], slot: int, raw_ids: bytes | memoryview, raw_values: bytes | memoryview
    ) -> "RowBatch":
        """The rows of shard number `slot` that some bytes hold, as views of them.

        Raises:
            InvalidInput: no such shard, or lengths that do not fit it.
        """
        if slot >= len(shards):
            raise InvalidInput(f"rows for slot {slot}, but only {len(shards)} were announced")
        shard = shards[slot]
        count, rest = divmod(len(raw_ids), ID_TYPE.itemsize)
        if rest:
            raise InvalidInput(
                f"table {shard.table.name!r}: {len(raw_ids)} bytes of ids, expected a multiple of 8"
            )
        expected = count * shard.cols * shard.table.dtype.itemsize
        if len(raw_values) != expected:
            raise InvalidInput(
                f"table {shard.table.name!r}: {len(raw_values)} bytes of values for {count} rows of {shard.cols} "
                f"{shard.table.dtype} values, expected {expected}: does the row's dimension or type differ?"
            )
        values = np.frombuffer(raw_values, shard.table.dtype).reshape(count, shard.cols)
        return cls(shard, np.frombuffer(raw_ids, ID_TYPE), values)

    def check(self) -> None:
        """Check rows against the rules that every sender has to keep.

        Raises:
            InvalidInput: no rows, ids outside the shard or not strictly ascending, NaN or infinity.
        """
        shard, ids = self.shard, self.ids
        name, first, last = shard.table.name, shard.row_offset, shard.row_offset + shard.rows
        if not len(ids):
            raise InvalidInput(f"table {name!r}: a chunk without rows")
        if np.any(ids[1:] <= ids[:-1]):
            raise InvalidInput(f"table {name!r}: ids must be strictly ascending inside a chunk")
        if ids[0] < first or ids[-1] >= last:
            bad = int(ids[0]) if ids[0] < first else int(ids[-1])
            raise InvalidInput(f"table {name!r}: row id {bad} is outside this rank's rows {first} to {last - 1}")
        self._check_finite()

    def _check_finite(self) -> None:
        finite = np.isfinite(self.values)
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            where = f"row {int(self.ids[row])} holds {self.values[row, column]} in column"
            raise InvalidInput(
                f"table {self.shard.table.name!r}: {where} {self.shard.col_offset + column}; "
                "NaN and infinity are not published"
            )
