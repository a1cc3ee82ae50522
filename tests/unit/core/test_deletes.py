"""Deletes, from hop to hop: rows that are no more, and that add nothing to a checksum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stamped import stamped_table
from tests.support.wire import decoded, rows_message

from deltasync.base.errors import InvalidInput
from deltasync.core.digests import checksum_of
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.log import records
from deltasync.v1 import subscribe_pb2
from deltasync.wire.row_messages import chunked, release_chunk

TABLE = TableSpec("user", 12, 3)
WHOLE = Shard.whole(TABLE)

ids_of = st.sets(st.integers(0, TABLE.rows - 1), max_size=6).map(sorted).map(lambda ids: np.array(ids, np.int64))


def live(ids: np.ndarray, value: float = 1.0) -> RowBatch:
    return RowBatch.of_table(TABLE, ids, np.full((len(ids), TABLE.dim), value, np.float32))


@given(st.lists(st.tuples(ids_of, st.booleans()), max_size=8), st.integers(0, 9))
def test_a_table_knows_what_was_deleted_and_when(changes: list[tuple[np.ndarray, bool]], since: int) -> None:
    stamped = StampedTable(TABLE)
    rows: dict[int, tuple[int, float]] = {}  # Version, and value; 0.0 = deleted.
    for version, (ids, deleted) in enumerate(changes, 1):
        stamped.apply(RowBatch.deletes(WHOLE, ids) if deleted else live(ids, version), version)
        rows.update({int(row): (version, 0.0 if deleted else version) for row in ids})
    changed = sorted(row for row, (version, _) in rows.items() if version > since)
    assert stamped.changed_since(since).tolist() == changed
    assert stamped.deleted(np.array(changed, np.int64)).tolist() == [rows[row][1] == 0.0 for row in changed]
    assert stamped.counts.after(since) == len(changed)
    # Who has applied everything agrees with who comes later and is given the live rows alone.
    there = sorted(row for row, (_, value) in rows.items() if value)
    late = StampedTable(TABLE)
    for row in there:
        late.apply(live(np.array([row]), rows[row][1]), 1)
    assert stamped.checksum == late.checksum == checksum_of(np.arange(TABLE.rows), stamped.rows)
    assert stamped.norm == late.norm
    again = stamped_table(TABLE, stamped.rows, stamped.stamps)
    assert (again.checksum, again.norm) == (stamped.checksum, stamped.norm)
    assert again.changed_since(since).tolist() == changed
    assert again.counts.after(since) == len(changed)


@pytest.mark.parametrize("count", [1, 7])
def test_deletes_travel_and_are_logged_as_ids_alone(count: int) -> None:
    rows = RowBatch.deletes(WHOLE, np.arange(count))
    assert rows.nbytes == 8 * count
    message = subscribe_pb2.SubscribeResponse.FromString(release_chunk(0, rows)).chunk.rows
    assert (len(message.rows.ids), message.rows.values) == (8 * count, b"")
    record = b"".join(records.pack_rows(0, rows))
    logged = records.unpack_rows(memoryview(record), lambda _: [WHOLE])
    assert len(record) < sum(map(len, records.pack_rows(0, live(np.arange(count)))))
    for found in (decoded(message, [WHOLE]), logged, *chunked(rows)):
        assert found.deleted
        assert found.ids.tolist() == list(range(count))
        assert found.values.tolist() == [[0.0] * TABLE.dim] * count


def test_deletes_with_values_are_refused() -> None:
    message = rows_message(0, np.arange(2), np.zeros(6, "<f4"), deleted=True)
    with pytest.raises(InvalidInput, match=r"24 bytes of values for 2 rows .* expected 0"):
        decoded(message, [WHOLE])


def test_only_rows_of_embeddings_inside_of_the_table_are_deleted() -> None:
    RowBatch.deletes(WHOLE, np.array([11])).check()
    with pytest.raises(InvalidInput, match="'user': row id 12 is outside this rank's rows 0 to 11"):
        RowBatch.deletes(WHOLE, np.array([12])).check()
    buffer = TableSpec("norm", 12, 3, kind=TableKind.BUFFER)
    with pytest.raises(InvalidInput, match="table 'norm' is of kind 'buffer': only rows of embedding tables can"):
        RowBatch.deletes(Shard.whole(buffer), np.array([1])).check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kept", ["unnamed", "live", "deleted"])
def test_a_row_is_there_as_long_as_a_shard_of_columns_has_some_of_it(order: tuple[int, int], kept: str) -> None:
    """Whichever shard comes first: after a restart that may be another."""
    left, right = Shard(TABLE, 0, 12, 0, 1), Shard(TABLE, 0, 12, 1, 2)
    ids = np.array([2, 5])
    stamped = StampedTable(TABLE)
    stamped.apply(live(np.arange(12)), 1)
    parts = [RowBatch.deletes(left, ids), RowBatch.deletes(right, ids)]
    if kept == "live":
        parts[1] = RowBatch(right, ids, np.full((2, 2), -0.0, np.float32))
    for number in order:
        if number == 0 or kept != "unnamed":
            stamped.apply(parts[number], 2)
    gone = kept == "deleted"
    assert stamped.deleted(ids).tolist() == [gone, gone]
    assert not stamped.rows[ids, 0].any()
    assert stamped.changed_since(1).tolist() == [2, 5]
    # Who is given live rows alone, and zeros where they are deleted, holds the same.
    held = np.where((stamped.stamps > 0)[:, None], stamped.rows, np.zeros(1, np.float32))
    assert checksum_of(np.arange(12), held) == stamped.checksum
