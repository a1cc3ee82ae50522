import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.wire import rows_message

from deltasync.base.errors import InvalidInput
from deltasync.core.delivery import Delivery, Mode
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.tables import VALUE_TYPES, Shard, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.log import records
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2
from deltasync.wire import messages
from deltasync.wire import row_messages as rows

USER = TableSpec("user", 100, 4)
HALF = TableSpec("half", 50, 3, np.dtype("<f2"))
TABLES = [USER, HALF]
SHARDS = [Shard(USER, 10, 20, 1, 2), Shard.whole(HALF)]


def shards() -> st.SearchStrategy[Shard]:
    @st.composite
    def build(draw: st.DrawFn) -> Shard:
        rows, dim = draw(st.integers(1, 60)), draw(st.integers(1, 9))
        table = TableSpec("t", rows, dim, draw(st.sampled_from(VALUE_TYPES)))
        first_row, first_col = draw(st.integers(0, rows - 1)), draw(st.integers(0, dim - 1))
        height, width = draw(st.integers(1, rows - first_row)), draw(st.integers(1, dim - first_col))
        return Shard(table, first_row, height, first_col, width)

    return build()


@given(st.data(), st.lists(shards(), min_size=1, max_size=3))
def test_rows_come_back_as_they_were(data: st.DataObject, announced: list[Shard]) -> None:
    slot = data.draw(st.integers(0, len(announced) - 1))
    shard = announced[slot]
    ids = sorted(data.draw(st.sets(st.integers(shard.row_offset, shard.row_offset + shard.rows - 1), min_size=1)))
    values = data.draw(hnp.arrays(shard.table.dtype, (len(ids), shard.cols)))
    batch, step = RowBatch(shard, np.array(ids, np.int64), values), data.draw(st.integers(0, 2**64 - 1))
    part = publish_pb2.PublishRequest.FromString(rows.part_chunk(step, slot, batch)).chunk
    release = rows.release_chunk(slot, batch)
    record = b"".join(records.pack_rows(slot, batch))
    assert part.step == step
    for found in (
        rows.decode_rows(part.rows, announced),
        rows.decode_rows(subscribe_pb2.SubscribeResponse.FromString(release).chunk.rows, announced),
        rows.rows_in_chunk(release, batch),
        records.unpack_rows(memoryview(record), lambda _: announced),
    ):
        assert found.shard is shard
        assert found.ids.tolist() == ids
        assert found.values.tobytes() == values.tobytes()
        assert (found.values.shape, found.values.dtype) == (values.shape, values.dtype)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 300), st.sampled_from([0, 1, 2]))
def test_messages_with_rows_are_as_generated_classes_write_them(
    step: int, slot: int, count: int, kind: int
) -> None:
    ids, values = np.arange(count), np.arange(count * 4, dtype="<f4").reshape(count, 4)
    batch = RowBatch.of_table(USER, ids, values)
    batch = [batch, batch.digested(), RowBatch.deletes(batch.shard, ids)][kind]
    expected = tables_pb2.Rows(slot=slot, ids=ids.tobytes())
    if batch.deleted:
        expected.deleted = True
    else:
        expected.values = values.tobytes()
    release = subscribe_pb2.SubscribeResponse(chunk=subscribe_pb2.ReleaseChunk(rows=expected))
    assert subscribe_pb2.SubscribeResponse.FromString(rows.release_chunk(slot, batch)) == release
    if batch.digests is not None:
        expected.digests = batch.digests.tobytes()
    part = publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=expected))
    assert publish_pb2.PublishRequest.FromString(rows.part_chunk(step, slot, batch)) == part


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 300), st.booleans()), max_size=4), st.data())
def test_whole_parts_and_releases_are_those_that_generated_classes_write(
    tables: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    batches, parts, releases = [], [], []
    for slot, count, deleted in tables:
        batch = RowBatch.of_table(USER, np.arange(count), np.arange(count * 4, dtype="<f4").reshape(count, 4))
        batches.append((slot, RowBatch.deletes(batch.shard, batch.ids) if deleted else batch.digested()))
        chunk = subscribe_pb2.SubscribeResponse.FromString(rows.release_chunk(*batches[-1])).chunk
        parts.append(publish_pb2.PublishRequest.FromString(rows.part_chunk(1, *batches[-1])).chunk.rows)
        releases.append(chunk.rows)
    close = publish_pb2.PartClose(step=data.draw(st.integers(0, 2**64 - 1)), full=data.draw(st.booleans()))
    whole_part = publish_pb2.PublishRequest(part=publish_pb2.WholePart(rows=parts, close=close))
    assert publish_pb2.PublishRequest.FromString(rows.whole_part(batches, close)) == whole_part
    end = subscribe_pb2.ReleaseEnd(rows=data.draw(st.integers(0, 2**64 - 1)))
    release = subscribe_pb2.SubscribeResponse(release=subscribe_pb2.WholeRelease(rows=releases, end=end))
    written = rows.whole_release([rows.release_chunk(*each) for each in batches], end)
    assert subscribe_pb2.SubscribeResponse.FromString(written) == release


@given(st.integers(0, 40), st.integers(1, 300))
def test_chunks_are_all_rows_in_bounded_pieces(count: int, chunk_bytes: int) -> None:
    ids, values = np.arange(count) * 3, np.arange(count * 2, dtype="<f4").reshape(count, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
        pieces = list(rows.chunked(RowBatch.of_table(TableSpec("t", 200, 2), ids, values)))
    for piece in pieces:
        assert len(piece.ids) == len(piece.values) > 0
        assert piece.nbytes <= max(16, chunk_bytes)
    assert [row for piece in pieces for row in piece.ids] == ids.tolist()
    assert b"".join(piece.values.tobytes() for piece in pieces) == values.tobytes()


def test_a_chunk_of_the_widest_rows_is_within_the_limit() -> None:
    table = TableSpec("t", 10, 65_536)
    for piece in rows.chunked(RowBatch.of_table(table, np.arange(10), np.zeros((10, 65_536), "<f4"))):
        message = publish_pb2.PartChunk(step=2**63, rows=rows_message(2**31, piece.ids, piece.values))
        assert message.ByteSize() <= rows.MAX_CHUNK_BYTES


def test_tables_shards_and_positions_come_back_as_they_were() -> None:
    for table in TABLES:
        assert messages.table_from_message(messages.table_to_message(table)) == table
    message = publish_pb2.PublishOpen(shards=[messages.shard_to_message(shard, TABLES) for shard in SHARDS])
    assert messages.shards_from_open(message, TABLES) == SHARDS
    position = Position("abc", 7)
    assert messages.position_from_message(messages.position_to_message(position)) == position


@pytest.mark.parametrize("value_type", [0, 3, 99])
def test_an_unknown_value_type_is_refused(value_type: int) -> None:
    message = tables_pb2.Table(name="t", rows=1, dim=1)
    message.value_type = value_type  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match=f"'t': value type {value_type}"):
        messages.table_from_message(message)


def test_an_unknown_type_of_what_is_sent_and_an_unknown_mode_are_refused_with_those_there_are() -> None:
    message = messages.table_to_message(USER)
    message.sent_as = 99  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="value type 99: expected one of fp32, fp16, bf16, int8"):
        messages.delivery_from_message(message, Mode.EMBEDDINGS)
    with pytest.raises(InvalidInput, match="mode 99: expected one of embeddings, ids"):
        messages.mode_from_message(99)


