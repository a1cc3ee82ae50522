"""Replicas that return from far behind, read slowly, or not at all: bounded room, and nobody else is delayed."""

import gc
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.fleet import Recorder, Trainer, admin_of, follow, wait_for_lag
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream, ack, size_of

from deltasync.client import Position, TableSpec
from deltasync.feeds.frozen_release import FrozenRelease, freeze
from deltasync.v1 import subscribe_pb2

VERSIONS = 50
TABLE = TableSpec("user", 20_000, 16)  # Two chunks and a half.
BYTES = TABLE.rows * TABLE.row_bytes
PAGE = 4096


class Files:
    """Releases in files that nobody sees: how many bytes, as the system has them.

    Attributes:
        made: how many were made.
        most: the most bytes at any time.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.made = self.most = 0
        models = re.escape(str(folder / "models"))
        self._file = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* {models}.*\(deleted\)$", re.MULTILINE)
        patch.setattr("deltasync.feeds.releases.RELEASES_IN_MEMORY_BYTES", 0)
        patch.setattr("deltasync.feeds.releases.freeze", self._freeze)

    def _freeze(self, *arguments: Any) -> FrozenRelease:
        release = freeze(*arguments)
        self.made += 1
        self.most = max(self.most, self.now)
        return release

    @property
    def now(self) -> int:
        gc.collect()
        found = self._file.findall(Path("/proc/self/maps").read_text())
        return sum(int(end, 16) - int(start, 16) - PAGE for start, end in found)


@pytest.fixture
def files(running: RunningService, monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch, running.options.service.data_dir)


@pytest.fixture
def trainer(running: RunningService) -> Iterator[Trainer]:
    with Trainer(running.grpc, [TABLE]) as trainer:
        trainer.publish_all()
        yield trainer


def returned(stack: ExitStack, running: RunningService, name: str, held: Position, rows: np.ndarray) -> Recorder:
    """A replica that comes back with what it held."""
    target = Recorder()
    target.tables = {TABLE.name: rows}
    stack.enter_context(follow(running, "predictors", name, target, held=held))
    return target


def test_a_fleet_that_returns_at_fifty_versions_takes_twice_the_tables_at_most(
    running: RunningService, files: Files, trainer: Trainer
) -> None:
    """One of which reads a chunk, and no more for now."""
    before: list[tuple[Position, np.ndarray]] = []
    for _ in range(VERSIONS):
        head = trainer.change(2_000)
        before.append((head, trainer.rows[TABLE.name].copy()))
    with ExitStack() as stack, ReplicaStream(running.grpc, replica="slow", budget=1) as slow:
        first = slow.until("chunk").rows
        made = files.made
        targets = [
            returned(stack, running, f"r{number}", held, rows.copy())
            for number, (held, rows) in enumerate(before[:-1])
        ]
        wanted = {f"r{number}" for number in range(VERSIONS - 1)}
        wait_for_lag(running, "predictors", lambda lag: _holding(lag, head.number) >= wanted)
        assert all(each.bytes() == trainer.expected() for each in targets)
        assert 0 < files.most <= 2 * BYTES
        assert files.made - made < VERSIONS / 2  # Most have shared one.
        for number, target in enumerate(targets):
            lacking = np.any(before[number][1] != trainer.rows[TABLE.name], axis=1).sum()
            assert target.received_rows <= 2 * lacking + 4 * 2_000  # Those of a few groups of versions.
        received = size_of([first])
        slow.send(ack(received))
        while (message := slow.receive()).WhichOneof("message") == "chunk":
            received += size_of([message.chunk.rows])
            slow.send(ack(received))
        assert message.release_end.position.version == head.number
        slow.send(ack(received, head))
        wait_for_lag(running, "predictors", lambda lag: "slow" in _holding(lag, head.number))
    assert _freed(files)


def _holding(lag: Any, version: int) -> set[str]:
    return {each["replica"] for each in lag["replicas"] if each["offset"] >= version}


def _freed(files: Files) -> bool:
    """They are freed in threads; the test's timeout bounds the wait."""
    while files.now:
        pass
    return True


