"""Any flipped bit, cut file and chunk in another place is found, named, and never loaded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from tests.support.checkpointed import MODEL, Checkpointed, loaded, same

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.chunks import CheckpointDamaged, LaterFormat, read_chunks
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.rows import Ids, Values
from deltasync.core.stamped_table import StampedTable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def newest(world: Checkpointed) -> Manifest:
    """A base and a release, with deleted rows, of several files."""
    world.write()
    world.model.change("user", 0.1)
    world.model.change("user", 0.1, deleted=True)
    return world.write()


def _reopened(folder: Path) -> CheckpointStore:
    return CheckpointStore(MODEL, Place(str(folder)))


def _check_found(folder: Path, damaged: Path, manifest: Manifest) -> None:
    """That damage to a file is told, with the file, by all who read it."""
    store, name = _reopened(folder), damaged.name
    assert any(name in problem for problem in store.verify())
    if name == manifest.name.rpartition("/")[2]:
        found = store.manifests()
        assert manifest.id not in [each.id for each in found.manifests]
        assert any(name in problem for problem in found.problems)
        return
    assert store.manifests().manifests[0] == manifest
    if name in {file.name.rpartition("/")[2] for layer in manifest.layers for file in layer.records}:
        with pytest.raises(CheckpointDamaged, match=name):
            list(store.records(manifest))
        return
    if name in {file.name.rpartition("/")[2] for file in manifest.dirty}:
        with pytest.raises(CheckpointDamaged, match=name):
            store.dirty(manifest)
        return
    with pytest.raises(CheckpointDamaged, match=name):
        loaded(store, manifest)
    with pytest.raises(CheckpointDamaged, match=name):
        list(store.rows_of(manifest))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _chunk_starts(path: Path) -> list[int]:
    """Where the chunks of a file begin."""
    starts, content = [0], path.read_bytes()
    with path.open("rb", buffering=0) as file:
        for _ in read_chunks(path.name, file, len(content)):
            starts.append(file.tell())
    return starts[:-1]


def _regions(path: Path) -> Iterator[int]:
    """Some bytes of each part of a file."""
    size = path.stat().st_size
    if path.suffix == ".json":
        yield from (0, 20, 22, 30, 53, 54, 55, size // 2, size - 1)
        return
    for start in _chunk_starts(path):
        header = range(start, start + 24)
        yield from (*header, start + 25, start + 33, start + 60)
    # The message with the rows and the checksum, wherever they begin.
    yield from range(70, size, 37)
    yield from range(size - 12, size)


def test_any_flipped_bit_is_found_and_named(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    for path in _files(folder):
        content = path.read_bytes()
        for number, at in enumerate(_regions(path)):
            flipped = bytearray(content)
            flipped[at] ^= 1 << (number % 8)
            path.write_bytes(flipped)
            store = _reopened(folder)
            assert any(path.name in problem for problem in store.verify()), (path.name, at)
        _check_found(folder, path, newest) if newest.id in path.name else None
        path.write_bytes(content)
    assert same(loaded(_reopened(folder), newest), world.held[newest.id])


@pytest.mark.nightly
def test_every_flipped_bit_is_found(folder: Path, newest: Manifest) -> None:
    store = _reopened(folder)
    for path in _files(folder):
        content = path.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(flipped)
            if path.suffix == ".json":
                found = store.manifests()
                assert len(found.manifests) == 1, bit
                assert path.name in found.problems[0]
                continue
            with path.open("rb", buffering=0) as file, pytest.raises(CheckpointDamaged, match=path.name):
                list(read_chunks(str(path), file, len(content)))
        path.write_bytes(content)
    assert store.verify() == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _cut_after_a_chunk(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: _chunk_starts(path)[-1]])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _repeat(path: Path) -> None:
    path.write_bytes(2 * path.read_bytes())


def _swap_chunks(path: Path) -> None:
    content, starts = path.read_bytes(), _chunk_starts(path)
    end = starts[2] if len(starts) > 2 else len(content)
    path.write_bytes(content[starts[1] : end] + content[: starts[1]] + content[end:])


@pytest.mark.parametrize("harm", [_cut, _cut_after_a_chunk, _lengthen, _repeat, _swap_chunks, Path.unlink])
def test_other_harm_is_found_and_named(folder: Path, newest: Manifest, harm: Callable[[Path], None]) -> None:
    path = next(each for each in _files(folder / MODEL / "data") if len(_chunk_starts(each)) > 1)
    harm(path)
    _check_found(folder, path, newest)


def test_swapped_files_are_found_and_named(folder: Path, world: Checkpointed) -> None:
    world.model.add("large", 1000, 4)
    world.model.change("large", 1.0)
    made = world.write()
    by_size = sorted(made.files, key=lambda file: file.bytes)
    first, second = next(pair for pair in pairwise(by_size) if pair[0].bytes == pair[1].bytes)
    for one, other in ((first, second), (second, first)):
        (folder / one.name).rename(folder / "away")
        (folder / other.name).rename(folder / one.name)
        (folder / "away").rename(folder / other.name)
        if one is first:
            assert [
                name in problem for name, problem in zip((first.name, second.name), _problems(folder), strict=True)
            ]
            _check_found(folder, folder / first.name, made)
    assert same(loaded(_reopened(folder), made), world.held[made.id])


def _problems(folder: Path) -> list[str]:
    return sorted(_reopened(folder).verify())


class Unchecked(StampedTable):
    """Reads damaged rows."""

    def check(self, ids: Ids, rows: Values) -> None:
        pass


def test_rows_that_do_not_fit_their_digests_are_not_loaded(world: Checkpointed) -> None:
    world.model.replace("user", Unchecked)
    _, table = world.model.tables["user"]
    row = int(table.changed_since(0)[-1])
    table.rows[row, 0] += 1
    made = world.write()
    with pytest.raises(CheckpointDamaged, match=f"row {row} of table 'user' does not match its digest"):
        loaded(world.store, made)


def test_tables_with_another_checksum_are_not_loaded(world: Checkpointed) -> None:
    made = world.write()
    entry = made.tables[0]
    other = replace(made, tables=[replace(entry, checksum=entry.checksum ^ 1), *made.tables[1:]])
    with pytest.raises(CheckpointDamaged, match=f"table 'user' has checksum {entry.checksum:016x}"):
        loaded(world.store, other)
    other = replace(made, tables=[replace(entry, record={**entry.record, "rows": 10}), *made.tables[1:]])
    with pytest.raises(CheckpointDamaged, match="row ids of a checkpoint must ascend within 0 to 9"):
        loaded(world.store, other)


def test_a_manifest_under_another_name_is_found(folder: Path, newest: Manifest) -> None:
    path = folder / newest.name
    later = path.with_name("9" + path.name[1:])
    path.rename(later)
    found = _reopened(folder).manifests()
    assert len(found.manifests) == 1
    assert any(later.name in problem for problem in found.problems)


def test_a_manifest_of_a_later_format_says_to_update(folder: Path, world: Checkpointed) -> None:
    world.model.change("user", 0.1)
    later = world.write()
    _, _, body = (folder / later.name).read_bytes().partition(b"\n")
    head = f"deltasync checkpoint 2 {xxhash.xxh3_128_hexdigest(body, 2)}\n"
    (folder / later.name).write_bytes(head.encode() + body)
    with pytest.raises(LaterFormat, match=f"{later.id}.*update deltasync"):
        _reopened(folder).manifests()
    # Nor is anything removed that only a later deltasync knows the use of.
    with pytest.raises(StorageFailed, match="update deltasync"):
        _reopened(folder).remove_old(1)
    assert all((folder / file.name).exists() for file in later.files)


def test_damaged_files_are_not_built_upon(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    path = folder / newest.files[0].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert world.store.verify()
    world.model.change("user", 0.02)
    made = world.write()
    assert len(made.layers) == 1
    assert same(loaded(_reopened(folder), made), world.held[made.id])


def test_missing_files_are_not_built_upon(folder: Path, world: Checkpointed, newest: Manifest) -> None:
    (folder / newest.files[0].name).unlink()
    world.model.change("user", 0.02)
    made = world.write()
    assert len(made.layers) == 1
    assert same(loaded(_reopened(folder), made), world.held[made.id])
