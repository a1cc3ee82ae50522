"""Torch modules serve from shared memory without a copy."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from deltasync.base.errors import Contradiction
from deltasync.client import Position, Release, RowBatch, SharedReader, SharedTarget, TableKind, TableSpec
from deltasync.client.shared.torch_tensors import tensors, tensors_for

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
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 3, 4, 4]), lengths=torch.tensor([2, 0, 2]))
    with reader.reading() as now, torch.inference_mode():
        found = tensors_for(serving, now)
        assert sorted(found) == ["over.bias", "sparse.embedding_bags.user.weight"]
        for name, table in ((USER.name, "sparse.embedding_bags.user.weight"), (BIAS.name, "over.bias")):
            assert found[table].data_ptr() == now.tables[name].__array_interface__["data"][0]
            assert tensors(now)[name].shape == now.tables[name].shape
        assert torch.equal(functional_call(serving, found, (features,)), trained(features))
    target.close()


def test_tensors_are_found_once_for_all_versions_in_the_same_memory(folder: Path) -> None:
    trained, serving, other = Model(), Model(), Model()
    target, reader = filled(folder, trained), SharedReader("m", directory=folder)
    found = list[dict[str, torch.Tensor]]()
    for number in (2, 2, 3, 4):
        with torch.no_grad():
            trained.over.bias.normal_()
        target.apply(release_of(trained, number))
        with reader.reading() as now:
            found.append(tensors_for(serving, now))
            assert torch.equal(found[-1]["over.bias"], trained.over.bias)
            assert tensors_for(other, now) is not found[-1]
    assert found[0] is found[2]
    assert found[1] is found[3]
    assert found[0] is not found[1]
    target.close()


def test_a_module_of_another_type_needs_a_copy(folder: Path) -> None:
    target, reader = filled(folder, Model()), SharedReader("m", directory=folder)
    with (
        reader.reading() as now,
        pytest.raises(Contradiction, match=r"has type torch.float32, and the module needs a copy of it"),
    ):
        tensors_for(Model(torch.float64), now)
    target.close()
