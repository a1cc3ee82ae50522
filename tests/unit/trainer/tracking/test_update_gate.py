"""Reads and updates kept apart: threads here, the order of streams with stand-ins for those of a GPU."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.tracking.update_gate import UpdateGate

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def begun(gate: UpdateGate) -> UpdateGate:
    """A gate whose step has begun to change rows, in this thread."""
    gate.training_here()
    with gate:
        gate.updating = True
    return gate


def read(gate: UpdateGate, timeout_seconds: float | None = 10) -> str:
    with gate.reading(timeout_seconds):
        return "read"


class TestThreads:
    def test_the_thread_that_trains_reads_at_once(self) -> None:
        assert read(begun(UpdateGate(CPU)), 0) == "read"

    def test_another_waits_for_the_end_of_the_step(self, elsewhere: ThreadPoolExecutor) -> None:
        gate = begun(UpdateGate(CPU))
        with pytest.raises(DeltasyncError, match=r"has not ended within 0 s: call step\(\) after"):
            elsewhere.submit(read, gate, 0).result()
        waiting = elsewhere.submit(read, gate)
        gate.end_updates()
        assert waiting.result(10) == "read"

    def test_no_row_changes_while_another_reads(self, elsewhere: ThreadPoolExecutor) -> None:
        gate, reading, trying, finish = UpdateGate(CPU), threading.Event(), threading.Event(), threading.Event()
        order: list[str] = []

        def read_slowly() -> None:
            with gate.reading(10):
                reading.set()
                finish.wait(10)
                order.append("read")

        def update() -> None:
            trying.set()
            begun(gate)
            order.append("update")

        done = elsewhere.submit(read_slowly)
        assert reading.wait(10)
        with ThreadPoolExecutor(1) as training:
            updating = training.submit(update)
            assert trying.wait(10)
            assert not updating.done()
            finish.set()
        done.result(10)
        assert order == ["read", "update"]


@dataclass(frozen=True)
class Event:
    of: str
    position: int


@dataclass(eq=False)
class Stream:
    """Remembers what it was given to do, and what it waits for before."""

    name: str
    given: list[object] = field(default_factory=list)

    def record_event(self) -> Event:
        return Event(self.name, len(self.given))

    def wait_event(self, event: Event) -> None:
        self.given.append(event)

    def synchronize(self) -> None:
        self.given.append("host waits")

    def waits_for(self, work: str, other: "Stream") -> bool:
        """Whether everything given to it from now on comes after `work` of another."""
        return any(
            isinstance(event, Event) and event.of == other.name and other.given.index(work) < event.position
            for event in self.given
        )


@dataclass
class Cuda:
    """Stands in for torch.cuda: one current stream for each thread."""

    side: Stream = field(default_factory=lambda: Stream("side"))
    current: Stream = field(default_factory=lambda: Stream("training"))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    fake = Cuda()
    of_torch: Any = {"Stream": lambda _device: fake.side, "current_stream": lambda _device: fake.current}
    with mock.patch.multiple(torch.cuda, stream=fake.stream, **of_torch):
        yield fake


class TestStreams:
    def test_a_read_comes_after_the_step_and_the_next_step_after_the_read(self, cuda: Cuda) -> None:
        gate = begun(UpdateGate(torch.device("cuda")))
        cuda.current.given.append("step 1")
        gate.end_updates()
        with gate.reading(None):
            cuda.current.given.append("gather")
        assert cuda.side.waits_for("step 1", cuda.current)
        assert not cuda.current.waits_for("gather", cuda.side), "reading alone makes no training wait"
        begun(gate)
        assert cuda.current.waits_for("gather", cuda.side)
        assert "host waits" not in cuda.current.given + cuda.side.given

    def test_changes_that_pass_no_gate_come_after_a_read_that_is_only_launched(self, cuda: Cuda) -> None:
        gate = UpdateGate(torch.device("cuda"))
        with gate.reading(None):
            cuda.current.given.append("gather")
        gate.hold_changes()
        assert cuda.current.waits_for("gather", cuda.side)
        assert "host waits" not in cuda.current.given + cuda.side.given

    def test_a_read_by_the_training_thread_follows_the_work_it_launched(self, cuda: Cuda) -> None:
        gate = begun(UpdateGate(torch.device("cuda")))
        cuda.current.given.append("backward")
        with gate.reading(None):
            pass
        assert cuda.side.waits_for("backward", cuda.current)

    def test_a_mark_on_another_stream_comes_before_the_next_read(self, cuda: Cuda) -> None:
        gate, training, other = UpdateGate(torch.device("cuda")), cuda.current, Stream("other")
        with cuda.stream(other), gate:
            other.given.append("mark")
        gate.end_updates()
        with gate.reading(None):
            pass
        assert cuda.side.waits_for("mark", other)
        assert cuda.current is training

    def test_copies_to_the_host_run_beside_and_are_waited_for_there(self, cuda: Cuda) -> None:
        gate = UpdateGate(torch.device("cuda"))
        with gate.side_stream():
            cuda.current.given.append("copy")
        assert cuda.side.given == ["copy", "host waits"]
