"""What is loaded is what was written, bit by bit."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import BinaryIO, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpointed import MODEL, Checkpointed, Owner, as_lists, loaded, same

from deltasync.checkpoints.chunks import read_chunks
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.table_form import spec_of_record

T = TypeVar("T")

CHANGES = (
    "change",
    "change",
    "change",
    "delete",
    "grow",
    "add",
    "remove",
    "again",
    "replace",
    "view",
    "view change",
    "no view",
)


def _act(world: Checkpointed, action: str) -> None:
    """Change something, if it is there."""
    rng = world.rng
    owner: Owner = world.model
    if action.startswith("view") or rng.random() < 0.3:
        owner = world.views.get("mobile", world.model)
    names = list(owner.tables)
    name = names[rng.integers(len(names))] if names else ""
    share = float(rng.choice([0.02, 0.2, 1.0]))
    if action == "view" and "mobile" not in world.views:
        world.add_view("mobile").add("user", int(rng.integers(1, 80)), int(rng.integers(1, 8)))
    elif action == "no view":
        world.views.pop("mobile", None)
    elif action == "add" and len(owner.tables) < 4:
        owner.add(f"table {owner.number}", int(rng.integers(1, 200)), int(rng.integers(1, 8)))
    elif name and action in ("change", "view change"):
        owner.change(name, share)
    elif name and action == "delete":
        owner.change(name, share, deleted=True)
    elif name and action == "grow":
        owner.grow(name, int(rng.integers(1, 40)))
    elif name and action == "replace":
        owner.replace(name)
    elif name and action == "remove":
        owner.remove(name)
    elif name and action == "again":
        owner.remove(name)
        owner.add(name, int(rng.integers(1, 200)), int(rng.integers(1, 8)))


@given(
    seed=st.integers(0, 2**32),
    between=st.lists(st.lists(st.sampled_from(CHANGES), max_size=6), min_size=1, max_size=4),
    during=st.lists(st.sampled_from((*CHANGES, "", "", "busy")), max_size=30),
)
def test_what_is_loaded_is_what_was_written(seed: int, between: list[list[str]], during: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = Checkpointed(CheckpointStore(MODEL, Place(folder)), seed)
        to_come = iter(during)

        def meanwhile() -> None:
            action = next(to_come, "")
            if action == "busy" and world.views:
                world.views["mobile"].busy = 1
            elif action:
                _act(world, action)

        world.meanwhile = meanwhile
        world.model.add("user", 150, 4)
        made = list[Manifest]()
        for actions in between:
            for action in actions:
                _act(world, action)
            manifest = world.write()
            made.append(manifest)
            assert (manifest.version, manifest.seal) == (world.model.number, world.seal(world.model.number))
            assert manifest.states == {
                owner.owner: {"number": owner.number} for owner in (world.model, *world.views.values())
            }
        found = world.store.manifests()
        assert (found.manifests, found.problems) == (made[::-1], [])
        for manifest in made:  # None has lost anything to a later one.
            assert same(loaded(world.store, manifest), world.held[manifest.id])
            dirty = {key: as_lists(rows) for key, rows in world.store.dirty(manifest).items()}
            assert dirty == world.dirty[manifest.id]
            _rounds_have_different_rows(Path(folder), manifest)
            assert [number for _, number, *_ in world.store.records(manifest)] == list(
                range(1, manifest.version + 1)
            )
        assert world.store.verify() == []
        _rows_are_those(world, made[-1])


def _rounds_have_different_rows(folder: Path, manifest: Manifest) -> None:
    for files in (files for layer in manifest.layers for files in layer.rounds):
        rows = list[tuple[int, int]]()
        for file in files:
            with (folder / file.name).open("rb", buffering=0) as opened:
                for chunk in read_chunks(file.name, opened, file.bytes):
                    rows += [(chunk.slot, row) for row in chunk.ids.tolist()]
        assert len(rows) == len(set(rows))


def _rows_are_those(world: Checkpointed, manifest: Manifest) -> None:
    """What a client reads has the same rows."""
    held = {key: np.zeros_like(rows) for key, (rows, *_) in world.held[manifest.id].items()}
    for entry, chunk in world.store.rows_of(manifest):
        rows = chunk.rows(spec_of_record(entry.record))
        held[entry.key][rows.ids] = rows.values
        assert np.all(chunk.stamps < 0) == rows.deleted
    assert all(held[key].tobytes() == rows.tobytes() for key, (rows, *_) in world.held[manifest.id].items())


def test_small_records_and_seals_are_there(world: Checkpointed, tmp_path: Path) -> None:
    world.write()
    world.model.change("user", 0.1)
    second = world.write()
    other = CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints")))
    assert other.manifests().manifests[0].small == world.small
    assert [record[-1] for record in other.records(second)] == [b"seal 1", b"seal 2"]


def test_a_checkpoint_waits_for_the_state_of_a_view(world: Checkpointed) -> None:
    world.views["mobile"].busy = 3
    made = world.write()
    assert made.states.keys() == {"", "mobile"}
    assert same(loaded(world.store, made), world.held[made.id])


def test_only_what_has_changed_is_written_after_the_base(world: Checkpointed) -> None:
    base = world.write()
    world.model.change("user", 0.1)
    second = world.write()
    assert second.layers[:1] == base.layers
    assert [each.version for each in second.layers] == [base.version, second.version]
    _, table = world.model.tables["user"]
    layer = replace(second, layers=second.layers[1:])
    written = [row for _, chunk in world.store.rows_of(layer) for row in chunk.ids.tolist()]
    assert written == table.changed_since(base.version).tolist()


@pytest.mark.parametrize("change", ["of another history", "that is ahead", "of another history of a view"])
def test_nothing_is_built_upon_a_checkpoint(world: Checkpointed, change: str) -> None:
    first = world.write()
    if change == "of another history":
        world.model.history = "another"
    elif change == "that is ahead":
        world.model.number -= 1
    else:  # It is the same table by name and number, with fewer rows.
        world.views["mobile"] = Owner("mobile", world.rng)
        world.views["mobile"].add("user", 100, 3)
        world.views["mobile"].change("user", 0.1)
    second = world.write()
    assert len(second.layers) == (2 if "view" in change else 1)
    assert same(loaded(world.store, second), world.held[second.id])
    assert same(loaded(world.store, first), world.held[first.id])


def test_rows_that_change_while_they_are_copied_come_again(world: Checkpointed, tmp_path: Path) -> None:
    world.model.add("large", 500, 4)
    world.model.change("large", 1.0)
    world.meanwhile = lambda: world.model.change_rows("large", np.arange(3))
    made = world.write()
    assert len(made.layers[0].rounds) > 1
    _rounds_have_different_rows(tmp_path / "checkpoints", made)
    assert same(loaded(world.store, made), world.held[made.id])


def test_later_rounds_are_loaded_after_earlier_ones(world: Checkpointed, tmp_path: Path) -> None:
    world.model.add("large", 500, 4)
    world.model.change("large", 1.0)
    world.meanwhile = lambda: world.model.change_rows("large", np.arange(3))
    made = world.write()
    first, *_ = made.layers[0].rounds
    reading, later = {file.name for file in first}, Event()

    class Slow(Place):
        """Reads files of the first round slowly: until another file is opened, which must not be."""

        @contextmanager
        def open(self, name: str) -> Iterator[BinaryIO]:
            with super().open(name) as file:
                if name not in reading:
                    assert not reading
                    later.set()
                else:
                    later.wait(0.02)
                yield file
            reading.discard(name)

    assert same(loaded(CheckpointStore(MODEL, Slow(str(tmp_path / "checkpoints"))), made), world.held[made.id])
    assert later.is_set()


@pytest.mark.parametrize("again", [False, True], ids=["moved", "made again"])
def test_tables_that_are_replaced_while_they_are_copied(world: Checkpointed, again: bool) -> None:
    world.model.add("large", 500, 4)
    world.model.change("large", 1.0)
    turns = iter(range(1000))

    def meanwhile() -> None:
        world.model.change("large", 0.02)
        turn = next(turns)
        if turn == 4 and again:
            world.model.remove("large")
            world.model.add("large", 300, 5)
        elif turn == 4:
            world.model.replace("large")

    world.meanwhile = meanwhile
    for _ in range(2):
        made = world.write()
        assert same(loaded(world.store, made), world.held[made.id])
    assert next(turns) > 10


def test_a_checkpoint_ends_where_rows_change_as_fast_as_they_are_copied(
    world: Checkpointed, tmp_path: Path
) -> None:
    world.model.add("large", 1000, 4)
    world.meanwhile = lambda: world.model.change_rows("large", np.arange(1000))
    turns = iter(range(200))

    def check() -> None:
        if next(turns, None) is None:
            raise RuntimeError("it never ends")

    in_turns = list[str]()

    class Watched(Place):
        def put(self, name: str, content: bytes | memoryview) -> None:
            if world.in_turn:
                in_turns.append(name)
            super().put(name, content)

    world.store = CheckpointStore(MODEL, Watched(str(tmp_path / "checkpoints")))
    made = world.write(check=check)
    assert same(loaded(world.store, made), world.held[made.id])
    _rounds_have_different_rows(tmp_path / "checkpoints", made)
    # Memory is bounded, because the last turn stores most of a large rest itself.
    last = [file.name for file in made.layers[0].rounds[-1]]
    assert len(set(last).intersection(in_turns)) >= len(last) - 4 > 8


def test_a_checkpoint_that_waits_goes_on_copying(world: Checkpointed) -> None:
    world.model.add("large", 1000, 4)
    world.views["mobile"].busy = 50
    numbers = count()
    world.meanwhile = lambda: world.model.change_rows("large", (next(numbers) * 10) % 1000 + np.arange(10))
    made = world.write()
    # The last turn also copies the rows that changed just before it.
    assert _last_turn_bytes(world, made) <= 2 * world.options.last_turn_bytes
    assert same(loaded(world.store, made), world.held[made.id])


def test_tables_that_are_added_meanwhile_share_the_limit_of_the_last_turn(world: Checkpointed) -> None:
    world.options = replace(world.options, last_turn_bytes=2000)
    world.views["mobile"].busy = 5
    names = iter(["", "a", "b", "c", "d"])

    def add() -> None:
        if name := next(names, ""):
            world.model.add(name, 60, 4)
            world.model.change(name, 1.0)

    world.meanwhile = add
    made = world.write()
    assert len(made.tables) == 6
    assert _last_turn_bytes(world, made) <= world.options.last_turn_bytes
    assert same(loaded(world.store, made), world.held[made.id])


def _last_turn_bytes(world: Checkpointed, made: Manifest) -> int:
    """Bytes of the last round's rows, as the limit counts them."""
    layer = made.layers[-1]
    last = replace(made, layers=[replace(layer, rounds=layer.rounds[-1:])])
    return sum(
        len(chunk.ids) * spec_of_record(entry.record).row_bytes for entry, chunk in world.store.rows_of(last)
    )
