"""The tracker on two ranks, every sharding type, under TorchRec's pipeline."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.ranks import run_ranks
from trainer.tracking.modes import TrackingMode
from trainer.tracking.options import TrackerOptions
from trainer.tracking.tracker import Tracker


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["Base", "SparseDist", "Lite", "SemiSync"])
def test_exactly_the_changed_rows_are_reported(pipeline: str) -> None:
    run_ranks(str(Path(__file__).with_name("tracking_ranks.py")), pipeline)


class TestDenseOnly:
    """A model without tables: its parameters are small tables."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))

    def tracker(self, model: nn.Module) -> Tracker:
        return Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))

    def test_names_and_shapes(self) -> None:
        tables = [tracked.table for tracked in self.tracker(self.model()).tables]
        assert [(t.name, t.rows, t.dim) for t in tables] == [
            ("0.weight", 2, 3),
            ("0.bias", 1, 2),
            ("2.weight", 1, 2),
            ("2.bias", 1, 1),
        ]

    def test_a_row_that_changes_without_a_lookup_is_found(self) -> None:
        model = self.model()
        tracker = self.tracker(model)
        with torch.no_grad():
            model[0].weight[1, 2] += 1.0  # type: ignore[index]
        tracker.step()
        assert {name: ids.tolist() for name, ids in tracker.get_delta().ids.items()} == {"0.weight": [1]}

    def test_values_are_copies(self) -> None:
        model = self.model()
        tracker = self.tracker(model)
        tracker.mark_all()
        values = tracker.get_delta().rows["0.weight"].values
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert values is not None
        assert values.abs().sum() > 0
