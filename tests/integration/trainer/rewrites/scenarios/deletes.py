"""Deletes from the ranks that train to replicas: of tables sharded in every way, under every policy."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.replica import on_all_ranks, whole
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import bag, bags, sharded, train
from tests.integration.trainer.tracking.rows import weights
from tests.support.fleet import wait_for_lag
from tests.support.server import TOKEN, RunningService
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.optim.optimizers import in_backward_optimizer_filter

from deltasync.client import (
    CallbackTarget,
    Endpoint,
    NumpyTarget,
    Position,
    Release,
    Subscriber,
    SubscriberOptions,
)
from deltasync.client.admin import Admin
from deltasync.core.policy import Policy
from deltasync.trainer.sync import DeltaSync, SyncOptions

ROWS = 64
SHARDING: dict[str, Any] = {
    "rows": row_wise(compute_kernel="fused"),
    "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
    "whole": table_wise(rank=1, compute_kernel="fused"),
    "copies": data_parallel(),
}
TABLES = {name: f"bags.embedding_bags.{name}" for name in SHARDING}
POLICIES = {"few": Policy(top_k=0.1), "small": Policy(max_bytes=400), "late": Policy(), "told": Policy()}
WAIT = 20.0


@dataclass
class Training:
    """A sharded model, its trainer's side of a service, and, on rank 0, the service."""

    model: Any
    sync: DeltaSync
    optimizer: torch.optim.Optimizer
    service: RunningService | None
    targets: dict[str, NumpyTarget] = field(default_factory=dict)

    def step(self, ids: list[int]) -> None:
        self.optimizer.zero_grad()
        train(self.model, **{name: ids[dist.get_rank() :: 2] for name in SHARDING})
        self.optimizer.step()
        self.sync.step()

    def tables(self) -> dict[str, np.ndarray]:
        """All tables as all ranks hold them: a copy is that of rank 0."""
        return {fqn: rows.numpy() for fqn, rows in whole(self.model).items()}

    @contextmanager
    def replica(self, consumer: str, target: Any, held: Position | None = None) -> Iterator[Subscriber]:
        assert self.service
        options = SubscriberOptions(
            service=self.service.grpc, consumer=consumer, replica=consumer, held=held or Position()
        )
        with Subscriber(options, target) as subscriber:
            yield subscriber

    def follow(self, consumer: str, head: Position) -> NumpyTarget:
        """A target that holds at least `head`, kept by consumer."""
        target = self.targets.setdefault(consumer, NumpyTarget())
        with self.replica(consumer, target, target.position) as subscriber:
            subscriber.wait_for(head, WAIT)
        return target

    def check(self, head: Position, expected: dict[str, np.ndarray], *consumers: str) -> None:
        """Replicas of these consumers, or else of the plain one, hold the same as the model at `head`."""
        if self.service:
            for consumer in consumers or ("predictors",):
                with self.follow(consumer, head).reading() as reading:
                    for fqn, rows in expected.items():
                        np.testing.assert_array_equal(reading.tables[fqn], rows, strict=True)


@contextmanager
def training() -> Iterator[Training]:
    model = sharded(
        {"bags": bags(*(bag(name, rows=ROWS, dim=8) for name in SHARDING))},
        SHARDING,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )
    rest = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    with tempfile.TemporaryDirectory() as folder:
        service = RunningService(Path(folder, "data"), policies=POLICIES) if dist.get_rank() == 0 else None
        if service:
            service.start()
        addresses: list[Any] = [service.grpc if service else None]
        dist.broadcast_object_list(addresses, 0)
        sync = DeltaSync(model, SyncOptions(service=addresses[0], model="clicks", publish_every=1))
        with sync:
            yield Training(model, sync, torch.optim.SGD(rest, lr=0.5, momentum=0.9), service)
        dist.barrier()
        if service:
            service.stop()


def deleted(tables: dict[str, np.ndarray], ids: list[int]) -> bool:
    return not any(tables[fqn][ids].any() for fqn in TABLES.values())


