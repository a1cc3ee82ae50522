import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.client import CallbackTarget, NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.checksums import TargetChecksums
from deltasync.client.targets import ReadableTarget
from deltasync.client.torch_target import TorchTarget
from deltasync.core.digests import checksum_of
from deltasync.core.errors import Contradiction, NotFound

USER = TableSpec("sparse.embedding_bags.user", 5, 2)
HALF = TableSpec("sparse.embedding_bags.small", 4, 3, np.dtype("<f2"))


def release_of(version: int, *rows: tuple[TableSpec, list[int], float], resync: bool = False) -> Release:
    changed = [
        RowBatch.of_table(table, np.array(ids), np.full((len(ids), table.dim), value, table.dtype))
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
        with target.reading() as reading:
            return [reading.tables[USER.name][:, 0].tolist(), reading.tables[HALF.name][:, 0].tolist()]
    with target.reading() as reading:
        return [p[:, 0].tolist() for p in reading.module.parameters()]


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
        (nn.Linear(1, 1), NotFound, f"tables {USER.name!r}, {HALF.name!r}: the module has no parameter or buffer"),
        (
            Bags(half=torch.bfloat16),
            Contradiction,
            "small' is 4 x 3 torch.float16, the module has small.weight of shape [4, 3] and type torch.bfloat16",
        ),
        (Bags(rows=6), Contradiction, "user' is 5 x 2 torch.float32, the module has user.weight of shape [6, 2]"),
    ],
)
def test_a_module_that_does_not_fit_is_an_error(module: nn.Module, error: type[Exception], said: str) -> None:
    target = TorchTarget(module)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(error) as refused:
        target.apply(release_of(1, (USER, [0], 1.0), resync=True))
    assert said in str(refused.value)
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


def test_a_table_that_comes_later_is_written_too() -> None:
    """A run may bring further tables."""
    target = TorchTarget(Bags())
    first = release_of(1, (USER, [1], 2.0), resync=True)
    target.apply(dataclasses.replace(first, tables=[USER]))
    target.apply(release_of(2, (HALF, [0], 3.0)))
    assert target.tables()[HALF.name][:, 0].tolist()[0] == 3


@pytest.mark.parametrize(
    "target", [NumpyTarget(), TorchTarget(Bags()), TorchTarget(Nested())], ids=["numpy", "bag", "model"]
)
def test_one_table_is_reset_when_all_of_it_comes(target: NumpyTarget | TorchTarget) -> None:
    target.apply(release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True))
    whole = release_of(2, (USER, [4], 5.0), (HALF, [1], 1.0))
    target.apply(dataclasses.replace(whole, whole=frozenset({USER.name})))
    assert rows_of(target) == [[0, 0, 0, 0, 5], [3, 1, 0, 0]]


@pytest.mark.parametrize("target", [NumpyTarget(), TorchTarget(Bags())], ids=["numpy", "torch"])
def test_ids_without_values_are_refused(target: NumpyTarget | TorchTarget) -> None:
    norms = RowBatch.of_table(USER, np.array([1]), np.empty((1, 0), "<f4"), np.ones(1, np.float32))
    release = dataclasses.replace(release_of(1, resync=True), rows=[norms])
    with pytest.raises(Contradiction, match="take them with a CallbackTarget"):
        target.apply(release)


def test_arrays_of_tables_no_longer_followed_are_dropped() -> None:
    target = NumpyTarget()
    target.apply(release_of(1, (USER, [1], 2.0), (HALF, [0], 3.0), resync=True))
    target.apply(dataclasses.replace(release_of(2), tables=[HALF]))
    assert list(target.tables) == [HALF.name]
    assert target.read(USER, np.array([1])) is None


