"""Rows on their way: which, and what they hold."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltasync.core.tables import Shard

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
