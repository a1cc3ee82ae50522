"""Stamps in host memory say what stamps in torch say."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.tracking.table_stamps import Clock, HostMarks, HostStamps, TableStamps

ROWS = 150
INSIDE = st.lists(st.integers(0, ROWS - 1), max_size=20)
TYPES = st.sampled_from((torch.int64, torch.int32, torch.int16))
OPERATION = st.one_of(
    st.tuples(st.just("mark"), st.lists(st.integers(-2, ROWS + 50), max_size=30), TYPES),
    st.tuples(st.just("delete"), INSIDE),
    st.tuples(st.sampled_from(("mark_all", "mark_present", "settle"))),
    st.tuples(st.just("replace"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("later"), st.integers(-1, 8)),
    st.tuples(st.just("deleted_later"), st.integers(0, 8)),
    st.tuples(st.just("tick")),
)


def host_stamps(rows: int, clock: Clock) -> HostStamps:
    return HostStamps(rows, clock, *HostMarks([70, rows, 3]).of(1))


def apply(stamps: TableStamps, clock: Clock, name: str, *arguments: Any) -> list[int] | None:
    if name == "tick":
        stamps.settle()
        clock.now += 1
    elif name == "mark":
        ids, dtype = arguments
        stamps.mark(torch.tensor(ids, dtype=dtype))
    elif name == "delete":
        stamps.delete(torch.tensor(arguments[0], dtype=torch.int64))
    elif name == "replace":
        limits, generator = (-clock.now, clock.now + 1), torch.Generator().manual_seed(arguments[0])
        stamps.replace(torch.randint(*limits, (ROWS,), dtype=torch.int32, generator=generator))
    elif arguments:  # A cursor is always behind the clock.
        return list(getattr(stamps, name)(min(arguments[0], clock.now - 1)).tolist())
    else:
        getattr(stamps, name)()
    return None


@given(st.lists(OPERATION, max_size=25))
def test_marks_in_host_memory_are_stamps(program: list[tuple[Any, ...]]) -> None:
    clocks = Clock(), Clock()
    host, torch_form = host_stamps(ROWS, clocks[0]), TableStamps(ROWS, clocks[1], torch.device("cpu"))
    for operation in program:
        assert apply(host, clocks[0], *operation) == apply(torch_form, clocks[1], *operation)
    assert host.stamps.tolist() == torch_form.stamps.tolist()


@pytest.mark.parametrize("made", [host_stamps, lambda rows, clock: TableStamps(rows, clock, torch.device("cpu"))])
def test_a_part_of_ids_that_do_not_lie_side_by_side(made: Any) -> None:
    stamps = made(8, Clock(3))
    stamps.mark(torch.arange(8).view(4, 2)[:, 1][1:3])
    assert stamps.later(0).tolist() == [3, 5]


def test_a_table_without_rows() -> None:
    stamps = host_stamps(0, Clock())
    stamps.mark(torch.tensor([0, 1]))
    stamps.mark_all()
    assert stamps.later(-1).tolist() == stamps.deleted_later(0).tolist() == stamps.stamps.tolist() == []
