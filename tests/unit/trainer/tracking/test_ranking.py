"""Choosing what has changed most, and never losing what was left for later."""

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.core.errors import InvalidInput
from deltasync.core.tables import Shard, TableSpec
from deltasync.trainer.tracking import DeltaRows, Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.ranking import largest

NORMS = st.floats(width=32).map(abs) | st.sampled_from((0.0, 1.0, math.inf, math.nan))
WHOLE = Shard.whole(TableSpec("t", 3, 2))


@given(st.lists(st.lists(NORMS, max_size=6), max_size=4), st.integers(1, 8))
def test_the_largest_are_chosen(norms: list[list[float]], k: int) -> None:
    masks = largest({str(number): torch.tensor(its) for number, its in enumerate(norms)}, k)
    assert [len(mask) for mask in masks.values()] == [len(its) for its in norms]
    ranked = [(math.isnan(norm), norm) for its in norms for norm in its]
    flat = [bool(one) for mask in masks.values() for one in mask]
    chosen = [norm for norm, one in zip(ranked, flat, strict=True) if one]
    rest = [norm for norm, one in zip(ranked, flat, strict=True) if not one]
    assert len(chosen) == min(k, len(ranked))
    nan_in_rest = any(nan for nan, _ in rest)
    assert not nan_in_rest or all(nan for nan, _ in chosen)
    numbers = [norm for nan, norm in rest if not nan]
    assert all(nan or norm >= max(numbers, default=-1.0) for nan, norm in chosen)


def rows(values: list[list[float]], first: list[list[float]] | None = None) -> DeltaRows:
    known = None if first is None else torch.tensor(first)
    return DeltaRows(torch.arange(len(values)), [WHOLE], [torch.tensor(values)], known, TrackingMode.EMBEDDING)


class TestRows:
    def test_norms_are_of_the_difference(self) -> None:
        assert rows([[3.0, 5.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]).norms().tolist() == [5.0, 0.0]

    def test_half_floats_do_not_overflow(self) -> None:
        half = torch.tensor([[6e4, 6e4]], dtype=torch.float16)
        delta = DeltaRows(torch.tensor([0]), [WHOLE], [half], -half, TrackingMode.EMBEDDING)
        assert delta.norms().tolist() == pytest.approx([2 * math.hypot(6e4, 6e4)], rel=1e-3)

    def test_ids_alone_have_no_norms(self) -> None:
        with pytest.raises(InvalidInput, match="read it with get_delta"):
            DeltaRows(torch.tensor([0]), [WHOLE], [], None, TrackingMode.EMBEDDING).norms()

    @given(st.lists(st.booleans(), min_size=3, max_size=3))
    def test_a_selection_keeps_what_belongs_together(self, mask: list[bool]) -> None:
        whole = rows([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]], [[5.0, 5.5], [6.0, 6.5], [7.0, 7.5]])
        some = whole.select(torch.tensor(mask))
        ids = some.ids.tolist()
        assert ids == [row for row in range(3) if mask[row]]
        assert some.values is not None
        assert some.first is not None
        assert some.values.tolist() == [[row, row + 0.5] for row in ids]
        assert some.first.tolist() == [[row + 5, row + 5.5] for row in ids]


class Rows(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros(rows, 1))


class TestNothingIsLost:
    """`top_k` leaves no row behind, whatever its norm."""

    def tracker(self, model: Rows) -> Tracker:
        return Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))

    def ids(self, tracker: Tracker) -> list[int]:
        return tracker.get_delta().ids.get("t", torch.empty(0)).tolist()

    def test_a_row_that_is_as_before_comes_last(self) -> None:
        model = Rows(3)
        tracker = self.tracker(model)
        tracker.mark("t", torch.tensor([1]))
        model.t.data[2] = 0.5
        delta = tracker.top_k(k=1)
        assert delta.ids["t"].tolist() == [2]
        assert tracker.acknowledge(delta.token)
        assert self.ids(tracker) == [1]

    @pytest.mark.parametrize("arrived", [True, False])
    def test_a_row_under_way_that_became_what_it_was(self, arrived: bool) -> None:
        """The receiver has 1.0 by now, or will have; whether it said so makes no difference."""
        model = Rows(2)
        tracker = self.tracker(model)
        model.t.data[0] = 1.0
        under_way = tracker.get_delta()
        model.t.data[0] = 0.0
        later = tracker.top_k(k=2)
        if arrived:
            assert tracker.acknowledge(under_way.token)
        values = later.rows["t"].values
        assert values is not None
        assert (later.ids["t"].tolist(), values.tolist()) == ([0], [[0.0]])
        assert tracker.acknowledge(later.token)
        assert not self.ids(tracker)

    def test_a_row_under_way_at_a_checkpoint(self) -> None:
        """The receiver has 1.0, which the restarted tracker does not know."""
        model = Rows(2)
        tracker = self.tracker(model)
        model.t.data[0] = 1.0
        tracker.get_delta()
        restarted = self.tracker(model)
        restarted.load_state_dict(tracker.state_dict())
        model.t.data[0] = 0.0
        delta = restarted.top_k(k=2)
        assert delta.ids["t"].tolist() == [0]

    def test_a_consumer_that_begins_anew_has_nothing(self) -> None:
        tracker = self.tracker(Rows(3))
        tracker.resync()
        first = tracker.get_delta().rows["t"].first
        assert first is not None
        assert first.isnan().all()
        offered = []
        for _ in range(3):
            delta = tracker.top_k(k=1)
            offered += delta.ids["t"].tolist()
            assert tracker.acknowledge(delta.token)
        assert sorted(offered) == [0, 1, 2]
        assert not tracker.top_k(k=1).rows

    def test_rows_that_a_checkpoint_does_not_know(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.tracker(Rows(2)).state_dict(), buffer)
        grown = self.tracker(Rows(4))
        grown.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
        delta = grown.top_k(k=1)
        assert grown.acknowledge(delta.token)
        assert sorted(delta.ids["t"].tolist() + self.ids(grown)) == [2, 3]

    @pytest.mark.parametrize("k", [0, -1])
    def test_no_row_cannot_be_chosen(self, k: int) -> None:
        with pytest.raises(InvalidInput, match=f"k: {k}"):
            self.tracker(Rows(1)).top_k(k=k)
