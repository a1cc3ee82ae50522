"""Readers of a target see one version, and are told which, for both ways of reading."""

import copy
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import quantised_model
from tests.support.targets import read_rows
from tests.support.threads import WAIT, threads
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference.modules import quantize_embeddings

from deltasync.base.errors import Contradiction
from deltasync.client import (
    NumpyTarget,
    Position,
    Release,
    RowBatch,
    Subscriber,
    SubscriberOptions,
    TableKind,
    TableSpec,
    TornTarget,
)
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.local import Gate
from deltasync.client.targets.target import Reading, Reads
from deltasync.client.targets.torch_target import TorchTarget, copy_of
from deltasync.core.digests import checksum_of

ROWS, DIM = 400, 4
TABLES = [
    TableSpec("user", ROWS, DIM),
    TableSpec("item", ROWS, DIM),
    TableSpec("norm.running_mean", 1, DIM, kind=TableKind.BUFFER),
]
WAYS: list[Reads] = ["pause", "copies"]
KINDS = ["numpy", "torch"]

AnyTarget = NumpyTarget | TorchTarget


class Model(nn.Module):
    """Gives back all that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(ROWS, DIM)
        self.item = nn.EmbeddingBag(ROWS, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.eval()

    def forward(self) -> list[torch.Tensor]:
        return [self.user.weight, self.item.weight, self.norm.running_mean]  # type: ignore[list-item]


def target_of(kind: str, reads: Reads) -> AnyTarget:
    return NumpyTarget(reads=reads) if kind == "numpy" else TorchTarget(Model(), reads=reads)


def release_of(version: int, *, resync: bool | None = None, tables: list[TableSpec] | None = None) -> Release:
    """Every value becomes the number of the version."""
    rows = [
        RowBatch.of_table(table, np.arange(table.rows), np.full((table.rows, table.dim), version, table.dtype))
        for table in tables or TABLES
    ]
    return Release(
        Position("h", version + 10),
        version * 100,
        version * 1000,
        version == 1 if resync is None else resync,
        tables or TABLES,
        rows,
        version=version,
        event_time_unix_ns=version * 10_000,
        kept=f"kept-{version}",
    )


def values_of(reading: Any) -> set[float]:
    """All values that are held."""
    if hasattr(reading, "tables"):
        return {float(value) for rows in reading.tables.values() for value in np.unique(rows)}
    with torch.no_grad():
        return {value for rows in reading.module() for value in rows.unique().tolist()}


def read(target: AnyTarget) -> tuple[int, set[float]]:
    with target.reading() as reading:
        return reading.version, values_of(reading)


@pytest.fixture(params=[(kind, reads) for kind in KINDS for reads in WAYS], ids="-".join)
def target(request: pytest.FixtureRequest) -> AnyTarget:
    return target_of(*request.param)


@pytest.mark.parametrize("reads", WAYS)
def test_a_module_without_a_release_or_a_held_position_cannot_be_read(
    reads: Reads,
) -> None:
    target, position = target_of("torch", reads), Position("h", 10)
    with pytest.raises(TornTarget, match="no release has arrived yet, so the module has the weights"):
        read(target)
    options = SubscriberOptions(service="localhost:1", consumer="predictors", held=position)
    with Subscriber(options, target), target.reading() as reading:
        assert (reading.position, reading.version) == (position, 0)
    target.apply(release_of(1, resync=False))
    assert read(target) == (1, {1})


def test_a_reading_has_the_fields_of_the_last_release(target: AnyTarget) -> None:
    reading = target.newest()
    assert isinstance(reading, Reading)
    assert (reading.position, reading.version) == (Position(), 0)
    assert (reading.step, reading.step_end_unix_ns, reading.event_time_unix_ns) == (None, None, None)
    assert reading.kept == ""
    assert (target.position, target.event_time_unix_ns) == (Position(), None)
    target.apply(release_of(1))
    target.apply(release_of(2))
    with target.reading() as reading:
        assert (reading.position, reading.version, reading.step) == (Position("h", 12), 2, 200)
        assert (reading.kept, target.newest().version, target.newest().kept) == ("kept-2", 2, "kept-2")
        assert (reading.step_end_unix_ns, reading.event_time_unix_ns) == (2000, 20_000)
        assert values_of(reading) == {2}
        with pytest.raises(dataclasses.FrozenInstanceError):
            reading.version = 3  # type: ignore[misc]
    assert (target.position, target.event_time_unix_ns) == (Position("h", 12), 20_000)
    target.apply(dataclasses.replace(release_of(3), event_time_unix_ns=None))
    with target.reading() as reading:
        assert reading.event_time_unix_ns is None


def test_every_read_has_one_version(target: AnyTarget) -> None:
    target.apply(release_of(1))
    done, begun = threading.Event(), threading.Barrier(4, timeout=WAIT)
    seen: list[list[int]] = [[], [], []]

    def reader(which: int) -> Callable[[], None]:
        def task() -> None:
            begun.wait()
            while not done.is_set():
                version, values = read(target)
                assert values == {version}
                seen[which].append(version)

        return task

    def release() -> None:
        begun.wait()
        try:
            for version in itertools.count(2):
                target.apply(release_of(version, resync=version % 20 == 0))
                if version >= 59 and all(seen):  # A busy machine may let a reader begin late.
                    return
        finally:
            done.set()

    with threads(release, *map(reader, range(3))):
        pass
    assert all(versions == sorted(versions) for versions in seen)
    last, values = read(target)
    assert values == {last}
    assert last >= 59


def test_nested_readings_have_the_same_version(target: AnyTarget) -> None:
    target.apply(release_of(1))
    begun = threading.Event()

    def release() -> None:
        begun.set()
        target.apply(release_of(2))

    with ExitStack() as later, target.reading() as outer:
        later.enter_context(threads(release))
        assert begun.wait(WAIT)
        for _ in range(100):
            with target.reading() as inner:
                assert inner is outer
                assert values_of(inner) == {1}
    assert read(target) == (2, {2})


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_two_copies_can_always_be_read(kind: str) -> None:
    target = target_of(kind, "copies")
    target.apply(release_of(1))
    new: list[tuple[int, set[float]]] = []

    def come() -> None:
        while not new or new[-1][0] == 1:
            new.append(read(target))

    with ExitStack() as later, target.reading() as old:
        later.enter_context(threads(lambda: target.apply(release_of(2))))
        with threads(come):
            pass
        assert new[-1] == (2, {2})
        assert (old.version, values_of(old)) == (1, {1})
    assert read(target) == (2, {2})


class Late(Gate):
    """Does something just before the first reader enters."""

    def __init__(self, task: Callable[[], object]) -> None:
        super().__init__()
        self._tasks = [task]

    @contextmanager
    def reading(self) -> Iterator[None]:
        while self._tasks:
            self._tasks.pop()()
        with super().reading():
            yield


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_enters_during_a_swap_delays_no_release(kind: str) -> None:
    target = target_of(kind, "copies")
    target.apply(release_of(1))
    target._served.gate = Late(lambda: target.apply(release_of(2)))
    new = [0]

    def come() -> None:
        while new[-1] < 3:
            new.append(read(target)[0])

    with ExitStack() as later, target.reading() as reading:
        later.enter_context(threads(lambda: target.apply(release_of(3))))
        with threads(come):
            pass
        assert (reading.version, values_of(reading)) == (2, {2})


def test_tables_that_grow_or_leave_have_one_version() -> None:
    for reads in WAYS:
        target = NumpyTarget(reads=reads)
        target.apply(release_of(1))
        larger = dataclasses.replace(TABLES[0], rows=2 * ROWS)
        rows = RowBatch.of_table(larger, np.array([2 * ROWS - 1]), np.full((1, DIM), 2, "<f4"))
        target.apply(dataclasses.replace(release_of(2), tables=[larger], rows=[rows]))
        for _ in range(2):  # From one copy, then from the other one.
            with target.reading() as reading:
                assert list(reading.tables) == ["user"]
                assert target.read(TABLES[1], np.array([1])) is None
                assert reading.tables["user"][:, 0].tolist() == [1] * ROWS + [0] * (ROWS - 1) + [2]
            target.apply(dataclasses.replace(release_of(3), tables=[larger], rows=[]))


@pytest.mark.parametrize("reads", WAYS)
def test_readers_inside_autocast_see_each_version(reads: Reads) -> None:
    """An autocast keeps the casts of parameters until it is left."""
    target = TorchTarget(nn.Sequential(nn.Linear(DIM, 1, bias=False)), reads=reads)
    table = TableSpec("0.weight", 1, DIM, kind=TableKind.PARAMETER)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for version in range(1, 6):
            with threads(lambda number=version: target.apply(release_of(number, tables=[table]))):  # type: ignore[misc]
                pass
            with target.reading() as reading:
                assert reading.module(torch.ones(DIM)).item() == DIM * version


def test_applying_inside_of_a_reading_is_an_error(target: AnyTarget) -> None:
    target.apply(release_of(1))
    with target.reading(), pytest.raises(Contradiction, match="would wait for itself"):
        target.apply(release_of(2))
    assert read(target) == (1, {1})
    target.apply(release_of(2))
    assert read(target) == (2, {2})


# What is served is what is checked.


def seen_again(checksums: TargetChecksums) -> int:
    """The checksum of the first table once every block of every table was read again."""
    return [checksums.look()["user"] for _ in range(2 * len(TABLES))][-1]


def rows_of(target: AnyTarget) -> Any:
    return target.tables["user"] if isinstance(target, NumpyTarget) else target.tables()["user"]


@pytest.mark.parametrize("served", [True, False], ids=["the copy that is served", "the other one"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_either_copy_shows_in_the_checksum(kind: str, served: bool) -> None:
    target = target_of(kind, "copies")
    checksums = TargetChecksums(target)
    for version in (1, 2):
        rows = rows_of(target) if not served and version == 2 else None
        target.apply(release_of(version))
        right = checksums.after(release_of(version))["user"]
    damaged = rows if rows is not None else rows_of(target)
    expected = checksum_of(np.arange(ROWS), np.full((ROWS, DIM), 2, "<f4"))
    assert right == expected
    damaged[7, 3] += 1
    found = read_rows(target, TABLES[0], np.arange(ROWS))
    assert np.flatnonzero((found != 2).any(axis=1)).tolist() == [7], "read as neither of them"
    assert seen_again(checksums) != expected
    whole = dataclasses.replace(release_of(2), whole=frozenset({"user"}))
    target.apply(whole)
    assert checksums.after(whole)["user"] == expected, "repaired in both"
    assert seen_again(checksums) == expected


def test_rows_of_an_earlier_process_are_in_both_copies() -> None:
    before = NumpyTarget()
    before.apply(release_of(1))
    target = NumpyTarget(reads="copies")
    target.tables = before.tables
    found = read_rows(target, TABLES[0], np.arange(ROWS))
    assert set(found.flatten()) == {1}
    target.apply(dataclasses.replace(release_of(2), rows=release_of(2).rows[:1]))
    with target.reading() as reading:
        assert [np.unique(rows).tolist() for rows in reading.tables.values()] == [[2], [1], [1]]


# A release that is not written to its end.


def fail_in_the_middle(target: AnyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the writing of a release end after its first table."""

    def staging(stage: Callable[[Release], Callable[[], object]]) -> Callable[[Release], Callable[[], None]]:
        def staged(release: Release) -> Callable[[], None]:
            first = stage(dataclasses.replace(release, rows=release.rows[:1]))

            def write() -> None:
                first()
                raise MemoryError

            return write

        return staged

    for side in target._sides:
        monkeypatch.setattr(side.copy, "stage", staging(side.copy.stage))


