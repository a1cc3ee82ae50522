"""What the kernels hold of a deleted row, as they say themselves."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.deletes.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import ROWS, bag, bags, kernels_of, lookups, sharded, train
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from deltasync.trainer.tracking import Tracker, TrackerOptions

OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
SHARDING = {
    "rows": row_wise(compute_kernel="fused"),
    "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
    "pairs": column_wise(ranks=[1, 1], compute_kernel="fused"),
    "whole": table_wise(rank=0, compute_kernel="fused"),
    "dense": table_wise(rank=0, compute_kernel="dense"),
}


@SCENARIOS.scenario("resets", ranks=2)
def a_deleted_row_is_reset_and_no_other() -> None:
    everything, ids = list(range(ROWS)), torch.tensor([1, 9])
    for optimizer in OPTIMIZERS:
        model = sharded({"bags": bags(*(bag(name, dim=8) for name in SHARDING))}, SHARDING, optimizer=optimizer)
        tracker = Tracker(model, TrackerOptions(verify=True))
        train(model, **dict.fromkeys(SHARDING, everything))
        tracker.step()
        kernels = list(kernels_of(model))
        held = [weights for kernel in kernels for weights in kernel.split_embedding_weights()]
        states = [
            state
            for kernel in kernels
            if hasattr(kernel, "split_optimizer_states")
            for states_of_table in kernel.split_optimizer_states()
            for state in states_of_table
        ]
        assert optimizer is EmbOptimType.EXACT_SGD or states
        tensors = held + states
        before = [tensor.clone() for tensor in tensors]
        for table in tracker.tables:
            tracker.delete(table.name, ids)
        first = tracker.tables[0].row_offset
        for tensor, was in zip(tensors, before, strict=True):
            offset = first if len(tensor) < ROWS else 0
            local = [row - offset for row in ids.tolist() if 0 <= row - offset < len(tensor)]
            assert local
            assert not tensor[local].any()
            others = [row for row in range(len(tensor)) if row not in local]
            assert torch.equal(tensor[others], was[others])
        for _ in range(2):  # Which find no row that has changed unmarked.
            assert set(tracker.get_delta().deletes) == {table.name for table in tracker.tables}


@SCENARIOS.scenario("resets", ranks=2)
def a_lookup_whose_backward_is_still_to_come_brings_its_rows_back() -> None:
    """Pipelines look rows up ahead; autograd must not take the delete for a mistake."""
    for name, sharding in SHARDING.items():
        model = sharded({"bags": bags(bag("t", dim=8))}, {"t": sharding}, optimizer=EmbOptimType.EXACT_ADAGRAD)
        tracker = Tracker(model)
        _train_ahead(model, tracker)
        changed = set() if name == "dense" else {2}  # Its optimizer has not stepped.
        for table in tracker.tables:
            held, delta = set(range(table.row_offset, table.row_offset + table.rows)), tracker.get_delta()
            rows, deletes = delta.rows.get(table.name), delta.deletes.get(table.name)
            assert set(rows.ids.tolist() if rows else []) == changed & held
            assert set(deletes.ids.tolist() if deletes else []) == ({1, 2, 9} - changed) & held


def _train_ahead(model: torch.nn.Module, tracker: Tracker) -> None:
    loss, _ = model(lookups(t=[2]))
    for table in tracker.tables:
        tracker.delete(table.name, torch.tensor([1, 2, 9]))
    loss.backward()
    tracker.step()
