"""Stamps, in host memory as in torch: rows that differ in a bit, and a clock that starts over."""

import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.deltas import first_of, values_of
from tests.support.embeddings import embedding
from torch import nn

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking import tracker as tracker_module
from deltasync.trainer.tracking.compared_rows import differing_rows
from deltasync.trainer.tracking.delta import forget
from deltasync.trainer.tracking.stamps import CLOCK_END, HostStamps, TableStamps

# Bits, among them -0.0, two NaNs and the smallest number.
BITS = {
    torch.float32: st.sampled_from((0, 1 << 31, 0x7FC00000, 0x7FC00001, 0x3F800000, 1))
    | st.integers(0, 2**32 - 1),
    torch.float16: st.sampled_from((0, 1 << 15, 0x7E00, 0x7E01, 0x3C00, 1)) | st.integers(0, 2**16 - 1),
}
CODES = {torch.float32: "I", torch.float16: "H"}


def matrix(rows: list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    packed = b"".join(struct.pack(f"2{CODES[dtype]}", *row) for row in rows)
    return torch.frombuffer(bytearray(packed), dtype=dtype).view(-1, 2)


@given(st.data(), st.sampled_from(list(BITS)))
def test_rows_differ_in_their_bits(data: st.DataObject, dtype: torch.dtype) -> None:
    row = st.tuples(BITS[dtype], BITS[dtype])
    pairs = data.draw(st.lists(st.tuples(row, row) | row.map(lambda same: (same, same)), min_size=1, max_size=5))
    ours, theirs = (matrix(list(side), dtype) for side in zip(*pairs, strict=True))
    assert differing_rows(ours, theirs).tolist() == [one != other for one, other in pairs]


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf")])
def test_what_is_forgotten_equals_nothing(dtype: torch.dtype, value: float) -> None:
    rows = torch.full((3, 2), value, dtype=dtype)
    forgotten = rows.clone()
    forget(forgotten, torch.tensor([0, 2]))
    assert forgotten[[0, 2]].isnan().all()
    assert differing_rows(rows, forgotten).tolist() == [True, False, True]


def rows() -> Any:
    return nn.ModuleDict({"t": embedding(torch.zeros(4, 1))})


class Receiver:
    """Holds what it was given, and has first values checked by it."""

    def __init__(self, name: str, weights: torch.Tensor) -> None:
        self.name, self.acknowledged, self.rows = name, weights.clone(), weights.clone()

    def read(self, tracking: Tracker, *, acknowledge: bool) -> None:
        delta = tracking.get_delta(self.name)
        if "t" in delta.ids:
            ids, first = delta.ids["t"], first_of(delta, "t")
            assert torch.equal(first.nan_to_num(-1.0), self.acknowledged[ids].nan_to_num(-1.0))
            self.rows[ids] = values_of(delta, "t")
        if "t" in delta.deletes:
            self.rows[delta.deletes["t"]] = 0.0
        if acknowledge and tracking.acknowledge(delta):
            self.acknowledged = self.rows.clone()


STEP = st.one_of(
    st.tuples(st.sampled_from(("write", "write", "delete")), st.integers(0, 3)),
    st.tuples(st.sampled_from(("read", "lose")), st.sampled_from("ab")),
    st.tuples(st.just("reload"), st.none()),
)


@given(st.integers(0, 25).flatmap(lambda n: st.lists(STEP, min_size=n, max_size=n)), st.integers(1, 12))
def test_nothing_is_lost_when_the_clock_starts_over(steps: list[tuple[str, int | str]], ticks: int) -> None:
    options = TrackerOptions(consumers=["a", "b"], mode=TrackingMode.EMBEDDING, dense=True)
    model, number = rows(), 0.0
    with mock.patch.object(tracker_module, "CLOCK_END", 3 + ticks):
        tracking = Tracker(model, options)
        receivers = {name: Receiver(name, model.t.weight.data) for name in "ab"}
        for what, which in steps:
            if isinstance(which, int) and what == "delete":
                tracking.delete("t", torch.tensor([which]))
                for receiver in receivers.values():
                    receiver.acknowledged[which] = float("nan")
            elif isinstance(which, int):
                number += 1.0
                model.t.weight.data[which] = number
            elif what == "reload":
                state = tracking.state_dict()
                tracking = Tracker(model, options)
                tracking.load_state_dict(state)
            elif isinstance(which, str):
                receivers[which].read(tracking, acknowledge=what == "read")
        for receiver in receivers.values():
            receiver.read(tracking, acknowledge=True)
            assert torch.equal(receiver.rows, model.t.weight.data)


def test_at_the_end_of_the_clock_everything_is_offered_once_more() -> None:
    model = rows()
    tracking = Tracker(model, TrackerOptions(dense=True))
    earlier = tracking.get_delta()
    tracking._stamps.clock = CLOCK_END
    model.t.weight.data[1] = 1.0
    late = tracking.get_delta()
    assert late.ids["t"].tolist() == [1]
    assert not tracking.acknowledge(late), "its cursor is of a time that is over"
    assert not tracking.acknowledge(earlier)
    again = tracking.get_delta()
    assert again.ids["t"].tolist() == [0, 1, 2, 3]
    assert tracking.acknowledge(again)
    model.t.weight.data[2] = 1.0
    assert tracking.get_delta().ids["t"].tolist() == [2]


# Stamps in host memory say what stamps in torch say.

ROWS = 150
INSIDE = st.lists(st.integers(0, ROWS - 1), max_size=20)
TYPES = st.sampled_from((torch.int64, torch.int32, torch.int16))
OPERATION = st.one_of(
    st.tuples(st.just("mark"), st.lists(st.integers(-2, ROWS + 50), max_size=30), TYPES),
    st.tuples(st.just("delete"), INSIDE),
    st.tuples(st.sampled_from(("mark_all", "settled"))),
    st.tuples(st.just("replace"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("later"), st.integers(-1, 8)),
    st.tuples(st.just("deleted_later"), st.integers(0, 8)),
    st.tuples(st.just("tick")),
)


def host_stamps(rows: int) -> HostStamps:
    return HostStamps(rows, np.zeros(-(-rows // 64), np.uint64), np.zeros(1, np.int64))


def torch_stamps(rows: int) -> TableStamps:
    return TableStamps(rows, torch.device("cpu"))


def apply(stamps: TableStamps, name: str, *arguments: Any) -> list[int] | None:
    if name == "tick":
        stamps.settled()
        stamps.clock += 1
    elif name == "mark":
        ids, dtype = arguments
        stamps.mark(torch.tensor(ids, dtype=dtype))
    elif name == "mark_all":
        stamps.replace(stamps.clock)
    elif name == "delete":
        stamps.delete(torch.tensor(arguments[0], dtype=torch.int64))
    elif name == "replace":
        limits, generator = (-stamps.clock, stamps.clock + 1), torch.Generator().manual_seed(arguments[0])
        stamps.replace(torch.randint(*limits, (ROWS,), dtype=torch.int32, generator=generator))
    elif arguments:  # A cursor is always behind the clock.
        return list(getattr(stamps, name)(min(arguments[0], stamps.clock - 1)).tolist())
    else:
        getattr(stamps, name)()
    return None


@given(st.lists(OPERATION, max_size=25))
def test_marks_in_host_memory_are_stamps(program: list[tuple[Any, ...]]) -> None:
    host, torch_form = host_stamps(ROWS), torch_stamps(ROWS)
    for operation in program:
        assert apply(host, *operation) == apply(torch_form, *operation)
    assert host.settled().tolist() == torch_form.settled().tolist()


@pytest.mark.parametrize("make", [host_stamps, torch_stamps])
def test_ids_that_are_not_contiguous(make: Callable[[int], TableStamps]) -> None:
    stamps = make(8)
    stamps.mark(torch.arange(8).view(4, 2)[:, 1][1:3])
    assert stamps.later(0).tolist() == [3, 5]


def test_a_table_without_rows() -> None:
    stamps = host_stamps(0)
    stamps.mark(torch.tensor([0, 1]))
    stamps.replace(stamps.clock)
    assert stamps.later(-1).tolist() == stamps.deleted_later(0).tolist() == stamps.settled().tolist() == []
