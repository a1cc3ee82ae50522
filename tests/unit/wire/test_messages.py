import operator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.support.wire import decoded, rows_message

from deltasync.base.errors import Damaged, InvalidInput
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import Mode, TableForm
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
    if data.draw(st.booleans()):
        batch = batch.digested()
    sent = rows.part_chunk(step, slot, batch)
    received = rows.read_request(sent)
    assert isinstance(received, rows.ReceivedRows)
    assert (received.step, received.end) == (step, None)
    ((found_slot, columns),) = received.rows
    assert found_slot == slot
    arrived = columns.rows_of(slot, announced)
    release = rows.release_chunk(slot, arrived)
    assert release is sent, "a chunk is sent on without a copy"
    other = rows.release_chunk(slot + 1, arrived)
    assert subscribe_pb2.SubscribeResponse.FromString(other).chunk.rows.slot == slot + 1
    sent_on = rows.read_response(release)
    assert isinstance(sent_on, rows.ReceivedRows)
    ((_, received_again),) = sent_on.rows
    record = b"".join(records.pack_rows(slot, arrived))
    assert arrived.encoded
    assert bytes(arrived.encoded) in sent
    assert release.endswith(arrived.encoded), "the same bytes on every hop"
    assert record.endswith(arrived.encoded), "the same bytes on every hop"
    for found in (
        arrived,
        received_again.rows_of(slot, announced),
        rows.at_end_of(release, batch),
        records.unpack_rows(memoryview(record), lambda _: announced),
    ):
        assert found.shard is shard
        assert (found.digests is None) is (batch.digests is None)
        assert found.digests is None or found.digests.tolist() == batch.digests.tolist()  # type: ignore[union-attr]
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
    expected = tables_pb2.TableRows(slot=slot, rows=tables_pb2.Rows(ids=ids.tobytes()))
    if batch.deleted:
        expected.rows.deleted = True
    else:
        expected.rows.values = values.tobytes()
    if batch.digests is not None:
        expected.rows.digests = batch.digests.tobytes()
    release = subscribe_pb2.SubscribeResponse(chunk=subscribe_pb2.ReleaseChunk(rows=expected))
    assert subscribe_pb2.SubscribeResponse.FromString(rows.release_chunk(slot, batch)) == release
    part = publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=expected))
    assert publish_pb2.PublishRequest.FromString(rows.part_chunk(step, slot, batch)) == part


@st.composite
def ends(draw: st.DrawFn) -> tuple[subscribe_pb2.ReleaseEnd, rows.Pieces]:
    """An end, and the same in two serialized pieces, each with some of its fields."""
    slots, numbers, times = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "position": st.builds(tables_pb2.Position, history=st.text(max_size=3), version=numbers, seal=numbers),
        "step_end_unix_ns": times,
        "whole": st.lists(slots, max_size=3),
        "sums": st.lists(st.builds(tables_pb2.Checksum, slot=slots, sum=numbers), max_size=3),
        "event_time_unix_ns": times,
        "kept": st.text(max_size=3),
        **dict.fromkeys(("step", "rows", "version", "token", "behind_ns", "version_seal"), numbers),
    }
    pieces: rows.Pieces = []
    whole, first = subscribe_pb2.ReleaseEnd(), draw(st.sets(st.sampled_from(sorted(fields))))
    for names in (first, fields.keys() - first):
        piece = subscribe_pb2.ReleaseEnd(**{name: draw(fields[name]) for name in sorted(names)})
        pieces.append(piece.SerializeToString())
        whole.MergeFrom(piece)
    return whole, pieces


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
    written = rows.whole_message([close.SerializeToString()], rows.table_pieces(batches))
    assert publish_pb2.PublishRequest.FromString(written) == whole_part
    end, pieces = data.draw(ends())
    release = subscribe_pb2.SubscribeResponse(release=subscribe_pb2.WholeRelease(rows=releases, end=end))
    written = rows.whole_message(pieces, rows.table_pieces(batches))
    assert subscribe_pb2.SubscribeResponse.FromString(written) == release
    received = rows.read_response(written)
    assert isinstance(received, rows.ReceivedRows)
    assert received.end == end


