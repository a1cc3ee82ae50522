"""kill -9 of the service, again and again, while two ranks publish and two replicas follow."""

import random
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import admin_of, follow, wait_until_in_sync
from tests.support.process import ServiceProcess
from tests.support.state import lag_of
from tests.support.wire import block

from deltasync.client import (
    NumpyTarget,
    Part,
    Position,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    Subscriber,
    TableSpec,
)
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions

WAIT = 60
TABLES = [
    TableSpec("rowwise", 5000, 16),
    TableSpec("columnwise", 3000, 8, np.dtype("<f2")),
    TableSpec("replicated", 50, 4),
]
SHARDS = [
    [Shard(TABLES[0], 0, 2000, 0, 16), Shard(TABLES[1], 0, 3000, 0, 3), Shard.whole(TABLES[2])],
    [Shard(TABLES[0], 2000, 3000, 0, 16), Shard(TABLES[1], 0, 3000, 3, 5), Shard.whole(TABLES[2])],
]


class Trainer:
    """Two ranks that change some rows in every step and publish them, until told to stop."""

    def __init__(self, address: str) -> None:
        self.rows = [np.zeros((table.rows, table.dim), table.dtype) for table in TABLES]
        self.acknowledged: list[Position] = []
        self.moved = threading.Condition()
        self._rng = np.random.default_rng(1)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._ranks = [
            Publisher(
                PublisherOptions(
                    service=address, model="clicks", run="r", run_started_unix_ns=1, rank=rank, world_size=2
                ),
                TABLES,
                shards,
            )
            for rank, shards in enumerate(SHARDS)
        ]
        self._thread = threading.Thread(target=self._run, name="trainer")
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT)
        for rank in self._ranks:
            rank.close()
        if self._failure:
            raise self._failure

    def wait_for(self, count: int) -> None:
        """Wait until so many versions are acknowledged."""
        with self.moved:
            assert self.moved.wait_for(lambda: self._failure or len(self.acknowledged) >= count, WAIT)
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            step = 0
            while not self._stopping.is_set():
                step += 1
                self._step(step)
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            with self.moved:
                self._failure = error
                self.moved.notify_all()

    def _step(self, step: int) -> None:
        changed = []
        for table, rows in zip(TABLES, self.rows, strict=True):
            ids = np.arange(table.rows) if step == 1 else np.unique(self._rng.integers(0, table.rows, 200))
            rows[ids] = self._rng.normal(size=(len(ids), table.dim)).astype(table.dtype)
            changed.append(ids)
        sealed: list[Future[Position]] = []
        for rank, shards in zip(self._ranks, SHARDS, strict=True):
            part = Part(step=step, step_end_unix_ns=time.time_ns(), full=step == 1)
            for slot, (shard, ids) in enumerate(zip(shards, changed, strict=True)):
                ours = ids[(ids >= shard.row_offset) & (ids < shard.row_offset + shard.rows)]
                values = block(self.rows[slot], shard)[ours - shard.row_offset]
                part.rows.append(RowBatch(shard, ours, values))
            sealed.append(rank.publish(part))
        first, second = (each.result(WAIT) for each in sealed)
        assert first == second
        with self.moved:
            self.acknowledged.append(first)
            self.moved.notify_all()


def offsets_are_what_was_applied(service: ServiceProcess, replicas: list[Subscriber]) -> None:
    """The offset is read first: what a replica holds only grows."""
    lag = lag_of(service)
    offsets = {line["replica"]: line["offset"] for line in lag["replicas"]}
    for name, offset in offsets.items():
        assert offset <= replicas[int(name[1:])].held.number
    assert lag["offset"] == min(offsets.values())


@pytest.mark.parametrize(
    ("options", "kills"),
    [
        ((), 2),
        pytest.param((), 6, marks=pytest.mark.nightly),
        pytest.param(("--table-memory", "{}/scratch"), 2, marks=pytest.mark.nightly),
    ],
    ids=["memory", "more kills", "files"],
)
def test_nothing_acknowledged_is_lost(tmp_path: Path, options: tuple[str, ...], kills: int) -> None:
    rng = random.Random(5)
    # A checkpoint, and the log cut, at every occasion.
    arguments = "--consumer", "predictors=clicks", "--checkpoint-bytes", "1"
    service = ServiceProcess(tmp_path / "data", *arguments, *(each.format(tmp_path) for each in options))
    targets = [NumpyTarget(), NumpyTarget()]
    with service:
        replicas = [follow(service, "predictors", f"p{number}", target) for number, target in enumerate(targets)]
        trainer = Trainer(service.grpc)
        trainer.wait_for(1)
        for replica in replicas:
            replica.wait_for(1, WAIT)
        for _ in range(kills):
            trainer.wait_for(len(trainer.acknowledged) + 2)
            # A checkpoint comes once a second: some kills are to come while it is written, others after it.
            time.sleep(rng.uniform(0, 1.2))
            offsets_are_what_was_applied(service, replicas)
            before = len(trainer.acknowledged)
            service.kill()
            service.start()
            assert lag_of(service)["head"] >= before
            offsets_are_what_was_applied(service, replicas)
        trainer.wait_for(len(trainer.acknowledged) + 2)
        trainer.stop()
        head = trainer.acknowledged[-1]
        # No version was skipped, none given twice.
        assert [each.number for each in trainer.acknowledged] == list(range(1, head.number + 1))
        assert {each.history for each in trainer.acknowledged} == {head.history}
        late = NumpyTarget()
        replicas.append(follow(service, "predictors", "p2", late))
        for replica, target in zip(replicas, [*targets, late], strict=True):
            assert replica.wait_for(head.number, WAIT) == head
            for table, rows in zip(TABLES, trainer.rows, strict=True):
                assert target.tables[table.name].tobytes() == rows.tobytes()
        wait_until_in_sync(service, "predictors", head, len(replicas))
        assert {line["offset"] for line in lag_of(service)["replicas"]} == {head.number}
        for replica in replicas:
            replica.close()
        for _ in range(2):  # Some kills may have come before the second one.
            admin_of(service).make_checkpoint("clicks")
        assert service.terminate() == 0
    # The log was cut: most cuts of so many would be in it otherwise.
    log = LmdbStore(LogOptions(directory=tmp_path / "data" / "log"))
    assert not list(log.read("cuts/clicks", 1, 1))
    log.close()
