"""The tracker on two ranks, every sharding type, under TorchRec's pipeline."""

from pathlib import Path

import pytest
import torch
from torch import nn

from sync_service.errors import Contradiction
from tests.support.ranks import run_ranks
from trainer.tracking.tracker import Tracker


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["Base", "SparseDist", "Lite", "SemiSync"])
def test_exactly_the_changed_rows_are_reported(pipeline: str) -> None:
    run_ranks(str(Path(__file__).with_name("tracking_ranks.py")), pipeline)


class TestDenseOnly:
    """A model without tables: its parameters are small tables, all of whose rows change at every step."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))

    def test_names_and_shapes(self) -> None:
        tables = [tracked.shard.table for tracked in Tracker(self.model()).shards]
        assert [(t.name, t.rows, t.dim) for t in tables] == [
            ("0.weight", 2, 3),
            ("0.bias", 1, 2),
            ("2.weight", 1, 2),
            ("2.bias", 1, 1),
        ]

    def test_reading_moves_nothing_and_a_cursor_takes_everything_before_it(self) -> None:
        tracker = Tracker(self.model())
        assert tracker.read(0)[0] == []
        tracker.step()
        first, cursor = tracker.read(0)
        assert [len(rows.ids) for rows in first] == [2, 1, 1, 1]
        assert len(tracker.read(0)[0]) == 4
        assert tracker.read(cursor)[0] == []
        tracker.mark_all()  # From outside, between two steps, right after a read.
        assert len(tracker.read(cursor)[0]) == 4

    def test_values_are_copies(self) -> None:
        model = self.model()
        tracker = Tracker(model)
        tracker.step()
        values = tracker.read(0)[0][0].values
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert values.abs().sum() > 0

    def test_state_survives_and_does_not_fit_another_model(self) -> None:
        tracker = Tracker(self.model())
        tracker.step()
        _, cursor = tracker.read(0)
        tracker.mark_all()
        restored = Tracker(self.model())
        restored.load_state_dict(tracker.state_dict())
        assert restored.steps == 1
        assert len(restored.read(cursor)[0]) == 4
        with pytest.raises(Contradiction, match="stamps of other shards"):
            Tracker(nn.Linear(3, 2)).load_state_dict(tracker.state_dict())
