"""Stamps, counts and reads of rows, where they are: a GPU's against a CPU's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.devices import CPU_AND_GPU, device_of, needs, no_waiting

needs("deltasync.trainer.tracking")

from tests.support.deltas import values_of
from tests.support.embeddings import embedding
from tests.support.side_by_side import Operation
from tests.unit.trainer.tracking.test_tracker_properties import (
    CHECKPOINTS,
    COUNTED,
    MODES,
    OFTEN,
    SELDOM,
    programs,
    run,
)
from torch import nn

from deltasync.core.digests import row_digests
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.compared_rows import FollowedRows
from deltasync.trainer.tracking.delta import batch_on_host, due_ids, to_host
from deltasync.trainer.tracking.delta import row_digests as digests_on_device
from deltasync.trainer.tracking.module_tensors import module_tensors
from deltasync.trainer.tracking.shards import dense_table
from deltasync.trainer.tracking.stamps import RowStamps, TableStamps

ROWS = 50
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = embedding(torch.arange(ROWS * 4.0).view(ROWS, 4))


def stamps_on(kind: str) -> RowStamps:
    model = Rows().to(device_of(kind))
    return RowStamps([dense_table(tensor) for tensor in module_tensors(model)])


def tracker_on(kind: str, mode: TrackingMode = TrackingMode.EMBEDDING_LAST) -> tuple[torch.Tensor, Tracker]:
    model = Rows().to(device_of(kind))
    return model.t.weight, Tracker(model, TrackerOptions(dense=True, mode=mode))


@CPU_AND_GPU
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("ids", [[], [7], [3, 3, 0, 49, 3], list(range(ROWS))], ids=len)
def test_rows_are_stamped_by_ids_of_any_type(kind: str, dtype: torch.dtype, ids: list[int]) -> None:
    stamps = stamps_on(kind)
    marked = torch.tensor(ids, dtype=dtype, device=device_of(kind))
    with no_waiting(kind):
        stamps.stamp(0, marked)
    assert stamps.written.tolist() == [len(ids)]
    assert stamps.later(0, 0).tolist() == sorted(set(ids))


@CPU_AND_GPU
@pytest.mark.parametrize("ids", [[-1, 5], [ROWS, 5], [2**31, 5]])
def test_an_id_outside_of_the_table_stamps_the_row_that_fbgemm_trains(kind: str, ids: list[int]) -> None:
    stamps = stamps_on(kind)
    stamps.stamp(0, torch.tensor(ids, device=device_of(kind)))
    assert stamps.later(0, 0).tolist() == [0, 5]


@CPU_AND_GPU
def test_rows_of_a_mask_are_stamped_whatever_their_number(kind: str) -> None:
    stamps = TableStamps(ROWS, device_of(kind))
    stamps.clock = 3
    mask = torch.arange(ROWS, device=device_of(kind)) % 7 == 2
    with no_waiting(kind):
        stamps.replace(stamps.settled().masked_fill(mask, stamps.clock))
    assert stamps.later(2).tolist() == list(range(2, ROWS, 7))
    assert not len(stamps.later(3))
    with no_waiting(kind):
        stamps.replace(stamps.clock)
    assert stamps.later(2).tolist() == list(range(ROWS))


@CPU_AND_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.bool])
def test_which_rows_differ_from_a_copy(kind: str, dtype: torch.dtype) -> None:
    rows = torch.zeros(ROWS, 3, dtype=dtype, device=device_of(kind))
    followed = FollowedRows(rows)
    rows[[4, 30], 2] = 1
    with no_waiting(kind):
        changed = followed.follow_all(rows)
    assert changed.nonzero().flatten().tolist() == [4, 30]
    assert torch.equal(followed.copy, rows)
    rows[[4, 7], 0] = 1
    assert followed.follow(rows).tolist() == ([4, 7])
    assert torch.equal(followed.copy, rows)


@CPU_AND_GPU
def test_marking_and_comparing_wait_for_nothing(kind: str) -> None:
    weight, tracking = tracker_on(kind)
    with no_waiting(kind):
        weight.data[3:5] += 1
        tracking.step()
        tracking.mark_all()
    assert len(tracking.get_delta().ids["t"]) == ROWS


@CPU_AND_GPU
def test_a_counted_read_waits_for_nothing_until_its_result(kind: str) -> None:
    weight, tracking = tracker_on(kind)
    weight.data[0] += 1
    tracking.acknowledge(tracking.get_delta())  # The first read copies factors of digests to the GPU.
    with no_waiting(kind):
        weight.data[3:5] += 1
        tracking.step()
        tracking.count_ahead()
        weight.data[40:] -= 1
        tracking.step()
        pending = tracking.begin_delta()
        expected = weight.data.clone()
        weight.data += 1  # After it was launched.
        tracking.step()
    delta = pending.result
    assert pending.arrived
    assert delta.ids["t"].tolist() == [3, 4, *range(40, ROWS)]
    assert torch.equal(values_of(delta, "t"), expected.cpu()[delta.ids["t"]])


@CPU_AND_GPU
@settings(max_examples=50)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 3), st.integers(0, 5))
def test_bounded_rows_are_those_that_are_due(kind: str, stamps: list[int], cursor: int, more: int) -> None:
    device, due = device_of(kind), [row for row, stamp in enumerate(stamps) if stamp > cursor]
    live = torch.arange(len(stamps) * 3.0).view(-1, 3)
    held = torch.tensor(stamps, dtype=torch.int32, device=device)
    there = live.to(device)
    with no_waiting(kind):
        ids, count = due_ids(held, cursor, min(len(stamps), len(due) + more))
        shard = Shard.whole(TableSpec("t", len(stamps), 3))
        batch, arriving_count = batch_on_host(shard, ids, there.index_select(0, ids), None), to_host(count)
    if kind == "cuda":
        torch.cuda.synchronize()
    delta = Delta("c", 1, [batch], {}, None, {"t": arriving_count}).result
    assert delta.ids.get("t", np.empty(0)).tolist() == due
    assert not due or torch.equal(values_of(delta, "t"), live[due])


@CPU_AND_GPU
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.float64, np.int64, np.int32, np.int16, np.uint8, np.bool_]
)
@pytest.mark.parametrize("columns", [1, 5])
def test_digests_made_on_the_device_are_the_kernels(kind: str, dtype: str, columns: int) -> None:
    values = np.random.default_rng(0).integers(0, 2 if dtype == "?" else 100, (ROWS, columns)).astype(dtype)
    shard = Shard(TableSpec("t", ROWS, 8, np.dtype(dtype), TableKind.BUFFER), 0, ROWS, 3, columns)
    made = digests_on_device(torch.from_numpy(values).to(device_of(kind)), shard)
    assert made.cpu().numpy().view(np.uint64).tolist() == row_digests(values, 3).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("launched", [False, True])
def test_rows_are_published_with_the_digests_of_the_device(launched: bool) -> None:
    weight, tracking = tracker_on("cuda")
    tracking.count_ahead()
    weight.data[5:20] += 1
    delta = tracking.begin_delta().result if launched else tracking.get_delta()
    (batch,) = delta.rows
    assert batch.digests is not None
    assert batch.digests.tolist() == row_digests(batch.values).tolist()


@CPU_AND_GPU
@settings(max_examples=40)
@given(programs(*OFTEN, *SELDOM, *CHECKPOINTS, *COUNTED), st.sampled_from(MODES))
def test_what_a_tracker_says_is_what_a_plain_model_does(
    kind: str, program: list[Operation], mode: TrackingMode
) -> None:
    run(program, mode, device=device_of(kind))


@CPU_AND_GPU
@pytest.mark.parametrize("read", [Tracker.get_delta, Tracker.get_delta_ids])
def test_other_threads_read_what_was_trained_by_then(kind: str, read: Callable[[Tracker], Delta]) -> None:
    weight, tracking = tracker_on(kind)
    with ThreadPoolExecutor(1) as elsewhere:
        for row in range(20):
            weight.data[row] += 1
            tracking.step()
            delta = elsewhere.submit(read, tracking).result(30)
            assert delta.ids["t"].tolist() == [row]
            if read is Tracker.get_delta:
                assert torch.equal(values_of(delta, "t"), weight.data[[row]].cpu())
            tracking.acknowledge(delta)


@CPU_AND_GPU
def test_deleted_rows_are_zeros_and_come_back_as_new_ones(kind: str) -> None:
    weight, tracking = tracker_on(kind, TrackingMode.EMBEDDING)
    tracking.delete("t", torch.tensor([4, 9]))
    assert not weight.data[[4, 9]].any()
    delta = tracking.get_delta()
    assert delta.deletes["t"].tolist() == [4, 9]
    tracking.acknowledge(delta)
    weight.data[9] = 1
    assert tracking.get_delta().ids["t"].tolist() == [9]
