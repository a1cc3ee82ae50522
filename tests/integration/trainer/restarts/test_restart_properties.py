"""A trainer of one rank, its checkpoints and a service, with crashes and copies put back: in the end the service
has the rows of the trainer, and only rows that may differ were sent.
"""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.integration.trainer.following import WAIT, expect
from tests.support.embeddings import embedding
from tests.support.examples import examples
from tests.support.server import RunningService
from torch import nn

from deltasync.trainer.sync import DeltaSync, SyncOptions

ROWS = 24


class Rows(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.t = embedding(torch.arange(2.0 * ROWS).view(ROWS, 2))
        self.register_buffer("seen", torch.zeros(1))


class Scenario:
    """An event is what it touches: names of tables and rows. Up to `_equal` of them, the service surely has what
    the trainer holds.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self._service = self._start()
        self._events: list[set[tuple[str, int]]] = []
        self._equal = 0
        self._value = 1000.0
        self._checkpoint: tuple[Any, Any, int] | None = None
        self._backup: int | None = None
        self._known = False  # The run is one that the service put back knows; another one is asked for every row.
        self._parted = False  # The checkpoint is of a version that the service may have lost and written anew.
        self._begin()

    def _start(self) -> RunningService:
        service = RunningService(self._folder / "data", grpc_port=self._port)
        service.start()
        self._port = int(service.grpc.rpartition(":")[2])
        return service

    def _begin(self) -> None:
        self._known = False
        self.model = Rows()
        options = SyncOptions(service=self._service.grpc, model="clicks", publish_every=1)
        self.sync = DeltaSync(self.model, options)

    def train(self, ids: list[int]) -> None:
        self._value += 1
        with torch.no_grad():
            self.model.t.weight[ids] = self._value
            self.model.seen += 1
        self.sync.tracker.mark("t", torch.tensor(ids))
        self._events.append({("t", row) for row in ids} | {("seen", 0)})
        self.sync.step()

    def delete(self, ids: list[int]) -> None:
        self.sync.delete("t", torch.tensor(ids))
        self._events.append({("t", row) for row in ids})

    def flush(self) -> None:
        self.sync.flush(WAIT)
        self._equal = len(self._events)

    def save(self) -> None:
        self._checkpoint = copy.deepcopy(self.model.state_dict()), self.sync.state_dict(), self._equal
        self._parted = False

    def crash(self) -> None:
        """Every row of a trainer without a checkpoint, otherwise the rows that may differ."""
        self.sync.abort()
        self._begin()
        may_differ = (ROWS + 1) if self._parted else None
        if self._checkpoint:
            weights, state, equal = self._checkpoint
            self.model.load_state_dict(weights)
            self.sync.load_state_dict([state])
            self._equal = min(self._equal, equal)
            may_differ = may_differ or self._count_touched()
        self.flush()
        if may_differ is not None:
            assert self.sync.stats.rows <= may_differ

    def back_up(self) -> None:
        self.flush()
        self._service.stop()
        shutil.rmtree(self._folder / "backup", ignore_errors=True)
        shutil.copytree(self._folder / "data", self._folder / "backup")
        self._backup, self._known = len(self._events), True
        self._service = self._start()

    def put_back(self) -> None:
        if self._backup is None:
            return
        self.flush()
        before = self.sync.stats.rows
        self._service.stop()
        shutil.rmtree(self._folder / "data")
        shutil.copytree(self._folder / "backup", self._folder / "data")
        self._service = self._start()
        self._equal = self._backup
        self._parted = self._checkpoint is not None
        self.train([0])
        may_differ = self._count_touched() if self._known else ROWS + 1
        self.flush()
        assert self.sync.stats.rows - before <= 2 * may_differ, "a part may have been sent before"
        self.check()

    def check(self) -> None:
        expect(self._service, self.sync, self.model)

    def close(self) -> None:
        self.sync.abort()
        self._service.stop()

    def _count_touched(self) -> int:
        return len(set[tuple[str, int]]().union(*self._events[self._equal :]))


@contextmanager
def scenario() -> Iterator[Scenario]:
    with tempfile.TemporaryDirectory() as folder:
        playing = Scenario(Path(folder))
        try:
            yield playing
        finally:
            playing.close()


IDS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3, unique=True)
ACTIONS = st.one_of(
    st.tuples(st.just("train"), IDS),
    st.tuples(st.just("delete"), IDS),
    st.tuples(st.sampled_from(("flush", "save", "crash", "back_up", "put_back"))),
)
# Each starts and kills services: fewer than other tests try.
EXAMPLES = examples() // 5
TRAIN, MORE, DELETE = ("train", [3, 4]), ("train", [4, 5]), ("delete", [4, 6])


@pytest.mark.nightly
@settings(max_examples=EXAMPLES)
@given(st.lists(ACTIONS, min_size=6, max_size=12))
@example([TRAIN, ("save",), MORE, ("flush",), ("crash",)])
@example([TRAIN, ("save",), MORE, DELETE, ("flush",), ("crash",), MORE, ("crash",)])
@example([DELETE, ("save",), TRAIN, ("flush",), ("crash",)])
@example([TRAIN, ("back_up",), MORE, DELETE, ("flush",), ("put_back",)])
@example([TRAIN, ("back_up",), ("crash",), ("put_back",)])
@example([("save",), TRAIN, ("back_up",), ("crash",), ("put_back",)])
@example([("back_up",), TRAIN, ("flush",), MORE, ("save",), ("put_back",), ("crash",)])
@example([("back_up",), TRAIN, ("flush",), ("save",), MORE, ("put_back",), ("save",), DELETE, ("crash",)])
def test_in_the_end_the_service_has_what_the_trainer_holds(actions: list[tuple[Any, ...]]) -> None:
    with scenario() as playing:
        playing.flush()
        for name, *arguments in actions:
            getattr(playing, name)(*arguments)
        playing.check()
