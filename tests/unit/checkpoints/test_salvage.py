"""A damaged checkpoint is loaded without its damaged chunks, and every row that these had counts as lost."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.checkpointed import MODEL, Checkpointed, Held, held
from tests.support.examples import examples

from deltasync.checkpoints.chunks import read_chunks
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest, TableKey
from deltasync.checkpoints.salvage import salvage
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.rows import Ids
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import spec_of_record


def salvaged(folder: Path, manifest: Manifest) -> tuple[dict[TableKey, Ids], list[str], Held]:
    tables = [StampedTable(spec_of_record(entry.record)) for entry in manifest.tables]
    problems = list[str]()
    lost = salvage(CheckpointStore(MODEL, Place(str(folder))), manifest, tables, problems)
    return lost, problems, {entry.key: held(table) for entry, table in zip(manifest.tables, tables, strict=True)}


def check(lost: dict[TableKey, Ids], found: Held, right: Held) -> None:
    """Check that every row is right or lost, and that lost ones are as if they had never changed."""
    for key, (rows, stamps, digests, *_) in right.items():
        gone = np.zeros(len(rows), bool)
        gone[lost.get(key, [])] = True
        for mine, wanted in zip(found[key], (rows, stamps, digests), strict=False):
            np.testing.assert_array_equal(mine[~gone], wanted[~gone])  # type: ignore[index]
            assert not mine[gone].any()  # type: ignore[index]


def flip(path: Path, at: int, bit: int = 4) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def newest(world: Checkpointed) -> Manifest:
    """A base with deleted rows, and two releases."""
    world.model.change("user", 0.2, deleted=True)
    world.write()
    for _ in range(2):
        world.model.change("user", 0.1)
        world.model.change("user", 0.05, deleted=True)
        world.views["mobile"].change("user", 0.1)
        made = world.write()
    assert len(made.layers) == 3
    return made


def rounds_of(folder: Path, manifest: Manifest) -> list[list[Path]]:
    return [[folder / file.name for file in files] for files in manifest.rounds]


def test_a_sound_checkpoint_has_lost_nothing(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    lost, problems, found = salvaged(folder, newest)
    assert (lost, problems) == ({}, [])
    check(lost, found, world.held[newest.id])


def test_no_flipped_bit_costs_a_row_in_silence(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    right = world.held[newest.id]
    for path in [each for files in rounds_of(folder, newest) for each in files]:
        content = path.read_bytes()
        for at in range(0, len(content), 7 if examples() > 20 else 29):
            flip(path, at, at % 8)
            lost, problems, found = salvaged(folder, newest)
            assert path.name in problems[0]
            check(lost, found, right)
            path.write_bytes(content)


def test_live_rows_are_lost_exactly(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    """Those of the damaged chunk, except those that later releases have."""
    for path in rounds_of(folder, newest)[0]:
        start, content = 0, path.read_bytes()
        with path.open("rb", buffering=0) as file:
            for chunk in read_chunks(path.name, file, len(content)):
                end, key = file.tell(), newest.tables[chunk.slot].key
                _, stamps, *_ = world.held[newest.id][key]
                if (chunk.stamps > 0).all():
                    flip(path, end - 12)  # A value.
                    lost, _, found = salvaged(folder, newest)
                    left = [
                        row for row, stamp in zip(chunk.ids, chunk.stamps, strict=True) if stamps[row] == stamp
                    ]
                    assert {key: ids.tolist() for key, ids in lost.items()} == ({key: left} if left else {})
                    check(lost, found, world.held[newest.id])
                    path.write_bytes(content)
                start = end
        assert start == len(content)


HARM: list[Callable[[Path], object]] = [
    Path.unlink,
    lambda path: path.write_bytes(path.read_bytes()[:-200]),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: path.write_bytes(b""),
    lambda path: flip(path, 16),  # The number of rows in the header of the first chunk.
    lambda path: flip(path, 8),  # The number of its table.
]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("number", [0, 1, -1])
def test_other_harm_costs_no_row_in_silence(
    folder: Path, world: Checkpointed, newest: Manifest, harm: Callable[[Path], object], number: int
) -> None:
    for path in rounds_of(folder, newest)[number]:
        harm(path)
    lost, _, found = salvaged(folder, newest)
    check(lost, found, world.held[newest.id])


def random_world(folder: Path, seed: int) -> tuple[Checkpointed, Manifest]:
    """Several layers of tables that grow and come and go."""
    rng = random.Random(seed)
    world = Checkpointed(CheckpointStore(MODEL, Place(str(folder))), seed)
    world.model.add("user", 60, 4)
    world.model.add("item", 40, 2)
    world.add_view("mobile").add("user", 60, 3)
    made = world.write()
    for _ in range(rng.randrange(2, 6)):
        for owner in (world.model, world.views["mobile"]):
            for name in list(owner.tables):
                owner.change(name, rng.choice([0, 0.1, 0.5, 1.0]))
                owner.change(name, rng.choice([0, 0.1]), deleted=True)
        if rng.random() < 0.2:
            world.model.grow("item", 5)
        if rng.random() < 0.2:
            world.model.remove("item")
            world.model.add("item", 40, 2)
        made = world.write()
    return world, made


def check_random(folder: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        world, made = random_world(folder / f"{seed}", seed)
        rng, right = random.Random(seed), world.held[made.id]
        every = [path for files in rounds_of(folder / f"{seed}", made) for path in files]
        contents = {path: path.read_bytes() for path in every}
        for _ in range(10):
            for path in rng.sample(every, min(len(every), rng.choice([1, 1, 2, 3]))):
                flip(path, rng.randrange(len(contents[path])), rng.randrange(8))
            lost, _, found = salvaged(folder / f"{seed}", made)
            check(lost, found, right)
            for path, content in contents.items():
                path.write_bytes(content)


def test_random_damage_costs_no_row_in_silence(tmp_path: Path) -> None:
    check_random(tmp_path, range(12))


@pytest.mark.nightly
def test_much_random_damage_costs_no_row_in_silence(tmp_path: Path) -> None:
    check_random(tmp_path, range(100, 700))
