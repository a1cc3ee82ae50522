"""A worker's model answers from the shared memory of a mirror, at every version."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from deltasync.base.decision import Decision
from deltasync.client import (
    Position,
    Release,
    RowBatch,
    SharedReader,
    SharedReading,
    SharedTarget,
    TableKind,
    TableSpec,
    TornTarget,
)
from deltasync.client.shared import layout
from deltasync.core.tables import matrix_shape
from deltasync.trainer.example import workers
from deltasync.trainer.example.model import ClickBatch, ClickModel, outputs
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.predictor import batch_of
from deltasync.trainer.example.workers import MirroredModel

OPTIONS = ModelOptions(users=40, items=30, cross_buckets=10, dim=4, hidden=4)
EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2]}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def batch() -> ClickBatch:
    return batch_of(json.dumps({"events": [EVENT]}).encode(), OPTIONS.ids)


class Mirror:
    """A mirror of a model that changes with every release."""

    def __init__(self, folder: Path, longest_pin_seconds: float = 600.0) -> None:
        self.model = ClickModel(OPTIONS).eval()
        self.target = SharedTarget("m", "predictors", directory=folder, longest_pin_seconds=longest_pin_seconds)
        self.attach = partial(SharedReader, "m", directory=folder)

    def apply(self, number: int, *, resync: bool = False) -> None:
        with torch.no_grad():
            for each in self.model.parameters():
                each.normal_()
        rows = list[RowBatch]()
        for name, each in self.model.named_parameters():
            kind = TableKind.EMBEDDING if "embedding_bags" in name else TableKind.PARAMETER
            count, dim = matrix_shape(each.shape)
            table = TableSpec(name.removesuffix(".weight") if kind.ranked else name, count, dim, kind=kind)
            rows.append(
                RowBatch.of_table(table, np.arange(count), each.detach().numpy().reshape(count, dim).copy())
            )
        self.target.apply(
            Release(
                position=Position("h", number, number),
                step=number,
                step_end_unix_ns=number,
                resync=resync,
                tables=[each.table for each in rows],
                rows=rows,
                version=number,
                model="clicks",
            )
        )

    def scores(self, batch: ClickBatch) -> torch.Tensor:
        return outputs(self.model, batch)


def test_a_repair_at_the_same_position_is_answered_from_its_own_side(
    folder: Path, batch: ClickBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, used = Mirror(folder), list[dict[str, torch.Tensor]]()
    mirror.apply(1, resync=True)
    worker = MirroredModel(mirror.attach, OPTIONS)

    def noted_call(model: ClickModel, tensors: dict[str, torch.Tensor], arguments: tuple[ClickBatch]) -> object:
        used.append(tensors)
        return functional_call(model, tensors, arguments)

    monkeypatch.setattr(workers, "functional_call", noted_call)
    for position, resync in ((1, False), (1, False), (1, True), (1, False), (2, False), (2, True)):
        mirror.apply(position, resync=resync)
        with torch.inference_mode():
            scores, reading = worker.scores(batch)
        assert torch.equal(scores, mirror.scores(batch))
        assert isinstance(reading, SharedReading)
        pinned = {rows.__array_interface__["data"][0] for rows in reading.tables.values()}
        assert {each.data_ptr() for each in used[-1].values()} == pinned
    mirror.target.close()


def test_an_answer_that_took_too_long_is_made_once_more(
    folder: Path, batch: ClickBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, during = Mirror(folder, longest_pin_seconds=0.01), [[2, 3], []]
    mirror.apply(1, resync=True)
    worker = MirroredModel(mirror.attach, OPTIONS)

    def slow_call(*arguments: object) -> object:
        """A forward during which releases come, which write over its rows."""
        for version in during.pop(0):
            mirror.apply(version)
        return functional_call(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "functional_call", slow_call)
    with torch.inference_mode():
        scores, reading = worker.scores(batch)
        assert reading.version == 3
        assert torch.equal(scores, mirror.scores(batch))
        during += [[4, 5], [6, 7]]
        with pytest.raises(TornTarget):
            worker.scores(batch)
    mirror.target.close()


def test_a_worker_attaches_again_when_its_mirror_was_made_anew(folder: Path, batch: ClickBatch) -> None:
    first = Mirror(folder)
    first.apply(1, resync=True)
    first.target.note_readiness(Decision(True, "it has caught up"))
    worker = MirroredModel(first.attach, OPTIONS)
    assert worker.ready
    first.target.close()
    shutil.rmtree(layout.folder_of("m", folder))
    assert not worker.ready
    second = Mirror(folder)
    second.apply(5, resync=True)
    second.target.note_readiness(Decision(True, "it has caught up"))
    assert worker.ready
    assert worker.newest().version == 5
    with torch.inference_mode():
        assert torch.equal(worker.scores(batch)[0], second.scores(batch))
    second.target.close()
