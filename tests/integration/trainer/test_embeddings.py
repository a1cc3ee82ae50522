"""Embedding modules that no rank shards are embedding tables: policies rank and quantise their rows."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from tests.integration.trainer.following import WAIT
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.client import NumpyTarget, Release, Subscriber, SubscriberOptions
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking.module_tensors import buffer_digests, unranked_embeddings
from deltasync.trainer.tracking.tracked_model import published_tables

ROWS, DIM = 12, 4
POLICIES = {
    "two": Policy(top_k=2),
    "small": Policy(value_type=ValueType.INT8, top_k=0.5),
    "dense": Policy(tables=("over.*",), value_type=ValueType.INT8),
}
with_policies = pytest.mark.parametrize("running", [{"policies": POLICIES}], indirect=True)


def bags() -> Any:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])]
    )


def rows_by_id() -> Any:
    return EmbeddingCollection(
        [EmbeddingConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])]
    )


def fused_bags(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Any:
    tables = [EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])]
    return FusedEmbeddingBagCollection(tables, optimizer, {"lr": 0.5}, device=torch.device("cpu"))


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Embedding": (lambda: nn.Embedding(ROWS, DIM), ""),
    "sparse EmbeddingBag": (lambda: nn.EmbeddingBag(ROWS, DIM, sparse=True), ""),
    "EmbeddingBagCollection": (bags, ".embedding_bags.t"),
    "EmbeddingCollection": (rows_by_id, ".embeddings.t"),
    "FusedEmbeddingBagCollection": (fused_bags, ".embedding_bags.t"),
}


class Model(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.user = embedding
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: list[int]) -> torch.Tensor:
        if isinstance(self.user, nn.Embedding):
            return self.over(self.user(torch.tensor(ids))).sum()  # type: ignore[no-any-return]
        if isinstance(self.user, nn.EmbeddingBag):
            return self.over(self.user(torch.tensor([ids]))).sum()  # type: ignore[no-any-return]
        lengths = torch.ones(len(ids), dtype=torch.int32)
        found = self.user(KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor(ids), lengths))
        values = found["f"].values() if isinstance(found, dict) else found.values()
        return self.over(values).sum()  # type: ignore[no-any-return]


def train(model: nn.Module, ids: list[int]) -> None:
    """One step of SGD on all that is not fused."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()


def follow(service: RunningService, consumer: str, target: Any) -> Subscriber:
    return Subscriber(SubscriberOptions(service=service.grpc, consumer=consumer, replica="a"), target)


