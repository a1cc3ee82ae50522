"""Torch modules serve from shared memory without a copy."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from deltasync.base.errors import Contradiction
from deltasync.client import Position, Release, RowBatch, SharedReader, SharedTarget, TableKind, TableSpec
from deltasync.client.shared.torch_module import SharedModule, tensors

USER = TableSpec("sparse.embedding_bags.user", 5, 4)
BIAS = TableSpec("over.bias", 1, 4, kind=TableKind.PARAMETER, sizes=(4,))


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="user", num_embeddings=5, embedding_dim=4, feature_names=["f"])
        self.sparse = EmbeddingBagCollection(tables=[config])
        self.over = torch.nn.Linear(4, 4)
        self.to(dtype)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.over(self.sparse(features).values())
        return values


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def filled(folder: Path, model: Model) -> SharedTarget:
    target = SharedTarget("m", "predictors", directory=folder)
    target.apply(release_of(model, 1))
    return target


def release_of(model: Model, number: int) -> Release:
    user = model.sparse.embedding_bags["user"].weight.detach().numpy()
    bias = model.over.bias.detach().numpy()[None]
    return Release(
        position=Position("h", number, number),
        step=number,
        step_end_unix_ns=number,
        resync=number == 1,
        tables=[USER, BIAS],
        rows=[RowBatch.of_table(USER, np.arange(5), user), RowBatch.of_table(BIAS, [0], bias)],
        version=number,
        model="clicks",
    )


def test_a_collection_answers_from_the_shared_memory(folder: Path) -> None:
    trained, serving = Model(), Model()
    serving.over.weight = trained.over.weight
    target, reader = filled(folder, trained), SharedReader("m", directory=folder)
    shared, seen = SharedModule(serving), list[int]()
    serving.register_forward_hook(lambda module, *_: seen.append(module.over.bias.data_ptr()))
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 3, 4, 4]), lengths=torch.tensor([2, 0, 2]))
    for number in (2, 2, 3, 4):  # Number 2 comes twice: a repair has the position of the release that it repairs.
        with torch.no_grad():
            trained.over.bias.normal_()
        target.apply(release_of(trained, number))
        with reader.reading() as now, torch.inference_mode():
            assert torch.equal(shared(now, features), trained(features))
            assert shared.names == {"over.bias", "sparse.embedding_bags.user.weight"}
            assert seen[-1] == now.tables[BIAS.name].ctypes.data, "nothing was copied"
            assert tensors(now)[USER.name].data_ptr() == now.tables[USER.name].ctypes.data
    target.close()


def test_a_module_of_another_type_needs_a_copy(folder: Path) -> None:
    target, reader = filled(folder, Model()), SharedReader("m", directory=folder)
    with (
        reader.reading() as now,
        pytest.raises(Contradiction, match=r"has type torch.float32, and the module needs a copy of it"),
    ):
        SharedModule(Model(torch.float64))(now)
    target.close()
