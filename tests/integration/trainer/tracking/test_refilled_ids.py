"""A trainer may fill the tensors of its batch anew as soon as a backward is over, before the step is."""

import pytest
import torch
from tests.integration.trainer.torchrec_defects.models import BAGS, ROWS, bags, sharded
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking import Tracker, TrackerOptions

# TorchRec wraps models in DDP as torch no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.usefixtures("lone_rank")
def test_rows_of_ids_that_were_overwritten_since_are_marked() -> None:
    model = sharded({"bags": bags("user")})
    tracker = Tracker(model, TrackerOptions(consumers=["publisher"]))
    ids, lengths = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int32)
    for first in range(0, ROWS, 4):
        ids.copy_(torch.arange(first, first + 4))
        loss, _ = model(KeyedJaggedTensor.from_lengths_sync(["user"], ids, lengths))
        loss.backward()
    ids.zero_()
    tracker.step()
    assert tracker.get_delta("publisher").ids[f"{BAGS}.user"].tolist() == list(range(ROWS))
