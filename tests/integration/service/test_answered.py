"""Once a publisher has the answer to its cut, the next request shows that version, whatever it asks for."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.support.fleet import WAIT, admin_of
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream

from deltasync.client import Part, Policy, Position, Publisher, PublisherOptions, RowBatch, Shard, TableSpec

# The service takes longer to apply them than the next request takes to arrive.
WIDE = TableSpec("wide", 200_000, 32)
ROWS = RowBatch(Shard.whole(WIDE), np.arange(WIDE.rows), np.ones((WIDE.rows, WIDE.dim), "<f4"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that the tests share; each has a model and consumers of its own."""
    with RunningService(tmp_path_factory.mktemp("answered") / "data") as service:
        yield service


def published(service: RunningService, model: str) -> Position:
    options = PublisherOptions(service=service.grpc, model=model, run="r", run_started_unix_ns=1)
    with Publisher(options, [WIDE], [ROWS.shard]) as publisher:
        part = Part(step=1, step_end_unix_ns=time.time_ns(), rows=[ROWS], full=True)
        return publisher.publish(part).result(WAIT)


def lag_of(service: RunningService, consumer: str) -> tuple[int, int]:
    lag = service.get_json(f"/consumers/{consumer}")
    return lag["head"], lag["lag"]["rows"]


def lag(service: RunningService, model: str) -> object:
    return lag_of(service, model)


def new_consumer(service: RunningService, model: str) -> object:
    admin_of(service).create_consumer("late", model, Policy())
    return lag_of(service, "late")


def checkpoint(service: RunningService, model: str) -> object:
    return admin_of(service).make_checkpoint(model)["version"]


def kept_version(service: RunningService, model: str) -> object:
    return admin_of(service).keep_version(model, "good")["version"]


def rolled_back(service: RunningService, model: str) -> object:
    """A rollback publishes a version, too."""
    admin = admin_of(service)
    admin.keep_version(model, "good")
    return admin.roll_back(model, "good"), lag_of(service, model), admin.make_checkpoint(model)["version"]


def replica(service: RunningService, model: str) -> object:
    """A replica that believed in an older head would be ready with old rows."""
    with ReplicaStream(service.grpc, consumer=model) as stream:
        return stream.until("opened").head.version


def tables(service: RunningService, model: str) -> object:
    lines = service.get_json(f"/tables/{WIDE.name}")
    return [
        (line["head"], each["lag"]["rows"])
        for line in lines
        if line["model"] == model
        for each in line["consumers"]
    ]


def deletes(service: RunningService, model: str) -> object:
    return admin_of(service).delete_rows(model, WIDE.name, [1, 2])["rows"]


def models(service: RunningService, model: str) -> object:
    return next(line["head"] for line in service.get_json("/models") if line["model"] == model)


EVERY_ROW = 1, WIDE.rows
DOORS: dict[Callable[[RunningService, str], object], object] = {
    lag: EVERY_ROW,
    new_consumer: EVERY_ROW,
    checkpoint: 1,
    kept_version: 1,
    rolled_back: (2, (2, WIDE.rows), 2),
    replica: 1,
    tables: [EVERY_ROW],
    deletes: 2,
    models: 1,
}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_a_request_right_after_the_answer_shows_the_version(
    service: RunningService, door: Callable[[RunningService, str], object]
) -> None:
    model = door.__name__
    admin_of(service).create_consumer(model, model, Policy())
    assert published(service, model).number == 1
    assert door(service, model) == DOORS[door]
