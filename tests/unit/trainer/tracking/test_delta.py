"""The rows of a delta: by shard, as they are published, joined, and with the digests that a device makes."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.core.digests import row_digests
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.tracking import Delta, DeltaRows, Token, Tracker, TrackerOptions, TrackingMode, gpu
from deltasync.trainer.tracking.shards import TrackedTable

TABLE = TableSpec("t", 20, 9, np.dtype("<f4"))
WITHOUT_ROWS = sorted(set(TrackingMode) - {TrackingMode.EMBEDDING, TrackingMode.EMBEDDING_LAST}, key=str)


def column_shards(widths: list[int]) -> list[Shard]:
    """Shards side by side, of rows 10 to 19."""
    return [Shard(TABLE, 10, 10, sum(widths[:number]), width) for number, width in enumerate(widths)]


def column_rows(widths: list[int], mode: TrackingMode = TrackingMode.EMBEDDING_LAST) -> DeltaRows:
    ids = torch.tensor([11, 15, 18])
    return DeltaRows(ids, column_shards(widths), [torch.randn(3, width) for width in widths], None, mode)


WIDTHS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(WIDTHS)
def test_each_shard_has_a_batch_of_what_was_read(widths: list[int]) -> None:
    rows = column_rows(widths)
    batches = rows.batches()
    assert [batch.shard for batch in batches] == column_shards(widths)
    for batch, values in zip(batches, rows.shard_values, strict=True):
        assert np.shares_memory(batch.ids, rows.ids.numpy())
        assert np.shares_memory(batch.values, values.numpy())
        assert batch.values.flags.c_contiguous
        np.testing.assert_array_equal(batch.values, values.numpy(), strict=True)
        batch.check()


@given(WIDTHS)
def test_values_are_those_of_all_shards_side_by_side(widths: list[int]) -> None:
    rows = column_rows(widths)
    assert rows.values is not None
    assert rows.values is rows.values, "joined once"
    assert len(widths) > 1 or rows.values is rows.shard_values[0], "a lone shard is not copied"
    assert rows.columns == [(shard.col_offset, shard.cols) for shard in rows.shards]
    assert rows.values.shape == (3, sum(widths))
    for (offset, width), values in zip(rows.columns, rows.shard_values, strict=True):
        assert torch.equal(rows.values[:, offset : offset + width], values)


@given(WIDTHS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_selection_is_by_shard_too(widths: list[int], mask: list[bool]) -> None:
    whole, chosen = column_rows(widths), torch.tensor(mask)
    some = whole.select(chosen)
    assert whole.values is not None
    assert some.values is not None
    assert torch.equal(some.values, whole.values[chosen])
    assert some.columns == whole.columns
    for batch, all_rows in zip(some.batches(), whole.batches(), strict=True):
        assert batch.shard == all_rows.shard
        np.testing.assert_array_equal(batch.ids, all_rows.ids[mask])
        np.testing.assert_array_equal(batch.values, all_rows.values[mask], strict=True)


@pytest.mark.parametrize("mode", WITHOUT_ROWS)
def test_modes_without_current_rows_have_no_batches(mode: TrackingMode) -> None:
    with pytest.raises(InvalidInput, match=f"mode '{mode.value}', has no current rows: use 'embedding_last'"):
        column_rows([2, 1], mode).batches()


def test_ids_alone_have_no_batches() -> None:
    model = torch.nn.Linear(2, 3)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))
    tracker.mark_all()
    delta = tracker.get_delta_ids()
    assert delta.rows["weight"].values is None
    assert delta.nbytes == sum(rows.ids.nbytes for rows in delta.rows.values())
    with pytest.raises(InvalidInput, match="read it with get_delta"):
        delta.batches()
    assert [batch.shard.table.name for batch in tracker.get_delta().batches()] == ["weight", "bias"]


def test_bytes_are_counted_without_joining() -> None:
    rows = column_rows([2, 1])
    delta = Delta({"t": rows}, Token("c", 1, {}, {}, {}, None), {})
    assert delta.nbytes == 3 * 8 + 3 * 3 * 4
    assert "values" not in vars(rows)
    assert [batch.shard for batch in delta.batches()] == rows.shards


# Digests that torch makes are those of rows in host memory.

DTYPES = ("<f4", "<f2", "<f8", "<i8", "<i4", "<i2", "u1", "?")


@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_torch_makes_the_digests_of_the_kernel(
    data: st.DataObject, name: str, rows: int, columns: int, col_offset: int
) -> None:
    dtype = np.dtype(name)
    size = rows * columns * dtype.itemsize
    bits = data.draw(st.binary(min_size=size, max_size=size))
    bits = bytes(byte & 1 for byte in bits) if name == "?" else bits
    values = np.frombuffer(bytearray(bits), dtype).reshape(rows, columns)
    shard = Shard(TableSpec("t", rows, 8, dtype, TableKind.BUFFER), 0, rows, col_offset, columns)
    made = gpu.row_digests(torch.from_numpy(values), shard)
    assert made.numpy().view(np.uint64).tolist() == row_digests(values, col_offset).tolist()


def test_rows_of_a_device_are_published_with_their_digests() -> None:
    model = nn.Linear(3, 5)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    tracker.resync()
    with mock.patch.object(TrackedTable, "device", torch.device("cuda")):
        delta = tracker.get_delta()
    some = delta.rows["weight"].select(torch.tensor([True, False, True, False, True]))
    assert len(some.ids) == 3
    for batch in (*delta.batches(), *some.batches()):
        assert batch.digests is not None
        assert batch.digests.tolist() == row_digests(batch.values).tolist()
    assert all(batch.digests is None for batch in tracker.get_delta().batches()), "the publisher makes them"


def test_many_rows_are_taken_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_BLOCK_WORDS", 7)
    values = torch.arange(24, dtype=torch.float32).view(8, 3)
    made = gpu.row_digests(values, Shard.whole(TableSpec("t", 8, 3)))
    assert made.numpy().view(np.uint64).tolist() == row_digests(values.numpy()).tolist()
