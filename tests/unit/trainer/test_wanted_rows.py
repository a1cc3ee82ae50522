"""Rows that the service has lost are published again, by a trainer whose publisher is a stand-in."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.embedding_parameters import embedding_parameters
from torch import nn

from deltasync.client import Connection, Part, Position
from deltasync.core.delete_request import DeleteRequest
from deltasync.core.rows import Ids
from deltasync.trainer import run as trainer_run
from deltasync.trainer.row_requests import WantedRows
from deltasync.trainer.sync import DeltaSync, SyncOptions

Answer = tuple[tuple[str, Ids], ...]


def answer(*ids: int) -> Answer:
    return (("t", np.array(ids)),) if ids else ()


class AnsweringPublisher:
    """Seals each part at once. `always` is wanted with each answer."""

    parts: list[Part]
    always: tuple[int, ...] = ()
    connection = Connection(True, 0, 0.0, 0, "")

    def __init__(self, *_: Any) -> None:
        self.deletes: tuple[DeleteRequest, ...] = ()
        self.parts, self.wanted = [], answer()

    def publish(self, part: Part) -> "Future[Position]":
        self.parts.append(part)
        assert len(self.parts) < 10, "it goes on for ever"
        self.wanted = answer(*self.always)
        sealed: Future[Position] = Future()
        sealed.set_result(Position("a" * 32, len(self.parts)))
        return sealed

    def close(self) -> None:
        pass


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.arange(1.0, 9.0).view(4, 2))


@pytest.fixture
def model() -> Rows:
    return Rows()


@pytest.fixture
def sync(model: Rows, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeltaSync]:
    monkeypatch.setattr(trainer_run, "Publisher", AnsweringPublisher)
    with embedding_parameters():
        sync = DeltaSync(model, SyncOptions(service="localhost:1", model="m", publish_every=1))
    sync.flush()
    yield sync
    sync.abort()


def publisher_of(sync: DeltaSync) -> Any:
    return sync._run.publisher


def published(part: Part) -> list[tuple[bool, list[int]]]:
    """Whether they are deletes, and ids."""
    return [(rows.deleted, rows.ids.tolist()) for rows in part.rows]


def test_they_come_with_the_next_cut(sync: DeltaSync) -> None:
    publisher_of(sync).wanted = answer(1, 3)
    sync.step()
    sync.flush()
    assert [published(part) for part in publisher_of(sync).parts[1:]] == [[(False, [1, 3])]]


def test_a_row_that_was_deleted_meanwhile_stays_deleted(sync: DeltaSync) -> None:
    publisher_of(sync).wanted = answer(1, 2)
    sync.delete("t", torch.tensor([1]))
    sync.flush()
    assert [published(part) for part in publisher_of(sync).parts[1:]] == [[(False, [2]), (True, [1])]]


def test_a_service_that_wants_a_row_with_each_answer_is_given_it_once_by_a_flush(
    sync: DeltaSync, model: Rows
) -> None:
    publisher = publisher_of(sync)
    publisher.always = (1,)
    for _ in range(2):
        model.t.data[3] += 1
        sync.step()
        sync.flush()
    assert [published(part) for part in publisher.parts[1:]] == [
        [(False, [3])],
        [(False, [1])],
        [(False, [1, 3])],
    ]


def taken(rows: WantedRows, wanted: Answer, *, again: bool = False) -> list[int]:
    return [row for ids in rows.take(wanted, again=again).values() for row in ids.tolist()]


def test_what_is_due_of_an_answer() -> None:
    rows, first = WantedRows(), answer(1, 2)
    assert taken(rows, first, again=True) == [1, 2]
    assert taken(rows, first, again=True) == taken(rows, first) == []
    assert taken(rows, answer(2, 3)) == [3]
    assert taken(rows, answer(2, 3)) == taken(rows, answer()) == taken(rows, answer(1)) == []
    assert taken(rows, answer(2, 3), again=True) == [2, 3]
    assert taken(rows, answer(1, 3)) == [1], "what an earlier answer wanted counts no longer"