@given(st.data())
def test_the_end_of_a_release_is_the_one_that_the_generated_class_writes(data: st.DataObject) -> None:
    end, pieces = data.draw(ends())
    written = rows.release_end(pieces)
    assert subscribe_pb2.SubscribeResponse.FromString(written).release_end == end
    assert rows.read_response(written) == subscribe_pb2.SubscribeResponse(release_end=end)


@pytest.mark.parametrize("count", [0, 1, 13, 40])
@pytest.mark.parametrize("dim", [2, 19_998, 60_000])
def test_chunks_are_all_rows_in_bounded_pieces(count: int, dim: int) -> None:
    ids, values = np.arange(count) * 3, np.arange(count * dim, dtype="<f4").reshape(count, dim)
    pieces = list(rows.chunked(RowBatch.of_table(TableSpec("t", 200, dim), ids, values)))
    for piece in pieces:
        assert len(piece.ids) == len(piece.values) > 0
        assert piece.digested().message_bytes <= rows.CHUNK_BYTES
    assert len(pieces) == -(-count * (dim * 4 + 16) // (rows.CHUNK_BYTES // (dim * 4 + 16) * (dim * 4 + 16)))
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


def test_unknown_value_types_and_modes_are_refused_with_the_known_ones() -> None:
    message = messages.table_to_message(USER)
    message.sent_as = 99  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="value type 99: expected one of fp32, fp16, bf16, int8"):
        messages.form_from_message(message, Mode.EMBEDDINGS)
    with pytest.raises(InvalidInput, match="mode 99: expected one of embeddings, ids"):
        messages.mode_from_message(99)


def test_what_is_sent_is_the_tables_own_type_unless_it_is_said() -> None:
    for table, own in ((USER, ValueType.FP32), (HALF, ValueType.FP16)):
        form = messages.form_from_message(messages.table_to_message(table), Mode.EMBEDDINGS)
        assert form == TableForm(table, own, Mode.EMBEDDINGS)
    assert messages.mode_from_message(0) is Mode.EMBEDDINGS


# What a peer may send: any message of a generated class, written in any way that protobuf allows.


@st.composite
def row_messages(draw: st.DrawFn) -> tables_pb2.TableRows:
    some = st.binary(max_size=20)
    rows = tables_pb2.Rows(ids=draw(some), digests=draw(some), values=draw(some), deleted=draw(st.booleans()))
    return tables_pb2.TableRows(slot=draw(st.integers(0, 2**32 - 1)), rows=rows)


@st.composite
def requests(draw: st.DrawFn) -> Any:
    kind = publish_pb2.PublishRequest
    step, several = draw(st.integers(0, 2**64 - 1)), draw(st.lists(row_messages(), max_size=3))
    close = publish_pb2.PartClose(
        step=step, rows=draw(st.integers(0, 9)), deletes=draw(st.lists(st.integers(0, 9)))
    )
    messages = [
        kind(),
        kind(close=close),
        kind(goodbye=publish_pb2.PublishGoodbye()),
        kind(open=publish_pb2.PublishOpen(model="clicks", run="r")),
        kind(chunk=publish_pb2.PartChunk(step=step, rows=several[0] if several else None)),
        kind(part=publish_pb2.WholePart(rows=several, close=close)),
        kind(part=publish_pb2.WholePart(rows=several)),
    ]
    return draw(st.sampled_from(messages))


@st.composite
def responses(draw: st.DrawFn) -> Any:
    kind, several = subscribe_pb2.SubscribeResponse, draw(st.lists(row_messages(), max_size=3))
    end = subscribe_pb2.ReleaseEnd(step=draw(st.integers(0, 2**64 - 1)), whole=draw(st.lists(st.integers(0, 9))))
    messages = [
        kind(),
        kind(opened=subscribe_pb2.SubscribeOpened(model="clicks")),
        kind(release_end=end),
        kind(progress=subscribe_pb2.Progress(version=2)),
        kind(chunk=subscribe_pb2.ReleaseChunk(rows=several[0] if several else None)),
        kind(release=subscribe_pb2.WholeRelease(rows=several, end=end)),
        kind(release=subscribe_pb2.WholeRelease(rows=several)),
    ]
    return draw(st.sampled_from(messages))