@pytest.mark.parametrize("target", [NumpyTarget(), TorchTarget(Nested())], ids=["numpy", "torch"])
def test_rows_are_read_back_as_they_are(target: NumpyTarget | TorchTarget) -> None:
    target.apply(release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True))
    user, half = target.read(USER, np.array([0, 3])), target.read(HALF, np.array([0]))
    assert user is not None
    assert half is not None
    assert (user.tolist(), user.dtype) == ([[0, 0], [2, 2]], np.dtype("<f4"))
    assert (half.tolist(), half.dtype) == ([[3, 3, 3]], np.dtype("<f2"))
    no_rows = target.read(USER, np.empty(0, np.int64))
    assert no_rows is not None
    assert no_rows.shape == (0, 2)
    assert target.read(TableSpec("other", 5, 2), np.array([0])) is None


def test_a_module_that_outlived_its_process_is_read_before_any_release() -> None:
    module = Bags()
    TorchTarget(module).apply(release_of(1, (USER, [1], 2.0), resync=True))
    rows = TorchTarget(module).read(USER, np.array([0, 1]))
    assert rows is not None
    assert rows.tolist() == [[0, 0], [2, 2]]


def test_what_is_read_of_no_target_is_no_checksum() -> None:
    assert isinstance(NumpyTarget(), ReadableTarget)
    assert isinstance(TorchTarget(Bags()), ReadableTarget)
    assert not isinstance(CallbackTarget(print), ReadableTarget)


def checksums_of(target: NumpyTarget | TorchTarget) -> dict[str, int]:
    found = {table.name: target.read(table, np.arange(table.rows)) for table in (USER, HALF)}
    return {name: checksum_of(np.arange(len(rows)), rows) for name, rows in found.items() if rows is not None}


@pytest.mark.parametrize("target", [NumpyTarget(), TorchTarget(Bags())], ids=["numpy", "torch"])
def test_checksums_are_of_what_is_held(target: NumpyTarget | TorchTarget) -> None:
    releases = [
        release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True),
        release_of(2, (USER, [3], 4.0), (USER, [4], 5.0)),
        dataclasses.replace(release_of(3, (USER, [0], 1.5)), whole=frozenset({USER.name})),
        release_of(4, (HALF, [0, 1], 0.0)),
        release_of(5),
        release_of(6, (USER, [0, 1], -0.0), (HALF, [3], 1.0), resync=True),
    ]
    held = TargetChecksums(target)
    for release in releases:
        target.apply(release)
        assert held.after(release) == checksums_of(target)


def test_of_a_table_that_was_dropped_nothing_is_remembered() -> None:
    """It comes back whole."""
    target = NumpyTarget()
    held = TargetChecksums(target)
    back = dataclasses.replace(release_of(3, (USER, [2], 7.0), (HALF, [1], 1.0)), whole=frozenset({HALF.name}))
    for release in (
        release_of(1, (USER, [1], 2.0), (HALF, [0], 3.0), resync=True),
        dataclasses.replace(release_of(2, (USER, [1], 5.0)), tables=[USER]),
        back,
    ):
        target.apply(release)
        assert held.after(release) == checksums_of(target)


@given(st.data(), st.integers(1, 3))
def test_a_row_changed_behind_its_back_shows_in_the_end(data: st.DataObject, block: int) -> None:
    """Once it is written again, or the sweep has come round to it."""
    target, some = NumpyTarget(), st.lists(st.integers(0, 3), unique=True).map(sorted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltasync.client.checksums.BLOCK_ROWS", block)
        held = TargetChecksums(target)

        def released(number: int) -> dict[str, int]:
            rows = (USER, data.draw(some), float(number)), (HALF, data.draw(some), float(number))
            release = release_of(number, *(each for each in rows if each[1]), resync=number == 0)
            target.apply(release)
            return held.after(release)

        damaged = data.draw(st.integers(0, 9))
        for number in range(damaged):
            assert released(number) == checksums_of(target)
        if damaged:
            table = data.draw(st.sampled_from([USER, HALF]))
            target.tables[table.name][data.draw(st.integers(0, table.rows - 1))] += 1
        blocks = sum(-(-table.rows // block) for table in (USER, HALF))
        for number in range(damaged, damaged + 2 * blocks):
            last = released(number)
        assert last == checksums_of(target)