def test_a_partly_written_release_is_never_served(target: AnyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target.apply(release_of(1))
    fail_in_the_middle(target, monkeypatch)
    with pytest.raises(MemoryError):
        target.apply(release_of(2))
    if target.reads == "pause":
        with pytest.raises(TornTarget, match="rows of version 1 and part of version 2"), target.reading():
            pass
    else:
        assert read(target) == (1, {1})
    check_torn(target, monkeypatch, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_the_second_copy_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    target = target_of(kind, "copies")
    target.apply(release_of(1))
    monkeypatch.setattr(target._served.copy, "stage", lambda _: fail)
    with pytest.raises(KeyboardInterrupt):
        target.apply(release_of(2))
    assert read(target) == (2, {2})
    check_torn(target, monkeypatch, 3)


def check_torn(target: AnyTarget, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """It takes nothing but what brings everything, holds what it held, and is whole after that."""
    monkeypatch.undo()
    assert target.position == Position(), "a subscriber that goes on from there is sent everything"
    with pytest.raises(TornTarget, match=f"version {version} cannot be applied to rows of version 1"):
        target.apply(release_of(version))
    assert target.read(TABLES[0], np.arange(ROWS)) is not None
    if isinstance(target, TorchTarget):
        assert target.bound() == target.tables().keys() == {table.name for table in TABLES}
    for each in (version, version + 1):
        target.apply(release_of(each, resync=each == version))
        assert read(target) == (each, {each})
        assert target.position == Position("h", each + 10)
        found = read_rows(target, TABLES[0], np.arange(ROWS))
        assert set(found.flatten()) == {each}


@pytest.mark.parametrize("reads", WAYS)
def test_rows_of_a_table_outside_of_the_release_change_nothing(reads: Reads) -> None:
    target, other = NumpyTarget(reads=reads), TableSpec("other", 1, 1)
    target.apply(release_of(1))
    rows = RowBatch.of_table(other, np.array([0]), np.ones((1, 1), "<f4"))
    with pytest.raises(KeyError):
        target.apply(dataclasses.replace(release_of(2), rows=[*release_of(2).rows, rows]))
    assert (read(target), target.position) == ((1, {1}), Position("h", 11))
    target.apply(release_of(2))
    assert read(target) == (2, {2})


# Copies of modules.


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_a_copy_of_a_quantised_collection_shares_no_memory_with_it() -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=5, embedding_dim=8, feature_names=[name])
        for name in ("user", "item")
    ]
    module: Any = nn.Sequential(EmbeddingBagCollection(tables=tables))
    quantised = quantize_embeddings(module, dtype=torch.qint8, inplace=True)
    made: Any = copy_of(quantised)
    before = quantised[0].embedding_bags["item"].weight.clone()
    memory = made[0]._emb_modules[0].split_embedding_weights_with_scale_bias(0)
    memory[1][0][:] = 7
    assert made[0].embedding_bags["item"].weight.unique().tolist() == [7]
    assert torch.equal(quantised[0].embedding_bags["item"].weight, before)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_copy_of_a_table_sharded_by_row_shares_no_memory_with_it(bits: int) -> None:
    def shards_of(module: nn.Module) -> list[torch.Tensor]:
        table: Any = module.state_dict()["sparse.embedding_bags.user.weight"]
        shards = [each.tensor for each in table.local_shards()]
        return shards if bits == 8 else [each.elem for each in shards]

    with quantised_model.on_cpu():
        module = quantised_model.sharded(quantised_model.quantised(quantised_model.Model(), bits), "row_wise")
    made: Any = copy_of(module)
    before = [each.clone() for each in shards_of(module)]
    for tbe in made.get_submodule("sparse.tbes"):
        tbe.weights_host.fill_(7)
    assert all((each == 7).all() for each in shards_of(made))
    assert all(torch.equal(*each) for each in zip(shards_of(module), before, strict=True))


def test_a_hook_of_the_module_itself_is_one_of_the_copy() -> None:
    class Hooked(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0
            self.user.register_forward_hook(self.count)

        def count(self, *_: object) -> None:
            self.seen += 1

    module = Hooked()
    made: Any = copy_of(module)
    made.user(torch.tensor([[1]]))
    assert (module.seen, made.seen) == (0, 1)


def locked() -> nn.Module:
    module = Model()
    module.lock = threading.Lock()  # type: ignore[assignment]
    return module


def viewing() -> nn.Module:
    module = Model()
    module.first = nn.Parameter(module.user.weight.detach()[:1])
    return module


def sharing() -> nn.Module:
    module, rows = Model(), Model().user.weight.detach()
    module.user.weight = nn.Parameter(rows)
    metadata = [ShardMetadata([row, 0], [1, rows.shape[1]], "rank:0/cpu") for row in (0, 1)]
    module.shards = ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [Shard(rows[row : row + 1], each) for row, each in enumerate(metadata)],
        ShardedTensorMetadata(metadata, torch.Size([2, rows.shape[1]])),
    )
    return module


class Itself(Model):
    def __deepcopy__(self, _: object) -> "Itself":
        return self


class Half(Model):
    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        made = Model()
        made.user, made.item = copy.deepcopy(self.user, memo), self.item
        return made


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (locked(), r"TypeError: cannot pickle '_thread\.lock' object"),
        (sharing(), r"user\.weight shares memory with another of its tensors, but not in a copy"),
        (viewing(), "first shares memory with another of its tensors, but not in a copy"),
        (Itself(), r"its copy shares .* with it"),
        (Half(), r"its copy shares item\.weight with it"),
    ],
    ids=["locked", "sharing", "viewing", "itself", "half"],
)
def test_a_module_that_cannot_be_copied_is_refused(module: nn.Module, said: str) -> None:
    with pytest.raises(Contradiction, match=f'reads="copies": the module cannot be copied: {said}'):
        TorchTarget(module, reads="copies")
    TorchTarget(module).apply(release_of(1))


def test_tied_parameters_are_tied_in_the_copy() -> None:
    module = Model()
    module.item.weight = module.user.weight
    made: Any = copy_of(module)
    assert made.item.weight is made.user.weight


def test_a_reading_has_the_age_of_its_events_or_of_its_step() -> None:
    now = time.time_ns()
    assert Reading().age_seconds is None
    of_step = Reading(step=7, step_end_unix_ns=now - 5_000_000_000)
    assert of_step.age_seconds is not None
    assert of_step.age_seconds >= 5
    of_events = dataclasses.replace(of_step, event_time_unix_ns=now - 60_000_000_000)
    assert of_events.age_seconds is not None
    assert of_events.age_seconds >= 60
    assert Reading(event_time_unix_ns=now + 3600 * 10**9).age_seconds == 0
