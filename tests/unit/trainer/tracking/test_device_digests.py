"""Digests that torch makes are those of rows in host memory."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.core.digests import row_digests
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode, device_digests
from deltasync.trainer.tracking.shards import TrackedTable

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
    made = device_digests.row_digests(torch.from_numpy(values), shard)
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
    monkeypatch.setattr(device_digests, "_BLOCK_WORDS", 7)
    values = torch.arange(24, dtype=torch.float32).view(8, 3)
    made = device_digests.row_digests(values, Shard.whole(TableSpec("t", 8, 3)))
    assert made.numpy().view(np.uint64).tolist() == row_digests(values.numpy()).tolist()