@SCENARIOS.scenario("published", ranks=2)
def deletes_reach_every_replica() -> None:
    ids = [3, 33, 40]
    with training() as run:
        for _ in range(3):
            run.step(list(range(ROWS)))
        before, head = run.tables(), run.sync.flush(WAIT)
        run.check(head, before, "predictors", "few", "small")
        for name in TABLES.values():
            run.sync.delete(name, torch.tensor(ids))
        assert deleted(run.tables(), ids), "the trainer's own rows are zeros"
        run.step([row for row in range(ROWS) if row not in ids])
        now, head = run.tables(), run.sync.flush(WAIT)
        assert deleted(now, ids), "momentum brings no row back"
        run.check(head, now, "predictors", "late")
        if run.service:
            for consumer in ("few", "small"):
                tables = run.follow(consumer, head).tables
                assert deleted(tables, ids), "a delete is not held back"
                assert any((tables[fqn] != now[fqn]).any() for fqn in now), "other rows are"


@SCENARIOS.scenario("published", ranks=2)
def a_row_that_comes_back_is_a_new_row() -> None:
    with training() as run:
        run.step(list(range(ROWS)))
        run.sync.delete(TABLES["rows"], torch.tensor([5, 6]))
        run.step([1, 2])
        run.step([1, 5])
        now, head = run.tables(), run.sync.flush(WAIT)
        assert now[TABLES["rows"]][5].any()
        assert not now[TABLES["rows"]][6].any()
        run.check(head, now)


@SCENARIOS.scenario("published", ranks=2)
def one_rank_alone_may_delete_rows_that_it_holds() -> None:
    with training() as run:
        run.step(list(range(ROWS)))
        run.sync.flush(WAIT)
        run.sync.tracker.step()
        if dist.get_rank() == 1:
            run.sync.delete(TABLES["rows"], torch.tensor([ROWS - 1, 2]))
        now, head = run.tables(), run.sync.flush(WAIT)
        assert not now[TABLES["rows"]][ROWS - 1].any()
        assert now[TABLES["rows"]][2].any(), "that row is the other rank's"
        run.check(head, now)


@SCENARIOS.scenario("full cuts", ranks=2)
def a_full_cut_removes_what_it_does_not_name() -> None:
    with training() as run:
        run.step(list(range(ROWS)))
        before, head = run.tables(), run.sync.flush(WAIT)
        run.check(head, before)
        run.sync.delete(TABLES["rows"], torch.tensor([5, 60]))
        run.sync.tracker.acknowledge(run.sync.tracker.get_delta())  # The delete itself is never published.
        run.sync._resync = True
        now, head = run.tables(), run.sync.flush(WAIT)
        run.check(head, now, "predictors", "late")
        if run.service:
            assert not run.targets["predictors"].tables[TABLES["rows"]][[5, 60]].any()


@SCENARIOS.scenario("published", ranks=2)
def callbacks_are_told_and_checksums_agree() -> None:
    releases: list[Release] = []
    with training() as run:
        run.step(list(range(ROWS)))
        first = run.sync.flush(WAIT)
        target = CallbackTarget(releases.append)
        if run.service:
            with run.replica("told", target) as subscriber:
                subscriber.wait_for(first, WAIT)
        run.sync.delete(TABLES["rows"], torch.tensor([5, 60]))
        head = run.sync.flush(WAIT)
        if run.service:
            with run.replica("told", target, releases[-1].position) as subscriber:
                subscriber.wait_for(head, WAIT)
            (rows,) = [rows for rows in releases[-1].rows if rows.table.name == TABLES["rows"]]
            assert (rows.deleted, rows.ids.tolist()) == (True, [5, 60])
            assert not rows.values.any()
            late = NumpyTarget()
            with run.replica("late", late) as subscriber:
                subscriber.wait_for(head, WAIT)
                wait_for_lag(run.service, "late", lambda lag: all(each["checked"] for each in lag["replicas"]))


@SCENARIOS.scenario("operators", ranks=2)
def an_operator_deletes_rows() -> None:
    ids = [3, 33]
    with training() as run:
        for _ in range(3):
            run.step(list(range(ROWS)))
        run.sync.flush(WAIT)
        if run.service:
            admin = Admin(Endpoint(run.service.http, TOKEN))
            for name in TABLES.values():
                admin.delete_rows("clicks", name, ids)
            assert len(admin.pending_deletes()) == len(TABLES)
        dist.barrier()
        others = [row for row in range(ROWS) if row not in ids]
        run.step(others)  # Its answer hands the requests over.
        run.sync.flush(WAIT)
        run.step(others)
        now, head = run.tables(), run.sync.flush(WAIT)
        assert deleted(now, ids)
        copies = on_all_ranks(weights(run.model)[TABLES["copies"]])
        assert torch.equal(*copies), "copies are reset after the same step"
        if run.service:
            assert admin.pending_deletes() == []
        run.check(head, now)
