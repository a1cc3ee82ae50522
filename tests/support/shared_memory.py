"""Mirrors in shared memory, releases for them, and their files."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.keyed_model import USER

from deltasync.client import Position, Release, RowBatch, Shard, SharedReader, SharedTarget, TableSpec
from deltasync.client.shared import layout


def release_of(version: int, *tables: TableSpec, **changed: Any) -> Release:
    """A release that sets all values of some tables, or of `USER`, to its version."""
    specs = list(tables) or [USER]
    rows = [
        RowBatch(Shard.whole(each), np.arange(each.rows), np.full((each.rows, each.dim), version, each.dtype))
        for each in specs
    ]
    release = Release(Position("h", version, version), version, version, version == 1, specs, rows)
    return replace(release, version=version, model="clicks", **changed)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory, for mirrors."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def mirror(folder: Path, **options: Any) -> SharedTarget:
    """A target of consumer `predictors` that fills the mirror `m`."""
    return SharedTarget("m", "predictors", directory=folder, **options)


def attached(folder: Path) -> SharedReader:
    """A reader of the mirror `m`."""
    return SharedReader("m", directory=folder)


def move(path: Path) -> None:
    """Move a folder."""
    path.rename(path.with_name("elsewhere"))


def remove_files(path: Path) -> None:
    """Remove all files of a folder."""
    for each in path.iterdir():
        each.unlink()


def header(folder: Path) -> NDArray[Any]:
    """The header [1] of the mirror `m`, to read and to write."""
    return np.memmap(layout.folder_of("m", folder) / layout.CONTROL, layout.HEADER, "r+", shape=1)


def served_side(folder: Path) -> NDArray[Any]:
    """The description [1] of the side that the mirror `m` serves, to read and to write."""
    offset = layout.side_offset(int(header(folder)["served"][0]))
    return np.memmap(layout.folder_of("m", folder) / layout.CONTROL, layout.SIDE, "r+", offset, 1)


def pins(folder: Path) -> list[int]:
    """The entries of the readers that pin a side of the mirror `m`, and live."""
    with (layout.folder_of("m", folder) / layout.READERS).open("rb") as file:
        entries = np.frombuffer(file.read(), layout.READER)
        return [each for each in np.flatnonzero(entries["side"]).tolist() if layout.is_locked(file.fileno(), each)]