def check_read(raw: bytes, message: Any) -> None:
    """Check that bytes are read as what the generated class reads in them.

    Raises:
        InvalidInput: the end of a whole part or release comes after its rows.
    """
    publishes = isinstance(message, publish_pb2.PublishRequest)
    found: Any = rows.read_request(raw) if publishes else rows.read_response(raw)
    kind = message.WhichOneof("message")
    if not isinstance(found, rows.ReceivedRows):
        assert kind not in ("chunk", "part", "release")
        assert found == message
        return
    received = list(found.rows)  # Which may refuse them: they are read one by one.
    carrier = getattr(message, kind)
    carrier.DiscardUnknownFields()
    sent = [carrier.rows] if kind == "chunk" else list(carrier.rows)
    end = {"part": lambda: carrier.close, "release": lambda: carrier.end}.get(kind, lambda: None)()
    if found.end:
        found.end.DiscardUnknownFields()
    # As bytes, because a NaN does not equal itself.
    assert (found.end and found.end.SerializeToString()) == (end and end.SerializeToString())
    assert found.step == (found.end.step if found.end else getattr(carrier, "step", found.step))
    for (slot, columns), each in zip(received, sent, strict=True):
        content = (bytes(columns.ids), bytes(columns.digests), bytes(columns.values), columns.deleted)
        assert slot == each.slot
        assert content == (each.rows.ids, each.rows.digests, each.rows.values, each.rows.deleted)
        assert tables_pb2.Rows.FromString(bytes(columns.message)) == each.rows, "as it goes on to replicas"


def _with_noise(raw: bytes, at: int, noise: bytes) -> bytes:
    return raw[: at % (len(raw) + 1)] + noise + raw[at % (len(raw) + 1) :]


WRITTEN = st.one_of(requests(), responses()).map(lambda each: each.SerializeToString())


@given(
    st.one_of(
        st.binary(max_size=60),
        st.builds(operator.add, WRITTEN, WRITTEN),
        st.builds(
            _with_noise,
            WRITTEN,
            st.integers(0, 60),
            st.sampled_from([b"\x80\x00", b"\x7a\x02xy", b"\x08\x05", b"\x12\x00", b"\x0a\x00", b"\xff", b""]),
        ),
        st.builds(lambda raw, cut: raw[:cut], WRITTEN, st.integers(0, 60)),
    ),
    st.sampled_from([publish_pb2.PublishRequest, subscribe_pb2.SubscribeResponse]),
)
def test_any_bytes_are_read_as_generated_classes_read_them_or_refused(raw: bytes, kind: Any) -> None:
    try:
        message = kind.FromString(raw)
    except DecodeError:
        with pytest.raises((DecodeError, InvalidInput)):
            check_read(raw, kind())
    else:
        try:
            check_read(raw, message)
        except InvalidInput as error:
            if "whose end comes after rows" not in error.text:
                raise


@pytest.mark.parametrize("kind", [publish_pb2.PublishRequest, subscribe_pb2.SubscribeResponse])
def test_an_end_after_rows_is_refused(kind: Any) -> None:
    """Otherwise all of a message would have to be read before its first table is taken."""
    content = rows_message(0, [10], TWO[:1]).SerializeToString()
    table = b"\x12" + bytes([len(content)]) + content
    for odd in (table + b"\x0a\x00", b"\x0a\x00" + table + b"\x0a\x02\x08\x01"):
        raw = b"\x22" + bytes([len(odd)]) + odd
        with pytest.raises(InvalidInput, match="whose end comes after rows"):
            check_read(raw, kind.FromString(raw))


def test_rows_in_another_valid_form_are_rewritten_in_ours() -> None:
    content = rows_message(0, [10], np.ones((1, 2), "<f4")).rows.SerializeToString()
    ids, values = content[:10], content[10:]
    first = b"\x0a\x01\x00" + content  # The last of two fields of one number counts.
    for odd in (values + ids, first, content + b"\x7a\x02xy", b"\x0a\x88\x00" + content[2:]):
        table = b"\x08\x00\x12" + bytes([len(odd)]) + odd
        part = b"\x08\x05\x12" + bytes([len(table)]) + table
        received = rows.read_request(b"\x12" + bytes([len(part)]) + part)
        assert isinstance(received, rows.ReceivedRows)
        ((_, columns),) = received.rows
        assert bytes(columns.message) == content


