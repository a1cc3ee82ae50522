"""The rows of a delta, by shard as they are published, with the digests that a device makes."""

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.core.digests import row_digests
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.delta import ReadMemory, batch_on_host, gather
from deltasync.trainer.tracking.delta import row_digests as digests_on_device
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable

TABLE = TableSpec("t", 20, 9, np.dtype("<f4"))
IDS = [1, 5, 8]


def batches(widths: list[int], *, values: bool = True) -> tuple[list[RowBatch], TrackedTable]:
    """Gathers three of the rows 10 to 19 of a table with shards side by side."""
    columns = [Shard(TABLE, 10, 10, sum(widths[:number]), width) for number, width in enumerate(widths)]
    shards = [TrackedShard(shard, torch.randn(10, shard.cols)) for shard in columns]
    table = TrackedTable(TABLE, shards, [], fused=True, replicated=False)
    gathered = gather(table, torch.tensor(IDS), ReadMemory(), values=values)
    return [batch_on_host(*each) for each in gathered], table


WIDTHS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


@given(WIDTHS)
def test_each_shard_has_a_batch_with_global_ids(widths: list[int]) -> None:
    made, table = batches(widths)
    for batch, tracked in zip(made, table.shards, strict=True):
        assert batch.shard == tracked.shard
        assert batch.ids.tolist() == [11, 15, 18]
        assert batch.values.flags.c_contiguous
        np.testing.assert_array_equal(batch.values, tracked.weight[IDS].numpy(), strict=True)
        batch.check()


@given(WIDTHS)
def test_batches_with_ids_only_have_no_columns(widths: list[int]) -> None:
    made, table = batches(widths, values=False)
    assert [batch.shard for batch in made] == [tracked.shard for tracked in table.shards]
    assert all(batch.values.shape == (3, 0) and batch.ids.tolist() == [11, 15, 18] for batch in made)


def test_a_read_of_ids_copies_no_values() -> None:
    tracker = Tracker(nn.Linear(2, 3), TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    tracker.mark_all()
    delta = tracker.get_delta_ids()
    assert {name: ids.tolist() for name, ids in delta.ids.items()} == {"weight": [0, 1, 2], "bias": [0]}
    assert delta.nbytes == 4 * 8
    assert tracker.get_delta().nbytes == 4 * 8 + 9 * 4


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
    made = digests_on_device(torch.from_numpy(values), shard)
    assert made.numpy().view(np.uint64).tolist() == row_digests(values, col_offset).tolist()


def test_rows_of_a_device_are_published_with_their_digests() -> None:
    model = nn.Linear(3, 5)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    tracker.resync()
    with mock.patch.object(TrackedTable, "device", torch.device("cuda")):
        delta = tracker.get_delta()
    for batch in delta.rows:
        assert batch.digests is not None
        assert batch.digests.tolist() == row_digests(batch.values).tolist()
    assert all(batch.digests is None for batch in tracker.get_delta().rows), "the publisher makes them"


def test_many_rows_are_taken_in_blocks() -> None:
    rows = (1 << 22) + 3
    values = torch.arange(rows, dtype=torch.float32).view(rows, 1)
    made = digests_on_device(values, Shard.whole(TableSpec("t", rows, 1)))
    assert np.array_equal(made.numpy().view(np.uint64), row_digests(values.numpy()))
