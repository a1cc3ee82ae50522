"""There is no number of touched rows from which on they are forgotten."""

import torch
from tests.support.embedding_parameters import embedding_parameters
from torch import nn

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

ROWS = 2_097_152 + 3


def test_more_than_two_million_touched_rows_are_all_offered() -> None:
    with embedding_parameters():
        tracker = Tracker(
            nn.ParameterDict({"t": torch.zeros(ROWS, 1)}), TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True)
        )
    tracker.acknowledge(tracker.get_delta().token)
    tracker.mark("t", torch.arange(ROWS))
    for _ in range(2):  # Until it is acknowledged.
        assert torch.equal(tracker.get_delta().rows["t"].ids, torch.arange(ROWS))
    tracker.acknowledge(tracker.get_delta().token)
    assert not tracker.get_delta().rows
    tracker.close()
