"""Checkpoints of small files."""

from pathlib import Path

import pytest
from tests.support.checkpointed import MODEL, Checkpointed

from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore


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
