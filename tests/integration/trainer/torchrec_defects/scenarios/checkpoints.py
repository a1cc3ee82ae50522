"""Row 9: the tracker's state survives a restart."""

import io
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.torchrec_defects.copies import ids_of, weights
from tests.integration.trainer.torchrec_defects.models import BAGS, bag, bags, sequences, sharded, train
from tests.integration.trainer.torchrec_defects.registry import scenario
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

T0, S = f"{BAGS}.t0", "sequences.embeddings.s"


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@scenario(row=9)
def what_was_not_acknowledged_is_offered_after_a_restart() -> None:
    def build() -> DistributedModelParallel:
        return sharded({"bags": bags("t0"), "sequences": sequences("s")})

    options = TrackerOptions(consumers=["a", "b"], mode=TrackingMode.EMBEDDING)
    model = build()
    tracker = Tracker(model, options)
    train(model, t0=[1, 2], s=[3])
    tracker.step()
    tracker.acknowledge(tracker.get_delta("b").token)
    first = weights(model)
    train(model, t0=[2], s=[4])
    tracker.step()
    tracker.get_delta("b")  # Not acknowledged.
    saved = _through_a_file(tracker.state_dict())

    resumed = build()
    resumed.load_state_dict(model.state_dict())
    again = Tracker(resumed, options)
    again.load_state_dict(saved)
    assert again.steps == 2
    assert ids_of(again.get_delta("a")) == {T0: [1, 2], S: [3, 4]}
    delta = again.get_delta("b")
    assert ids_of(delta) == {T0: [2], S: [4]}
    rows = delta.rows[T0]
    assert rows.first is not None
    assert rows.values is not None
    assert torch.equal(rows.first, first[T0][[2]])
    assert torch.equal(rows.values, weights(model)[T0][[2]])


@scenario(row=9, ranks=2)
def what_was_not_acknowledged_is_offered_under_another_sharding() -> None:
    by_rows, whole = row_wise(compute_kernel="fused"), table_wise(rank=1, compute_kernel="fused")
    by_columns = column_wise(ranks=[0, 1], compute_kernel="fused")

    def build(t0: Any, t1: Any) -> DistributedModelParallel:
        return sharded({"bags": bags(bag("t0", dim=8), bag("t1", dim=8))}, {"t0": t0, "t1": t1})

    rank = dist.get_rank()
    model = build(by_rows, whole)
    tracker = Tracker(model)
    train(model, t0=[1, 9], t1=[2])
    tracker.step()
    for _ in range(3 * rank):
        tracker.get_delta()  # Ranks need not read equally often.
    tracker.acknowledge(tracker.get_delta().token)
    train(model, t0=[1, 10], t1=[rank])
    tracker.step()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, _through_a_file(tracker.state_dict()))

    again = Tracker(build(by_columns, by_rows))
    again.load_state_dict(states)
    expected = {T0: [1, 10], f"{BAGS}.t1": [0, 1]}
    assert ids_of(again.get_delta()) == (expected if rank == 0 else {T0: [1, 10]})
