"""Sharded training on a GPU as on a CPU: pipelines, what the tracker says of them, and what resets rows."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.devices import CPU_AND_GPU, lone_rank, needs, no_waiting

needs("deltasync.trainer.tracking", "deltasync.trainer.pipelines", "tests.bench.pipelines.rank")

from tests.bench.pipelines.batches import BatchKind, draw, without_end
from tests.bench.pipelines.model import BagModel, table_names
from tests.bench.pipelines.options import Sizes
from tests.bench.pipelines.rank import VARIANTS, Training
from torchrec.distributed import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync

from deltasync.trainer.distributed.sharding import KERNEL, OptimizerOptions, shard
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode

# torch no longer likes how TorchRec wraps models in DDP.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = Sizes(ranks=1, batch_size=8, tables=3, rows=200, dim=8, ids=3, dense=3, over=8)


class Trained:
    """A model in training, its tracker, and a copy of its tables that follows what the tracker says."""

    def __init__(self, device: torch.device, kernel: str = KERNEL, *, dense: bool = False) -> None:
        torch.manual_seed(0)
        tables = {name: table_wise(rank=0, compute_kernel=kernel) for name in table_names(SIZES)}
        self.device = device
        self.model, self.optimizer = shard(
            BagModel(SIZES, torch.device("meta")), tables, OptimizerOptions(), device
        )
        options = TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=dense)
        self.tracker = Tracker(self.model, options)
        self.tracker.resync()
        self.copy = {table.name: torch.zeros(table.rows, SIZES.dim) for table in self.tracker.tables}

    def batches(self, kind: BatchKind = BatchKind.KJT) -> Iterator[Any]:
        return iter(without_end(draw(SIZES, 0, self.device), kind))

    def take(self, delta: Delta) -> None:
        for batch in delta.rows:
            self.copy[batch.table.name][batch.ids] = torch.tensor(batch.values)
        self.tracker.acknowledge(delta)

    def assert_followed(self) -> None:
        self.take(self.tracker.get_delta())  # Flushes caches, too.
        for table in self.tracker.tables:
            assert torch.equal(self.copy[table.name], table.shards[0].weight.cpu()), table.name


@CPU_AND_GPU
def test_pipelines_of_the_benchmark_train_alike(kind: str) -> None:
    with lone_rank(kind) as device:
        losses = {}
        for name in VARIANTS:
            training = Training(name, SIZES, draw(SIZES, 0, device), device)
            assert training.turn(SIZES.steps).seconds > 0
            losses[name] = float(training.loss)
            training.finish()
    # Sums on a GPU are added up in any order.
    expected = pytest.approx(losses["torchrec"], rel=1e-4) if kind == "cuda" else losses["torchrec"]
    assert losses == dict.fromkeys(losses, expected)


PIPELINES: dict[str, Callable[..., Any]] = {
    "base": TrainPipelineBase,
    "sparse-dist": TrainPipelineSparseDist,
    "semi-sync": partial(TrainPipelineSemiSync, start_batch=0),
    "ours": OnlinePipeline,
}


@pytest.mark.parametrize("read", ["waited for", "launched", "elsewhere"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "cpu") for name in PIPELINES if name != "semi-sync"),  # TorchRec's cannot train on a CPU.
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in PIPELINES),
    ],
)
def test_no_row_is_missed(name: str, kind: str, read: str) -> None:
    with lone_rank(kind) as device, ThreadPoolExecutor(1) as elsewhere:
        trained = Trained(device)
        pipeline = PIPELINES[name](trained.model, trained.optimizer, device)
        batches = trained.batches()
        trained.take(trained.tracker.get_delta())
        for step in range(10):
            pipeline.progress(batches)
            trained.tracker.step()
            if step % 2 == 0:
                trained.tracker.count_ahead()
            elif read == "launched":
                trained.take(trained.tracker.begin_delta().result)
            elif read == "elsewhere":
                trained.take(elsewhere.submit(trained.tracker.get_delta).result(60))
            else:
                trained.take(trained.tracker.get_delta())
        trained.assert_followed()


@CPU_AND_GPU
def test_marking_a_step_and_launching_its_read_waits_for_nothing(kind: str) -> None:
    with lone_rank(kind) as device:
        trained = Trained(device, dense=False)
        loss = trained.model(next(trained.batches()).to(device))[0]
        trained.take(trained.tracker.get_delta())
        loss.backward()
        trained.optimizer.step()
        with no_waiting(kind):
            trained.tracker.step()
            trained.tracker.count_ahead()
        loss = trained.model(next(trained.batches()).to(device))[0]
        loss.backward()
        with no_waiting(kind):
            trained.tracker.step()
            pending = trained.tracker.begin_delta()
        trained.take(pending.result)
        trained.assert_followed()


@CPU_AND_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_with_a_grad_scaler(kind: str, dtype: torch.dtype) -> None:
    with lone_rank(kind) as device:
        trained = Trained(device)
        options = PipelineOptions(enable_amp=True, amp_dtype=dtype, grad_accum=2)
        pipeline = OnlinePipeline(trained.model, trained.optimizer, device, options)
        batches = trained.batches()
        for _ in range(8):
            loss = pipeline.progress(batches)
            if pipeline.stepped:
                trained.tracker.step()
        assert torch.isfinite(loss).all()
        trained.assert_followed()
        weights = torch.cat([rows.flatten() for rows in trained.copy.values()])
        assert torch.isfinite(weights).all()
        assert weights.abs().max() < 10, "no row has moved by the scale"


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("cpu", KERNEL),
        *(
            pytest.param("cuda", kernel, marks=pytest.mark.gpu)
            for kernel in (KERNEL, "fused_uvm", "fused_uvm_caching")
        ),
    ],
)
def test_rows_are_read_and_deleted_where_a_kernel_keeps_them(kind: str, kernel: str) -> None:
    with lone_rank(kind) as device:
        trained = Trained(device, kernel)
        name = trained.tracker.tables[0].name
        pipeline, batches = OnlinePipeline(trained.model, trained.optimizer, device), trained.batches()
        for step in range(6):
            pipeline.progress(batches)
            trained.tracker.step()
            trained.take(trained.tracker.get_delta())
            if step == 3:
                trained.tracker.delete(name, torch.arange(20))
                delta = trained.tracker.get_delta()
                assert delta.deletes[name].tolist() == list(range(20))
                trained.take(delta)
                assert not trained.copy[name][:20].any()
        trained.assert_followed()


@CPU_AND_GPU
def test_a_checkpoint_is_taken_up_where_it_was(kind: str) -> None:
    with lone_rank(kind) as device:
        trained = Trained(device)
        pipeline, batches = OnlinePipeline(trained.model, trained.optimizer, device), trained.batches()
        trained.take(trained.tracker.get_delta())
        pipeline.progress(batches)
        trained.tracker.step()
        state, due = trained.tracker.state_dict(), trained.tracker.get_delta().ids
        trained.tracker.close()
        again = Tracker(trained.model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        again.load_state_dict(state)
        found = again.get_delta().ids
        assert {name: ids.tolist() for name, ids in found.items()} == {
            name: ids.tolist() for name, ids in due.items()
        }
