import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from sync_service.client import CallbackTarget, NumpyTarget, Position, Release, ReleasedRows, Table
from sync_service.client.torch_target import TorchTarget
from sync_service.errors import Contradiction, NotFound

USER = Table("sparse.embedding_bags.user", 5, 2)
HALF = Table("sparse.embedding_bags.small", 4, 3, np.dtype("<f2"))


def release_of(version: int, *rows: tuple[Table, list[int], float], resync: bool = False) -> Release:
    changed = [
        ReleasedRows(table, np.array(ids), np.full((len(ids), table.dim), value, table.dtype))
        for table, ids, value in rows
    ]
    for each in changed:
        each.ids.setflags(write=False)
        each.values.setflags(write=False)
    return Release(Position("h", version), version, 0, resync, [USER, HALF], changed)


class Bags(nn.Module):
    def __init__(self, half: torch.dtype = torch.float16, rows: int = 5) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(rows, 2)
        self.small = nn.EmbeddingBag(4, 3, dtype=half)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"embedding_bags": Bags()})


def rows_of(target: NumpyTarget | TorchTarget) -> list[list[float]]:
    if isinstance(target, NumpyTarget):
        with target.reading() as tables:
            return [tables[USER.name][:, 0].tolist(), tables[HALF.name][:, 0].tolist()]
    with target.reading() as module:
        return [p[:, 0].tolist() for p in module.parameters()]


@pytest.mark.parametrize(
    "target", [NumpyTarget(), TorchTarget(Bags()), TorchTarget(Nested())], ids=["numpy", "bag", "model"]
)
def test_rows_are_written_and_reset(target: NumpyTarget | TorchTarget) -> None:
    target.apply(release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True))
    assert rows_of(target) == [[0, 2, 0, 2, 0], [3, 0, 0, 0]]
    target.apply(release_of(2, (USER, [3], 4.0), (USER, [4], 5.0)))
    assert rows_of(target) == [[0, 2, 0, 4, 5], [3, 0, 0, 0]]
    target.apply(release_of(3, (HALF, [3], 1.0), resync=True))
    assert rows_of(target) == [[0, 0, 0, 0, 0], [0, 0, 0, 1]]


def test_a_callback_is_given_the_release() -> None:
    seen: list[Release] = []
    release = release_of(1, (USER, [0], 1.0))
    CallbackTarget(seen.append).apply(release)
    assert seen == [release]


@pytest.mark.parametrize(
    ("module", "error", "said"),
    [
        (nn.Linear(1, 1), NotFound, f"no parameter of the module (weight, bias) fits a table ({USER.name}, "),
        (Bags(half=torch.float32), Contradiction, "small' is 4 x 3 torch.float16, the module's parameter is"),
        (Bags(rows=6), Contradiction, "user' is 5 x 2"),
    ],
)
def test_a_module_that_does_not_fit_is_an_error(module: nn.Module, error: type[Exception], said: str) -> None:
    target = TorchTarget(module)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(error) as refused:
        target.apply(release_of(1, (USER, [0], 1.0), resync=True))
    assert said in str(refused.value)
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


def test_tables_the_module_lacks_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.ModuleDict({"user": nn.EmbeddingBag(5, 2)})
    target = TorchTarget(module)
    target.apply(release_of(1, (USER, [1], 2.0), (HALF, [0], 3.0), resync=True))
    assert list(target.tables()) == [USER.name]
    assert target.tables()[USER.name][:, 0].tolist() == [0, 2, 0, 0, 0]
    assert HALF.name in caplog.text


def test_a_table_that_comes_later_is_written_too() -> None:
    """A run may bring further tables."""
    target = TorchTarget(Bags())
    first = release_of(1, (USER, [1], 2.0), resync=True)
    target.apply(dataclasses.replace(first, tables=[USER]))
    target.apply(release_of(2, (HALF, [0], 3.0)))
    assert target.tables()[HALF.name][:, 0].tolist()[0] == 3
