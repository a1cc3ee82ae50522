"""Row 0: what is not in the table, and must hold all the same."""

import torch
from tests.integration.trainer.torchrec_defects.copies import followed
from tests.integration.trainer.torchrec_defects.models import BAGS, ROWS, bags, sharded, train
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking import Tracker

T0 = f"{BAGS}.t0"


def batch(values: torch.Tensor) -> KeyedJaggedTensor:
    lengths = torch.tensor([len(values)], dtype=torch.int32)
    return KeyedJaggedTensor(keys=["t0"], values=values, lengths=lengths)


@scenario(row=0)
def an_id_that_is_no_row_stands_for_the_one_that_is_trained_instead() -> None:
    """FBGEMM takes row 0, in the ids it was given or in a copy of them, by their type."""
    for dtype in (torch.int64, torch.int32):
        model = sharded({"bags": bags("t0")})
        tracker, copy = followed(model)
        for wrong in (ROWS, ROWS + 99, -7):
            model(batch(torch.tensor([1, wrong], dtype=dtype)))[0].backward()
            tracker.step()
            assert copy.update() == {T0: [0, 1]}, (dtype, wrong)
        copy.check(model)


@scenario(row=0)
def the_cost_of_a_step_is_told_in_seconds_and_bytes() -> None:
    model = sharded({"bags": bags("t0")})
    tracker = Tracker(model)
    train(model, t0=[1, 2, 2])
    tracker.step()
    assert (tracker.cost.marking_bytes, tracker.cost.compaction_bytes) == (3 * 8, 3 * 4)
    assert tracker.cost.marking_seconds > 0.0 < tracker.cost.compaction_seconds
