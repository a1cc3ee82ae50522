"""Choosing what has changed most, and never losing what was left for later."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from deltasync.core.errors import InvalidInput
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
    """The receiver has 1.0 by now, or will have; whether it said so makes no difference."""
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


@pytest.mark.parametrize("k", [0, -1])
def test_no_row_cannot_be_chosen(k: int) -> None:
    with pytest.raises(InvalidInput, match=f"k: {k}"):
        tracker(nn.Linear(1, 1)).top_k(k=k)