@pytest.mark.nightly
def test_a_replica_that_takes_nothing_is_given_up_and_what_it_is_sent_freed(
    running: RunningService, files: Files, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that read a chunk and no more have all the room; who comes then waits, and lag says for what."""
    monkeypatch.setattr("deltasync.api.subscribe._WATCH_SECONDS", 0.02)
    with ReplicaStream(running.grpc, replica="s1", budget=1) as first:
        first.until("chunk")
        held = Position(trainer.publish_all().history, 1)  # What the first is sent does not serve it.
        with ReplicaStream(running.grpc, replica="s2", budget=1, held=held) as second, ExitStack() as stack:
            second.until("chunk")
            trainer.publish_all()
            target = Recorder()
            stack.enter_context(follow(running, "predictors", "waits", target))
            lag = wait_for_lag(running, "predictors", lambda lag: "wait for room on disk" in lag["reason"])
            (waiting,) = (each for each in lag["replicas"] if each["replica"] == "waits")
            assert (lag["state"], waiting["connected"]) == ("behind", True)
            assert re.fullmatch(rf"room on disk: .* take {2 * BYTES} bytes of files", waiting["waits_for"])
            (spilled,) = re.findall(r'deltasync_spilled_bytes\{model="clicks"\} (.*)', running.get("/metrics")[1])
            assert float(spilled) == 2 * BYTES
            monkeypatch.setattr("deltasync.api.sending.QUIET_SECONDS", 0.05)
            wait_for_lag(running, "predictors", lambda lag: "waits" in _holding(lag, 3))
            assert target.bytes() == trainer.expected()
            for given_up in (first, second):
                with pytest.raises(grpc.RpcError):
                    given_up.until("release_end")
        lag = running.get_json("/consumers/predictors/lag")
        assert [each["connected"] for each in lag["replicas"]][:2] == [False, False]
        assert all("taken nothing of its release for" in each["left"] for each in lag["replicas"][:2])
    assert files.most <= 2 * BYTES
    assert _freed(files)


def test_who_says_goodbye_in_the_middle_of_a_release_is_forgotten_and_the_room_freed(
    running: RunningService, files: Files, trainer: Trainer
) -> None:
    with ReplicaStream(running.grpc, replica="leaves", budget=1) as leaving:
        leaving.until("chunk")
        assert files.now
        leaving.send(subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(goodbye=True)))
        leaving.end()
        wait_for_lag(running, "predictors", lambda lag: not lag["replicas"])
        assert _freed(files)
    assert trainer.publish_all().number == 2


def test_a_pause_breaks_off_what_a_replica_is_sent_from_far_behind(
    running: RunningService, files: Files, trainer: Trainer
) -> None:
    """Though all of it is older than what the pause is for."""
    admin, target = admin_of(running), Recorder()
    with ReplicaStream(running.grpc, replica="slow", budget=1) as slow:
        received = size_of([slow.until("chunk").rows])
        trainer.publish_all()
        admin.pause_consumer("predictors", "nonsense")
        slow.send(ack(received))
        code, text = slow.refusal()
        assert code is grpc.StatusCode.ABORTED
        said = r"consumer 'predictors' is paused: reconnect \(paused since \S+ by admin token \(\S+\): nonsense\)"
        assert re.fullmatch(said, text)
        assert _freed(files)
        with follow(running, "predictors", "slow", target) as replica:
            lag = wait_for_lag(running, "predictors", lambda lag: lag["replicas"][0]["connected"])
            assert (lag["state"], lag["offset"]) == ("paused", 0)
            assert not replica.ready
            admin.resume_consumer("predictors")
            replica.wait_for(2, 20)
            assert target.bytes() == trainer.expected()
            assert [release.position.number for release in target.releases] == [2]
