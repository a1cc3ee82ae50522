"""Checkpoints of small files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed

from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore


@pytest.fixture(autouse=True, scope="module")
def small_files() -> Iterator[None]:
    """Have many chunks and files of a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltasync.checkpoints.chunks.FILE_BYTES", 2048)
        patch.setattr("deltasync.checkpoints.writing.CHUNK_BYTES", 512)
        patch.setattr("deltasync.checkpoints.writing.TURN_BYTES", 1024)
        yield


@pytest.fixture
def world(tmp_path: Path) -> Checkpointed:
    """A model with a table of 100 rows and a view of it, and checkpoints in a folder."""
    world = Checkpointed(CheckpointStore(MODEL, Place(str(tmp_path / "checkpoints"))))
    world.model.add("user", 100, 4)
    world.model.change("user", 0.5)
    view = world.add_view("mobile")
    view.add("user", 100, 3)
    view.change("user", 0.5)
    return world