def test_what_is_sent_is_the_tables_own_type_unless_it_is_said() -> None:
    for table, own in ((USER, ValueType.FP32), (HALF, ValueType.FP16)):
        delivery = messages.delivery_from_message(messages.table_to_message(table), Mode.EMBEDDINGS)
        assert delivery == Delivery(table, own, Mode.EMBEDDINGS)
    assert messages.mode_from_message(0) is Mode.EMBEDDINGS


def check(message: tables_pb2.Rows) -> None:
    rows.decode_rows(message, SHARDS).check()


TWO = np.ones((2, 2), "<f4")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (rows_message(2, [10], TWO[:1]), "slot 2, but only 2"),
        (tables_pb2.Rows(slot=0, ids=b"1234567", values=b""), "'user': 7 bytes of ids"),
        (rows_message(0, [10, 11], np.ones((2, 3), "<f4")), "'user': 24 bytes of values for 2 rows of 2 float32"),
        (rows_message(0, [10, 11], np.ones((2, 2), "<f2")), "expected 16"),
        (rows_message(1, [1], np.ones((1, 3), "<f4")), "'half': 12 bytes of values for 1 row of 3 float16"),
        (rows_message(0, [], TWO[:0]), "'user': a chunk without rows"),
        (rows_message(0, [11, 10], TWO), "'user': ids must be strictly ascending"),
        (rows_message(0, [10, 10], TWO), "'user': ids must be strictly ascending"),
        (rows_message(0, [9, 10], TWO), "'user': row id 9 is outside this rank's rows 10 to 29"),
        (rows_message(0, [29, 30], TWO), "'user': row id 30 is outside"),
        (rows_message(0, [-1, 10], TWO), "row id -1"),
        (rows_message(0, [10, 2**62], TWO), f"row id {2**62}"),
        (
            rows_message(0, [10, 11], np.array([[0, 0], [0, np.nan]], "<f4")),
            "'user': row 11 holds nan in column 2",
        ),
        (
            rows_message(0, [10, 11], np.array([[-np.inf, 0], [0, 0]], "<f4")),
            "'user': row 10 holds -inf in column 1",
        ),
        (rows_message(1, [3], np.array([[1, np.inf, 1]], "<f2")), "'half': row 3 holds inf in column 1"),
    ],
)
def test_malformed_rows_are_refused(message: tables_pb2.Rows, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(message)
    assert said in str(refused.value)


@pytest.mark.parametrize("ids", [[10, 11], [10, 29]])
def test_rows_at_the_edges_are_taken(ids: list[int]) -> None:
    check(rows_message(0, ids, TWO))


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, 3))
def test_any_bytes_are_rows_or_refused(ids: bytes, values: bytes, slot: int) -> None:
    message = tables_pb2.Rows(slot=slot, ids=ids, values=values)
    try:
        batch = rows.decode_rows(message, SHARDS)
        batch.check()
    except InvalidInput:
        return
    shard, found, array = batch.shard, batch.ids, batch.values
    last = shard.row_offset + shard.rows
    assert found.tolist() == sorted(set(found.tolist()))
    assert all(shard.row_offset <= row < last for row in found.tolist())
    assert np.isfinite(array).all()