class Received(NumpyTarget):
    """Notes the embedding rows of each release."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def apply(self, release: Release) -> None:
        self.rows.append(sum(len(each) for each in release.rows if each.shard.table.kind.ranked))
        super().apply(release)


@with_policies
@pytest.mark.parametrize("kind", MODULES)
def test_rows_of_an_unsharded_module_are_ranked(running: RunningService, kind: str) -> None:
    make, inner = MODULES[kind]
    trained, served = Model(make()), Model(make())
    received = Received()
    with (
        DeltaSync(trained, SyncOptions(service=running.grpc, model="clicks", publish_every=1)) as sync,
        follow(running, "two", received) as ranked,
        follow(running, "predictors", TorchTarget(served.eval())) as replica,
    ):
        ranked.wait_for(sync.flush(WAIT).number, WAIT)
        kinds = {line["table"]: line["kind"] for line in running.get_json("/tables")}
        assert kinds == {f"user{inner}": "embedding", "over.weight": "parameter", "over.bias": "parameter"}
        received.rows.clear()
        train(trained, [1, 3, 5, 7, 9])
        sync.step()
        newest = sync.flush(WAIT)
        replica.wait_for(newest, WAIT)
        wait_for(lambda: running.get_json("/consumers/two")["release"]["version"] == newest.number)
        ranked.wait_for(running.get_json("/consumers/two")["release"]["number"], WAIT)
        assert received.rows == [2], "the two rows that changed most"
        torch.testing.assert_close(served.state_dict(), trained.state_dict(), rtol=0, atol=0)


def test_a_model_under_ddp_without_its_dense_part(running: RunningService, lone_rank: None) -> None:
    trained, served = Model(nn.Embedding(ROWS, DIM)), nn.ModuleDict({"user": nn.Embedding(ROWS, DIM)})
    options = SyncOptions(service=running.grpc, model="clicks", dense=False, publish_every=1)
    parallel = DistributedDataParallel(trained)
    with DeltaSync(parallel, options) as sync:
        with follow(running, "predictors", TorchTarget(served.eval())) as replica:
            train(parallel, [1, 3])
            sync.step()
            sync.delete("user", torch.tensor([3, 4]))
            replica.wait_for(sync.flush(WAIT), WAIT)
        assert [line["table"] for line in running.get_json("/tables")] == ["user"]
    torch.testing.assert_close(served["user"].weight, trained.user.weight, rtol=0, atol=0)
    assert not trained.state_dict()["user.weight"][[3, 4]].any()


def test_an_embedding_that_is_tied_is_one_too(running: RunningService) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"above": nn.Linear(DIM, ROWS, bias=False), "item": nn.Embedding(ROWS, DIM)})
        model["above"].weight = model["item"].weight
        return model

    trained, served = tied(), tied()
    with DeltaSync(trained, SyncOptions(service=running.grpc, model="clicks")) as sync:
        with follow(running, "predictors", TorchTarget(served.eval())) as replica:
            replica.wait_for(sync.flush(WAIT), WAIT)
        (table,) = running.get_json("/tables")
    assert (table["table"], table["kind"]) == ("item", "embedding")
    with pytest.raises(InvalidInput, match="'above' matches no table; tables: item"):
        DeltaSync(trained, SyncOptions(service=running.grpc, model="other", fqns_to_skip=["above"]))
    torch.testing.assert_close(served.state_dict(), trained.state_dict(), rtol=0, atol=0)


@with_policies
def test_what_cannot_be_ranked_is_said_at_the_attachment_and_in_lag(
    running: RunningService, caplog: pytest.LogCaptureFixture
) -> None:
    tbe = SplitTableBatchedEmbeddingBagsCodegen([(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    model = nn.ModuleDict({"wide": nn.Embedding(ROWS, DIM).double(), "tbe": tbe, "over": nn.Linear(DIM, 1)})
    with caplog.at_level(logging.WARNING, "deltasync.trainer"):
        sync = DeltaSync(model, SyncOptions(service=running.grpc, model="clicks"))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "embedding 'wide' has 4 values of torch.float64 in a row: it is a parameter, which no policy" in said
    assert "module 'tbe' holds its tables in one parameter" in said
    with sync, follow(running, "dense", NumpyTarget()) as replica:
        replica.wait_for(sync.flush(WAIT).number, WAIT)
        reason = running.get_json("/consumers/dense")["reason"]
    assert "cannot rank or quantise over.bias, over.weight, which are not embedding tables" in reason


def test_what_is_left_out_is_neither_checked_nor_called_published(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"item": nn.Embedding(ROWS, DIM), "over": nn.LazyLinear(1)})
    with pytest.raises(InvalidInput, match=r"parameter 'over.weight' has no shape yet"):
        published_tables(model, dense=True)
    assert [table.name for table in published_tables(model, dense=False)] == ["item"]
    wide = nn.ModuleDict({"wide": nn.Embedding(ROWS, DIM).double()})
    assert "which dense=False leaves out" in unranked_embeddings(wide, dense=False)[0]
    assert unranked_embeddings(wide, fqns_to_skip=["wide"]) == []


def test_a_deleted_row_of_a_fused_collection_is_a_new_row_to_its_optimizer(running: RunningService) -> None:
    trained = Model(fused_bags(torch.optim.Adagrad))
    with DeltaSync(trained, SyncOptions(service=running.grpc, model="clicks")) as sync:
        train(trained, [1, 3])
        (lookups,) = trained.user._emb_modules  # type: ignore[misc]
        ((sums,),) = lookups._emb_module.split_optimizer_states()
        assert sums.view(ROWS, -1)[[1, 3]].all()
        sync.delete("user.embedding_bags.t", torch.tensor([3]))
        assert sums.view(ROWS, -1).any(dim=1).nonzero().view(-1).tolist() == [1]


def test_rows_in_a_cache_are_refused_by_name(running: RunningService) -> None:
    model = Model(fused_bags())
    (lookups,) = model.user._emb_modules  # type: ignore[misc]
    cached = (ROWS, DIM, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CPU)
    lookups._emb_module.embedding_specs = [cached]  # Only a GPU has such a cache.
    with pytest.raises(InvalidInput, match=r"module 'user' is a FusedEmbeddingBagCollection with a cache"):
        DeltaSync(model, SyncOptions(service=running.grpc, model="clicks"))
    names = [table.name for table in published_tables(model, dense=True, fqns_to_skip=["user"])]
    assert names == ["over.weight", "over.bias"]
    assert buffer_digests(model, ["user"]) == {}, "a cut does not look for its buffers either"
