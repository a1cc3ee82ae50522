"""Choosing what has changed most, and never losing what was left for later."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import Shard, TableSpec
from deltasync.trainer.tracking import DeltaRows, Tracker, TrackerOptions, TrackingMode

WHOLE = Shard.whole(TableSpec("t", 3, 2))


def rows(values: list[list[float]], first: list[list[float]] | None = None) -> DeltaRows:
    known = None if first is None else torch.tensor(first)
    return DeltaRows(torch.arange(len(values)), [WHOLE], [torch.tensor(values)], known, TrackingMode.EMBEDDING)


def test_norms_are_of_the_difference() -> None:
    assert rows([[3.0, 5.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]).norms().tolist() == [5.0, 0.0]


def test_norms_of_half_floats_do_not_overflow() -> None:
    half = torch.tensor([[6e4, 6e4]], dtype=torch.float16)
    delta = DeltaRows(torch.tensor([0]), [WHOLE], [half], -half, TrackingMode.EMBEDDING)
    assert delta.norms().tolist() == pytest.approx([2 * math.hypot(6e4, 6e4)], rel=1e-3)


def test_ids_alone_have_no_norms() -> None:
    with pytest.raises(InvalidInput, match="read it with get_delta"):
        DeltaRows(torch.tensor([0]), [WHOLE], [], None, TrackingMode.EMBEDDING).norms()


def tracker(model: nn.Module) -> Tracker:
    return Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))


@pytest.mark.parametrize("arrived", [True, False])
def test_a_row_under_way_that_became_what_it_was_is_chosen(arrived: bool) -> None:
    """The receiver has 1.0, or will have it, whether it has acknowledged it or not."""
    model: Any = nn.ParameterDict({"t": torch.zeros(2, 1)})
    tracking = tracker(model)
    model.t.data[0] = 1.0
    under_way = tracking.get_delta()
    model.t.data[0] = 0.0
    later = tracking.top_k(k=2)
    if arrived:
        assert tracking.acknowledge(under_way.token)
    values = later.rows["t"].values
    assert values is not None
    assert (later.ids["t"].tolist(), values.tolist()) == ([0], [[0.0]])
    assert tracking.acknowledge(later.token)
    assert not tracking.get_delta().rows


@pytest.mark.parametrize(
    ("k", "per_table", "chosen"),
    [
        (2, False, {"large": [0, 1]}),
        (np.int64(2), True, {"large": [0, 1], "small": [0, 1]}),
        (4, True, {"large": [0, 1, 2, 3], "small": [0, 1]}),
        (0.5, False, {"large": [0, 1, 2]}),
        (0.5, True, {"large": [0, 1], "small": [0]}),
        (0.0001, True, {"large": [0], "small": [0]}),
    ],
)
def test_rows_are_counted_in_all_tables_together_or_in_each(
    k: float, per_table: bool, chosen: dict[str, list[int]]
) -> None:
    """Below 1 `k` is a share, rounded up. What one table leaves for later stays due."""
    model: Any = nn.ParameterDict({"large": torch.zeros(4, 1), "small": torch.zeros(2, 1)})
    tracking = tracker(model)
    model.large.data[:, 0] = torch.tensor([90.0, 80.0, 70.0, 60.0])
    model.small.data[:, 0] = torch.tensor([2.0, 1.0])
    first = tracking.top_k(k=k, per_table=per_table)
    assert {fqn: ids.tolist() for fqn, ids in first.ids.items()} == chosen
    assert tracking.acknowledge(first.token)
    left = sum(len(ids) for ids in tracking.get_delta().ids.values())
    assert left == 6 - sum(map(len, chosen.values()))


def test_a_share_that_is_a_whole_number_of_rows_is_not_rounded_up() -> None:
    model: Any = nn.ParameterDict({"t": torch.zeros(100, 1)})
    tracking = tracker(model)
    model.t.data += 1.0
    assert len(tracking.top_k(k=0.07).ids["t"]) == 7


@pytest.mark.parametrize("k", [0, -1, 1.5, math.nan])
def test_what_is_neither_a_number_of_rows_nor_a_share_is_refused(k: float) -> None:
    with pytest.raises(
        InvalidInput, match=rf"k {k}: expected .*a whole number of rows.*a share above 0 and below 1"
    ):
        tracker(nn.Linear(1, 1)).top_k(k=k)
