"""Releases of a model with and without a map of raw ids, and the expected content of a keyed store."""

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from hypothesis import strategies as st

from deltasync.client import Position, Release, RowBatch, Shard, TableKind, TableSpec
from deltasync.core.tables import FREE_ID

ROWS = 6
USER = TableSpec("sparse.user", ROWS, 2)
ITEM = TableSpec("sparse.item", ROWS, 1, np.dtype("<f2"))
RAW_IDS = TableSpec("sparse.user.raw_ids", ROWS, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
BIAS = TableSpec("over.bias", 1, 3, kind=TableKind.PARAMETER)
TABLES = [USER, ITEM, RAW_IDS, BIAS]

# Raw ids: few, so that they go from row to row, with the extremes that the wire can carry.
RAW = st.sampled_from([-(2**63), -2, -1, 0, 1, 5, 7, 2**63 - 2])


@dataclass(frozen=True)
class Change:
    """Changes of the model between two releases.

    Attributes:
        users: rows of the mapped table that get new values.
        items: rows of the other table that get new values.
        deleted: rows of both tables to delete.
        raw_ids: rows that get another raw id, or none if None. An earlier row with that raw id loses it.
        rows_stay: whether rows with another raw id keep their values, so that only their map entries are sent.
    """

    users: frozenset[int] = frozenset()
    items: frozenset[int] = frozenset()
    deleted: frozenset[int] = frozenset()
    raw_ids: dict[int, int | None] = field(default_factory=dict)
    rows_stay: bool = False


_SOME = st.frozensets(st.integers(0, ROWS - 1), max_size=ROWS)
CHANGES = st.builds(
    Change,
    users=_SOME,
    items=_SOME,
    deleted=_SOME,
    raw_ids=st.dictionaries(st.integers(0, ROWS - 1), st.none() | RAW, max_size=ROWS),
    rows_stay=st.booleans(),
)


class KeyedModel:
    """A model and its releases."""

    def __init__(self) -> None:
        self.version = 0
        self._numbers = count(1)
        self._rows: dict[str, dict[int, float]] = {USER.name: {}, ITEM.name: {}, BIAS.name: {0: 0.5}}
        self._raw_ids: dict[int, int] = {}
        self._changed: dict[tuple[str, int], int] = {(BIAS.name, 0): 1}  # The version at which each row changed.

    def change(self, change: Change) -> None:
        self.version += 1
        moved = self._give(change.raw_ids)
        users = change.users | (frozenset() if change.rows_stay else moved)
        for table, rows in ((USER, users - change.deleted), (ITEM, change.items - change.deleted)):
            for row in rows:
                self._rows[table.name][row] = float(next(self._numbers) % 2000)
                self._changed[table.name, row] = self.version
            for row in change.deleted & self._rows[table.name].keys():
                del self._rows[table.name][row]
                self._changed[table.name, row] = self.version

    def release(self, held: int, *, resync: bool = False, whole: frozenset[str] = frozenset()) -> Release:
        """What a replica at version `held` lacks; everything for a resync."""
        batches = []
        for table in TABLES:
            everything = resync or table.name in whole
            since = 0 if everything else held
            rows = sorted(row for (name, row), at in self._changed.items() if name == table.name and at > since)
            # A large release names rows of whole tables, too, that were deleted while it was made.
            batches += self._batches(table, rows, with_deletes=not everything or self.version % 2 == 0)
        position = Position("h", self.version)
        event = self.version * 10 if self.version % 2 else None
        kept = f"kept-{self.version}" if self.version % 3 else ""
        release = Release(position, self.version * 2, 5, resync, TABLES, batches, whole, self.version, kept=kept)
        return replace(release, event_time_unix_ns=event)

    def expected(self) -> dict[str, dict[int, float]]:
        """The first value of each row by key."""
        users = self._rows[USER.name]
        return {
            USER.name: {raw: users[row] for row, raw in self._raw_ids.items() if row in users},
            ITEM.name: dict(self._rows[ITEM.name]),
            BIAS.name: {0: 0.5},
        }

    def free(self) -> dict[int, float]:
        """The rows of the mapped table without a raw id."""
        return {row: value for row, value in self._rows[USER.name].items() if row not in self._raw_ids}

    def entries(self) -> dict[int, int]:
        """The raw ids by row."""
        return dict(self._raw_ids)

    def _give(self, raw_ids: dict[int, int | None]) -> frozenset[int]:
        """Assign other raw ids to rows; returns the rows whose raw ids have changed."""
        before = dict(self._raw_ids)
        for row, raw in raw_ids.items():
            self._raw_ids = {other: each for other, each in self._raw_ids.items() if other != row and each != raw}
            if raw is not None:
                self._raw_ids[row] = raw
        moved = {row for row in range(ROWS) if before.get(row) != self._raw_ids.get(row)}
        self._changed.update({(RAW_IDS.name, row): self.version for row in moved})
        return frozenset(moved)

    def _batches(self, table: TableSpec, rows: list[int], *, with_deletes: bool) -> list[RowBatch]:
        if table is RAW_IDS:
            entries = [self._raw_ids[row] ^ FREE_ID if row in self._raw_ids else 0 for row in rows]
            return [RowBatch.of_table(table, np.array(rows), np.array(entries)[:, None])] if rows else []
        held = self._rows[table.name]
        batches = [
            RowBatch.of_table(table, np.array([row]), np.full((1, table.dim), held[row], table.dtype))
            for row in rows
            if row in held
        ]
        gone = np.array([row for row in rows if row not in held], np.int64)
        return [*batches, *([RowBatch.deletes(Shard.whole(table), gone)] if len(gone) and with_deletes else [])]