@pytest.mark.parametrize("table", [USER, HALF])
def test_rows_that_begin_at_any_byte_are_checked_and_applied_as_others(table: TableSpec) -> None:
    values = np.arange(9 * table.dim).reshape(9, table.dim).astype(table.dtype)
    batch, expected = RowBatch.of_table(table, np.arange(9), values).digested(), StampedTable(table)
    expected.apply(batch, 1)
    for offset in range(8):
        sent = memoryview(bytes(offset) + b"".join(rows.rows_pieces(batch)))[offset:]
        found, arrived = StampedTable(table), rows.Columns.read(sent).rows_of(0, [batch.shard])
        arrived.check()
        arrived.check_digests()
        found.apply(arrived, 1)
        assert (found.checksum, found.norm) == (expected.checksum, expected.norm)
        assert found.rows.tobytes() == expected.rows.tobytes()
        with pytest.raises(Damaged, match="1 of 9 rows do not match their digests"):
            rows.Columns.read(memoryview(_flipped(sent))).rows_of(0, [batch.shard]).check_digests()


def _flipped(content: memoryview) -> bytes:
    """The same bytes with another last bit."""
    return bytes(content[:-1]) + bytes([content[-1] ^ 1])


def test_digests_of_deleted_rows_go_no_further() -> None:
    """Nobody looks at them, so a publisher could send any eight bytes a row to replicas."""
    message = tables_pb2.Rows(ids=np.array([10]).tobytes(), deleted=True, digests=b"anybytes")
    batch = rows.Columns.read(memoryview(message.SerializeToString())).rows_of(0, SHARDS)
    assert b"any" not in b"".join(rows.rows_pieces(batch))


def check(message: tables_pb2.TableRows) -> None:
    decoded(message, SHARDS).check()


TWO = np.ones((2, 2), "<f4")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (rows_message(2, [10], TWO[:1]), "slot 2, but only 2"),
        (tables_pb2.TableRows(rows=tables_pb2.Rows(ids=b"1234567")), "'user': 7 bytes of ids"),
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
def test_malformed_rows_are_refused(message: tables_pb2.TableRows, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(message)
    assert said in str(refused.value)


@pytest.mark.parametrize("ids", [[10, 11], [10, 29]])
def test_rows_at_the_edges_are_taken(ids: list[int]) -> None:
    check(rows_message(0, ids, TWO))


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, 3))
def test_any_bytes_are_rows_or_refused(ids: bytes, values: bytes, slot: int) -> None:
    message = tables_pb2.TableRows(slot=slot, rows=tables_pb2.Rows(ids=ids, values=values))
    try:
        batch = decoded(message, SHARDS)
        batch.check()
    except InvalidInput:
        return
    shard, found, array = batch.shard, batch.ids, batch.values
    last = shard.row_offset + shard.rows
    assert found.tolist() == sorted(set(found.tolist()))
    assert all(shard.row_offset <= row < last for row in found.tolist())
    assert np.isfinite(array).all()


def test_a_part_of_very_many_tables_is_read_one_table_at_a_time() -> None:
    """The event loop has other things to do, and most of what a bad peer sends is never read."""
    batch = RowBatch.of_table(TableSpec("t", 20, 1), [7], np.ones((1, 1), "<f4"))
    close = publish_pb2.PartClose(step=3, rows=1000)
    tables = rows.table_pieces((slot, batch) for slot in range(1000))
    received = rows.read_request(rows.whole_message([close.SerializeToString()], tables))
    assert isinstance(received, rows.ReceivedRows)
    assert iter(received.rows) is received.rows
    assert received.end == close
    assert [(slot, bytes(columns.ids)) for slot, columns in received.rows] == [
        (slot, batch.ids.tobytes()) for slot in range(1000)
    ]
