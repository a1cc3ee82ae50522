"""What records look like on disk, and that what looks otherwise is refused with a sentence."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.base.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.seal import seal_of_record
from deltasync.core.tables import DIGEST_TYPE, EncodedSpec, Shard, TableSpec
from deltasync.log import records
from deltasync.wire.row_messages import encoded

TABLES = [TableSpec("user", 100, 4), TableSpec("half", 50, 3, np.dtype("<f2"))]
CODES = EncodedSpec("codes", 9, 5, np.dtype("u1"))
SHARDS = [
    Shard(TABLES[0], 10, 20, 1, 2),
    Shard.whole(TABLES[1]),
    Shard.whole(CODES),
]
BATCH = RowBatch(SHARDS[1], np.arange(2), np.ones((2, 3), "<f2"), digests=np.ones(2, DIGEST_TYPE))
HEADER_BYTES = 16


def packed(slot: int, rows: RowBatch, layout: int = 0) -> bytes:
    return b"".join(records.pack_rows(slot, rows, layout))


def unpacked(record: bytes) -> RowBatch:
    return records.unpack_rows(memoryview(record), lambda _: SHARDS)


@given(st.data(), st.integers(0, 2), st.integers(1, 20), st.booleans(), st.booleans(), st.integers(0, 2**64 - 1))
def test_rows_come_back_as_they_were(
    data: st.DataObject, slot: int, count: int, was_received: bool, has_digests: bool, layout: int
) -> None:
    """Also of arrays that are not contiguous. What was received is written as it is, and not copied."""
    shard = SHARDS[slot]
    raw = data.draw(st.binary(min_size=count * shard.cols * 8, max_size=count * shard.cols * 8))
    values = np.frombuffer(raw, shard.table.dtype).reshape(count, -1)[:, : shard.cols]
    digests = np.arange(2 * count, dtype=DIGEST_TYPE)[::2] if has_digests else None
    rows = RowBatch(shard, np.arange(3 * count)[::3], values, digests=digests)
    if was_received:
        rows = encoded(rows)
        assert records.pack_rows(slot, rows, layout)[1] is rows.encoded
    named = []

    def shards_of(number: int) -> list[Shard]:
        named.append(number)
        return SHARDS

    record = packed(slot, rows, layout)
    found = records.unpack_rows(memoryview(record), shards_of)
    assert named == [layout]
    assert found.shard is shard
    assert found.ids.tolist() == rows.ids.tolist()
    assert (found.values.shape, found.values.dtype) == (rows.values.shape, rows.values.dtype)
    assert found.values.tobytes() == rows.values.tobytes()
    assert (found.digests is None) is (rows.digests is None)
    assert found.digests is None or found.digests.tolist() == rows.digests.tolist()  # type: ignore[union-attr]


def test_rows_of_a_later_format_are_refused_with_both_numbers() -> None:
    record = bytearray(packed(1, BATCH))
    record[0] = 3
    with pytest.raises(StorageFailed, match="rows of format 3, this version reads 1: update deltasync"):
        unpacked(bytes(record))


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_are_rows_or_an_error_that_names_their_record(noise: bytes, after_header: bool) -> None:
    record = packed(1, BATCH)[:HEADER_BYTES] + noise if after_header else noise
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


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_ids_come_back_as_they_were(ids: list[int]) -> None:
    assert records.unpack_ids(memoryview(records.pack_ids(np.array(ids, np.int64)))).tolist() == ids


def test_a_layout_comes_back_as_it_was() -> None:
    shards = [*SHARDS[:2], Shard(TABLES[0], 0, 0, 0, 1)]
    record = records.pack_layout(TABLES, shards)
    assert records.unpack_layout(memoryview(record)) == shards
    assert records.layout_number(record) == records.layout_number(bytes(record))
    assert records.layout_number(record) != records.layout_number(records.pack_layout(TABLES, shards[:2]))


def test_a_seal_comes_back_as_it_was() -> None:
    for seal in (sealed(7), sealed(8, event_time_unix_ns=9)):
        assert seal_of_record(records.unpack_json(records.pack_json(asdict(seal)))) == seal
