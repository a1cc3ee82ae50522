"""Whether shards make up a whole table: its rows are swept, while a tree over columns counts the shards that hold
each. It takes O(n log n) steps for n shards, however they lie.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter

from deltasync.core.tables import Shard, TableSpec


def gap(table: TableSpec, shards: Iterable[Shard]) -> str | None:
    """A block of a table that no shard covers, in words, or None. Shards may overlap."""
    held = [shard for shard in shards if shard.rows]
    cols = sorted({0, table.dim, *(edge for s in held for edge in (s.col_offset, s.col_offset + s.cols))})
    sweep, columns = _Columns(len(cols) - 1), {col: number for number, col in enumerate(cols)}
    for first, end, changes in _bands(table.rows, held):
        for shard, count in changes:
            sweep.add(columns[shard.col_offset], columns[shard.col_offset + shard.cols], count)
        if (free := sweep.first_free()) is not None:
            return f"rows {first} to {end - 1}, columns {cols[free]} to {cols[free + 1] - 1}"
    return None


def _bands(rows: int, shards: Sequence[Shard]) -> Iterable[tuple[int, int, list[tuple[Shard, int]]]]:
    """Rows between two edges of shards, ascending: the first, the end, and which shards begin (1) or end (-1)
    there.
    """
    begins = [(shard.row_offset, shard, 1) for shard in shards]
    ends = [(shard.row_offset + shard.rows, shard, -1) for shard in shards]
    by_row = sorted([*begins, *ends], key=itemgetter(0))
    changes = {row: [each[1:] for each in some] for row, some in groupby(by_row, itemgetter(0))}
    for first, end in pairwise(sorted({0, rows, *changes})):
        yield first, end, changes.get(first, [])


class _Columns:
    """How many shards hold each range of columns: a tree whose leaves are the ranges, and whose nodes count those
    that hold all that is below them.
    """

    def __init__(self, ranges: int) -> None:
        self._leaves = 1 << (ranges - 1).bit_length()
        self._counts = [0] * (2 * self._leaves)
        self._held = [False] * (2 * self._leaves)
        self.add(ranges, self._leaves, 1)  # So many that are none.

    def add(self, first: int, end: int, count: int) -> None:
        """Count a shard more, or less, of some ranges."""
        low, high = first + self._leaves, end + self._leaves
        lowest, highest = low, high - 1
        while low < high:
            if low & 1:
                self._count(low, count)
                low += 1
            if high & 1:
                high -= 1
                self._count(high, count)
            low, high = low >> 1, high >> 1
        for leaf in (lowest, highest) if first < end else ():
            while leaf := leaf >> 1:
                self._count(leaf, 0)

    def _count(self, node: int, count: int) -> None:
        self._counts[node] += count
        below = node < self._leaves and self._held[2 * node] and self._held[2 * node + 1]
        self._held[node] = self._counts[node] > 0 or below

    def first_free(self) -> int | None:
        """The first range that no shard holds; None if each is held."""
        if self._held[1]:
            return None
        node = 1
        while node < self._leaves:
            node = 2 * node + self._held[2 * node]
        return node - self._leaves
