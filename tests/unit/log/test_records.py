"""What records look like on disk, and that what looks otherwise is refused with a sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.base.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.tables import DIGEST_TYPE, EncodedSpec, Shard, TableSpec
from deltasync.log import records

TABLES = [TableSpec("user", 100, 4), TableSpec("half", 50, 3, np.dtype("<f2"))]
CODES = EncodedSpec("codes", 9, 5, np.dtype("u1"))
SHARDS = [
    Shard(TABLES[0], 10, 20, 1, 2),
    Shard.whole(TABLES[1]),
    Shard.whole(CODES),
]
BATCH = RowBatch(SHARDS[1], np.arange(2), np.ones((2, 3), "<f2"), digests=np.ones(2, DIGEST_TYPE))


def packed(slot: int, rows: RowBatch, layout: int = 0) -> bytes:
    return b"".join(records.pack_rows(slot, rows, layout))


def unpacked(record: bytes) -> RowBatch:
    return records.unpack_rows(memoryview(record), lambda _: SHARDS)


@given(st.data(), st.integers(0, 2), st.integers(0, 20), st.booleans(), st.booleans(), st.integers(0, 2**64 - 1))
def test_rows_come_back_as_they_were(
    data: st.DataObject, slot: int, count: int, has_values: bool, has_digests: bool, layout: int
) -> None:
    """With values and digests, with either, and with ids alone; also of arrays that are not contiguous."""
    shard = SHARDS[slot]
    width = shard.cols if has_values else 0
    raw = data.draw(st.binary(min_size=count * width * 8, max_size=count * width * 8))
    values = np.frombuffer(raw, shard.table.dtype).reshape(count, -1)[:, :width] if width and count else None
    rows = RowBatch(
        shard,
        np.arange(3 * count)[::3],
        np.zeros((count, width), shard.table.dtype) if values is None else values,
        digests=np.arange(2 * count, dtype=DIGEST_TYPE)[::2] if has_digests else None,
    )
    named = []

    def shards_of(number: int) -> list[Shard]:
        named.append(number)
        return SHARDS

    record = packed(slot, rows, layout)
    found = records.unpack_rows(memoryview(record), shards_of)
    assert named == [layout]
    assert len(record) == records.packed_bytes(rows)
    assert found.shard is shard
    assert found.ids.tolist() == rows.ids.tolist()
    assert (found.values.shape, found.values.dtype) == (rows.values.shape, rows.values.dtype)
    assert found.values.tobytes() == rows.values.tobytes()
    assert (found.digests is None) is (rows.digests is None)
    assert found.digests is None or found.digests.tolist() == rows.digests.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("byte", "value", "said"),
    [
        (0, 3, "the log has rows of format 3, this version reads 1: update deltasync"),
        (1, 2, "the log has rows of kind 2, this version reads 1: update deltasync"),
        (2, 31, "the log has rows of columns 31, this version reads 7: update deltasync"),
    ],
)
def test_rows_of_a_later_format_or_kind_are_refused_with_both_numbers(byte: int, value: int, said: str) -> None:
    record = bytearray(packed(1, BATCH))
    record[byte] = value
    with pytest.raises(StorageFailed, match=said):
        unpacked(bytes(record))


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_are_rows_or_an_error_that_names_their_record(noise: bytes, after_header: bool) -> None:
    record = packed(1, BATCH)[:24] + noise if after_header else noise
    try:
        with records.reading("cuts/m/1/0/0"):
            rows = unpacked(record)
    except StorageFailed as error:
        said = str(error)
        assert "cuts/m/1/0/0" in said or "this version reads" in said  # It may also be rows.
    else:
        assert (len(rows.values), rows.values.shape[1]) == (len(rows.ids), rows.shard.cols)


def test_a_record_of_a_shard_that_is_not_there_is_refused() -> None:
    with pytest.raises(StorageFailed, match="cuts/m/1/0/0"), records.reading("cuts/m/1/0/0"):
        unpacked(packed(5, BATCH))


def test_a_layout_comes_back_as_it_was() -> None:
    shards = [*SHARDS[:2], Shard(TABLES[0], 0, 0, 0, 1)]
    record = records.pack_layout(TABLES, shards)
    assert records.unpack_layout(memoryview(record)) == shards
    assert records.layout_number(record) == records.layout_number(bytes(record))
    assert records.layout_number(record) != records.layout_number(records.pack_layout(TABLES, shards[:2]))


def test_a_seal_comes_back_as_it_was() -> None:
    assert records.seal_of_record(
        records.unpack_json(records.pack_json(records.seal_record(sealed(7))))
    ) == sealed(7)
    timed = sealed(8, event_time_unix_ns=9)
    assert records.seal_of_record(records.unpack_json(records.pack_json(records.seal_record(timed)))) == timed
