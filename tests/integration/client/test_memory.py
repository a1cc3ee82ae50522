"""A replica takes the memory of its tables, and not that of the release that brought them."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.fleet import WAIT, Trainer, wait_for_lag
from tests.support.programs import run_program
from tests.support.proxy import Proxy
from tests.support.server import RunningService
from torch import nn

from deltasync.client import (
    KeyedTarget,
    NumpyTarget,
    Release,
    Subscriber,
    SubscriberOptions,
    TableKind,
    TableSpec,
    TornTarget,
)
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.rows import Values
from deltasync.core.tables import FREE_ID

LARGE = TableSpec("large", 800_000, 64)  # 205 MB; what the library itself imports and compiles takes 130 MB.

_REPLICA = """
import os, sys, time
from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before, target = resident(), NumpyTarget(reads="copies")  # It takes a release whole.
with Subscriber(SubscriberOptions(service=sys.argv[1], consumer="predictors", replica="a"), target) as replica:
    replica.wait_for(1, 60)
    replica.wait_until_ready(60)
    deadline = time.monotonic() + 20
    while (resident() - before) / target.tables["large"].nbytes > 3:
        assert time.monotonic() < deadline, (resident() - before) / target.tables["large"].nbytes
        time.sleep(0.05)
"""


@pytest.mark.nightly
def test_memory_of_a_large_release_is_given_back(running: RunningService) -> None:
    with Trainer(running.grpc, [LARGE]) as trainer:
        trainer.rows["large"] = np.ones((LARGE.rows, LARGE.dim), np.float32)
        trainer.publish_all()
    done = run_program(sys.executable, "-c", _REPLICA, running.grpc)
    assert done.returncode == 0, done.stderr


USER = TableSpec("user", 24_000, 64)  # 6 MB, seven chunks.
OVER = TableSpec("over.weight", 3, 64, kind=TableKind.PARAMETER)
RAW_IDS = TableSpec("user.raw_ids", USER.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
PART_BYTES = 1 << 20  # What a replica of so many outstanding bytes takes at a time.
CHUNK_BYTES = 1_000_000


class Model(nn.Module):
    """A predictor's."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.over = nn.EmbeddingBag(USER.rows, USER.dim), nn.Linear(64, 3, bias=False)


@pytest.fixture
def trainer(running: RunningService) -> Iterator[Trainer]:
    """One that has published tables which are large for these replicas."""
    with Trainer(running.grpc, [USER, OVER, RAW_IDS]) as trainer:
        trainer.rows[RAW_IDS.name] = 1 + (np.arange(USER.rows)[:, None] << 20)
        trainer.publish_all()
        yield trainer


class Watched:
    """A subscriber of few outstanding bytes.

    Attributes:
        releases: what its target is given.
        seen: what readers get after each of them.
        ready: whether it was ready then.
    """

    def __init__(self, target: Any, service: str, cut_after: int = 0) -> None:
        """Cut the stream after so many releases."""
        self.releases, self.seen, self.ready = list[Release](), list[str](), list[bool]()
        self._proxy, self._made, write = Proxy(service), threading.Event(), target.apply

        def apply(release: Release) -> None:
            assert self._made.wait(WAIT)
            write(release)
            self.releases.append(release)
            self.seen.append(read(target))
            self.ready.append(self._subscriber.ready)
            if len(self.releases) == cut_after:
                self._proxy.cut()

        target.apply = apply
        options = SubscriberOptions(
            service=self._proxy.address,
            consumer="predictors",
            replica="a",
            max_outstanding_bytes=PART_BYTES // 4,
        )
        self._subscriber = Subscriber(options, target)
        self._made.set()

    def __enter__(self) -> Subscriber:
        return self._subscriber

    def __exit__(self, *_: object) -> None:
        self._subscriber.close()
        self._proxy.close()


def read(target: Any) -> str:
    """The version that a reader gets, or why none."""
    try:
        with target.reading() as reading:
            return f"version {reading.version}"
    except TornTarget as error:
        return str(error)


def held(target: Any) -> dict[str, Values]:
    """The rows of the tables with values."""
    if isinstance(target, TorchTarget):
        return {name: rows.numpy() for name, rows in target.tables().items()}
    with target.reading() as reading:
        if isinstance(target, NumpyTarget):
            return {name: reading.tables[name].copy() for name in (USER.name, OVER.name)}
        ids = np.arange(USER.rows)
        return {
            USER.name: reading.tables[USER.name].lookup((1 + (ids << 20)) ^ FREE_ID)[0],
            OVER.name: reading.tables[OVER.name].lookup(np.arange(OVER.rows))[0],
        }


def target_of(kind: str, reads: Reads = "pause") -> Any:
    if kind == "torch":
        return TorchTarget(Model().eval(), leave_out=["user.raw_ids"], reads=reads)
    return NumpyTarget(reads=reads) if kind == "numpy" else KeyedTarget(reads=reads)


@pytest.mark.parametrize("kind", ["numpy", "torch", "keyed"])
@pytest.mark.parametrize("cut_after", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_a_first_copy_is_written_in_parts_and_read_when_complete(
    running: RunningService, trainer: Trainer, kind: str, cut_after: int
) -> None:
    """Also where the stream breaks meanwhile: the next one begins with nothing."""
    target = target_of(kind)
    watched = Watched(target, running.grpc, cut_after)
    with watched as subscriber:
        subscriber.wait_until_ready(WAIT)
        state = "partial" if kind == "torch" else "in sync"
        wait_for_lag(running, "predictors", lambda lag: lag["state"] == state and lag["replicas"][0]["checked"])
    *parts, last = watched.releases
    waiting = [sum(rows.nbytes for rows in part.rows) for part in watched.releases]
    assert max(waiting) < PART_BYTES + CHUNK_BYTES
    assert len(parts) == 3 + cut_after
    assert [part.more for part in watched.releases] == [True] * len(parts) + [False]
    assert [number for number, part in enumerate(watched.releases) if not part.continues] == [
        0,
        *([cut_after] if cut_after else []),
    ]
    assert {rows.table.name for part in parts for rows in part.rows} == {USER.name}
    *refused, whole = watched.seen
    assert set(refused) == {
        "the target has part of a first copy, which is still arriving or was interrupted: wait until "
        "the subscriber is ready, or start another one"
    }
    assert (whole, last.version) == ("version 1", 1)
    assert not any(watched.ready)
    for name, rows in held(target).items():
        assert rows.tobytes() == trainer.rows[name].tobytes()


@pytest.mark.parametrize("reads", ["pause", "copies"])
def test_readable_rows_are_kept_until_a_first_copy_is_complete(
    running: RunningService, trainer: Trainer, reads: Reads
) -> None:
    """Of a module that was loaded and is read without a pause, and of one that a replica held before."""
    target = target_of("torch", reads)
    if reads == "pause":
        options = SubscriberOptions(service=running.grpc, consumer="predictors", replica="a")
        with Subscriber(options, target) as earlier:
            earlier.wait_for(1, WAIT)
    before, watched = read(target), Watched(target, running.grpc)
    with watched as subscriber:
        subscriber.wait_until_ready(WAIT)
    assert before.startswith("no release has arrived yet" if reads == "copies" else "version 1")
    assert ([each.more for each in watched.releases], watched.seen) == ([False], ["version 1"])
    assert torch.equal(target.tables()[USER.name], torch.from_numpy(trainer.rows[USER.name]))
