"""Rows on their way: which, and what they hold."""

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
    def from_bytes(cls, shard: Shard, raw_ids: bytes | memoryview, raw_values: bytes | memoryview) -> "RowBatch":
        """The rows that some bytes hold, as views of them.

        Raises:
            InvalidInput: lengths that do not fit the shard.
        """
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
