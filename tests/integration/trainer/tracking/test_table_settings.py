"""Settings of tables: what is refused is refused by name, and what is not marks the rows that change."""

from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, RecordCacheMetrics
from fbgemm_gpu.tbe.config.optimizer_config import EmainplaceModeDefinition, UserEnabledConfigDefinition
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    DIM,
    ROWS,
    SEQUENCES,
    bag,
    bags,
    kernels_of,
    sequence,
    sequences,
    sharded,
    train,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import data_parallel, row_wise
from torchrec.modules.embedding_configs import PoolingType

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.update_rules import FOLLOWED_KERNELS, REFUSED_FLAGS

# TorchRec wraps models in DDP as torch no longer likes.
pytestmark = [pytest.mark.usefixtures("lone_rank"), pytest.mark.filterwarnings("ignore::FutureWarning")]

WITHOUT = TrackerOptions(fqns_to_skip=["u"])
FUSED = row_wise(compute_kernel="fused")
REFUSED_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel if kernel not in FOLLOWED_KERNELS]


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
@pytest.mark.parametrize(
    ("fqn", "make", "table"), [(f"{BAGS}.u", bags, bag), (f"{SEQUENCES}.u", sequences, sequence)]
)
def test_flags_that_are_not_followed_are_refused_by_name(flag: str, fqn: str, make: Any, table: Any) -> None:
    # TorchRec itself would refuse a virtual table that is sharded otherwise.
    model = sharded({fqn.split(".")[0]: make(table("u", **{flag: True}), "w")}, {"u": data_parallel(), "w": FUSED})
    with pytest.raises(InvalidInput, match=rf"table '{fqn}' has {flag}=True: .*set it to False.*\(fqns_to_skip\)"):
        Tracker(model)
    assert [tracked.name for tracked in Tracker(model, WITHOUT).tables] == [f"{fqn[:-1]}w"]


@pytest.mark.parametrize("kernel", FOLLOWED_KERNELS)
def test_kernels_that_are_followed_are_tracked(kernel: EmbeddingComputeKernel) -> None:
    model = sharded({"bags": bags("u")}, {"u": row_wise(compute_kernel=kernel.value)})
    assert [tracked.name for tracked in Tracker(model).tables] == [f"{BAGS}.u"]


@pytest.mark.parametrize("kernel", [*REFUSED_KERNELS, "one_of_tomorrow"])
def test_kernels_that_are_not_followed_are_refused_by_name(kernel: str) -> None:
    model = sharded({"bags": bags("u", "w")}, {"u": FUSED, "w": FUSED})
    model.module.bags.module_sharding_plan["u"].compute_kernel = kernel  # Most want a GPU, or a disk.
    told = rf"table '{BAGS}.u' has compute kernel '{kernel}', .*use one of: dense, fused, .*\(fqns_to_skip\)"
    with pytest.raises(InvalidInput, match=told):
        Tracker(model)
    assert [tracked.name for tracked in Tracker(model, WITHOUT).tables] == [f"{BAGS}.w"]


SETTINGS: dict[str, dict[str, Any]] = {
    "averages": {
        "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=0),
    },
    "clipping": {"gradient_clipping": True, "max_gradient": 0.1, "max_norm": 0.1},
    "ids of 32 bits": {
        "embedding_table_index_type": torch.int32,
        "embedding_table_offset_type": torch.int32,
    },
    "half outputs": {"output_dtype": SparseType.FP16},
    "cache": {
        "cache_load_factor": 0.3,
        "cache_sets": 4,
        "cache_precision": SparseType.FP32,
        "prefetch_pipeline": True,
    },
    "memory": {"enforce_hbm": True, "uvm_non_rowwise_momentum": True, "uvm_host_mapped": True},
    "kernels": {"use_experimental_tbe": True, "is_qr_tbe": True, "use_one_tbe_per_table": True},
    "watched": {"record_cache_metrics": RecordCacheMetrics(True, True), "gather_uvm_cache_stats": True},
    "streaming": {"enable_raw_embedding_streaming": True, "res_store_shards": 2, "res_enabled_tables": "u"},
    "invalid ids": {"bounds_check_mode": BoundsCheckMode.IGNORE},
}
FIELDS: dict[str, dict[str, Any]] = {
    "means": {"pooling": PoolingType.MEAN},
    "positions": {"need_pos": True, "input_dim": 7},
    "buckets": {"total_num_buckets": 4},
    "first values": {"init_fn": torch.nn.init.ones_, "weight_init_max": 1.0, "weight_init_min": 0.5},
}


@pytest.mark.parametrize(
    ("fields", "settings"),
    [*(({}, each) for each in SETTINGS.values()), *((each, {}) for each in FIELDS.values())],
    ids=[*SETTINGS, *FIELDS],
)
def test_rows_that_change_are_marked(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    """An id outside of the table trains row 0 instead, where FBGEMM does not refuse it."""
    model = sharded({"bags": bags(bag("u", **fields))}, {"u": FUSED}, **settings)
    (kernel,) = kernels_of(model)
    if "emainplace_mode" in settings:  # Both halves of a row, which are averaged, must differ.
        kernel.split_embedding_weights()[0].copy_(torch.rand(ROWS, DIM))
    tracker = Tracker(model, TrackerOptions(verify=True))
    for step in range(4):
        before = kernel.split_embedding_weights()[0].clone()
        train(model, u=[step + 1, ROWS + 9 if "bounds_check_mode" in settings else 5])
        changed = (before != kernel.split_embedding_weights()[0]).any(dim=1).nonzero().view(-1).tolist()
        tracker.step()
        delta = tracker.get_delta()
        assert delta.ids[f"{BAGS}.u"].tolist() == changed
        assert len(changed) >= 2
        assert tracker.acknowledge(delta)


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("precomputed", [False, True])
def test_gradients_written_back_once_per_id_change_the_same_rows(precomputed: bool) -> None:
    extra = UserEnabledConfigDefinition(
        use_writeback_bwd_prehook=True, writeback_first_feature_only=True, precompute_writeback=precomputed
    )
    model = sharded({"sequences": sequences("u")}, {"u": FUSED}, extra_optimizer_config=extra)
    tracker = Tracker(model, TrackerOptions(verify=True))
    train(model, u=[3, 3, 5])
    tracker.step()
    assert tracker.get_delta().ids[f"{SEQUENCES}.u"].tolist() == [3, 5]


def test_rows_in_a_cache_are_read_and_deleted_there() -> None:
    """There are caches on GPUs alone: this one is put there by hand, as FBGEMM would have it."""
    tables = {name: row_wise(compute_kernel="fused_uvm_caching") for name in ("first", "second")}
    model = sharded({"bags": bags(bag("first", "f", "g"), "second")}, tables)
    (kernel,) = kernels_of(model)
    kernel.lxu_cache_weights = torch.full((2, DIM), 7.0)
    kernel.lxu_cache_state = torch.tensor([[ROWS + 3, 3]])  # Row 3 of the second table, and of the first.
    kernel.cache_hash_size_cumsum = torch.tensor([0, 0, ROWS, 2 * ROWS])  # Of features; the last one is the end.
    first, second = kernel.split_embedding_weights()

    def flush() -> None:
        second[3], first[3] = kernel.lxu_cache_weights

    kernel.flush = flush
    with mock.patch.object(torch.cuda, "synchronize"):
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        tracker.resync()
        for batch in tracker.get_delta().rows:
            assert batch.values[3].tolist() == [7.0] * DIM
        tracker.delete(f"{BAGS}.second", torch.tensor([3]))
    assert kernel.lxu_cache_weights[:, 0].tolist() == [0.0, 7.0]
