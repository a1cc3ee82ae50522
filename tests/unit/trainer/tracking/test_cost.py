"""What the tracker says of its own cost."""

import torch
from torch import nn

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

NAMES = {f"{what}_{unit}" for what in ("marking", "compaction", "reading") for unit in ("seconds", "bytes")}


def test_bytes_read_are_those_of_ids_and_values() -> None:
    model = nn.Linear(8, 4)
    tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))
    assert set(tracker.cost.as_dict()) == NAMES
    assert not any(tracker.cost.as_dict().values())
    with torch.no_grad():
        model.weight[1:3] += 1.0
    tracker.get_delta()
    two_rows = 2 * (8 + 8 * 4 + 8 * 4)
    assert tracker.cost.reading_bytes == two_rows
    tracker.get_delta_ids()
    assert tracker.cost.reading_bytes == two_rows + 2 * 8
    assert tracker.cost.seconds >= tracker.cost.reading_seconds > 0.0
