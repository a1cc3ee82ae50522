"""Rows that do not fit their digests: bits of them have changed since they were stored."""

from collections.abc import Iterator

import numpy as np

from deltasync.core.errors import Damaged
from deltasync.core.rows import Ids

_NAMED_RANGES = 5


class DamagedRows(Damaged):
    """Rows of a table that do not fit their digests. No caller is given them.

    Attributes:
        table: the table's name.
        ids: [n], strictly ascending.
    """

    def __init__(self, table: str, ids: Ids) -> None:
        super().__init__(f"table {table!r}: other bits than were stored in {ranges(ids)}")
        self.table = table
        self.ids = ids


def ranges(ids: Ids) -> str:
    """Some row ids [n], strictly ascending, in words: `rows 3, 7 to 9`, or `row 3`."""
    named = list(_ranges(ids))
    others = len(named) - _NAMED_RANGES
    words = ", ".join(
        f"{first}" if first == last else f"{first} to {last}" for first, last in named[:_NAMED_RANGES]
    )
    return f"{'row' if len(ids) == 1 else 'rows'} {words}" + (f" and {others} other ranges" if others > 0 else "")


def _ranges(ids: Ids) -> Iterator[tuple[int, int]]:
    ends = np.flatnonzero(np.diff(ids) != 1)
    firsts, lasts = ids[np.append(0, ends + 1)], ids[np.append(ends, len(ids) - 1)]
    return zip(firsts.tolist(), lasts.tolist(), strict=True)
