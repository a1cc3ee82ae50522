"""The ranks of test_ranks_apart. The first one has the service, in its own process."""

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import leave
from tests.support.server import RunningService
from torch import nn

from deltasync.base.errors import DeltasyncError, ServiceFailed, ServiceUnavailable
from deltasync.client import Position, publisher
from deltasync.trainer.run import StallDetector
from deltasync.trainer.sync import DeltaSync, SyncOptions

WAIT = 20.0


class Service:
    """On all ranks, which know where it is."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self._running: RunningService | None = None
        self.grpc = ""
        self.start()

    def start(self) -> None:
        if dist.get_rank() == 0:
            port = int(self.grpc.rpartition(":")[2] or 0)
            self._running = RunningService(self.data, grpc_port=port)
            self._running.start()
        found = [self._running.grpc if self._running else ""]
        dist.broadcast_object_list(found)
        self.grpc = found[0]

    def stop(self) -> None:
        if self._running:
            self._running.stop()
        dist.barrier()

    def copy(self, source: Path, to: Path) -> None:
        """While it is stopped."""
        if dist.get_rank() == 0:
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(source, to)
        dist.barrier()


def trainer(service: Service) -> tuple[Any, DeltaSync]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    return model, DeltaSync(model, SyncOptions(service=service.grpc, model="clicks", publish_every=1))


@contextmanager
def on_rank_1(owner: Any, name: str, function: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(owner, name, function)
        yield


def an_answer_that_one_rank_has_not_got_to_a_cut_that_the_service_has_lost(folder: Path) -> None:
    """Its part waits for that of the other, which knows that their cut is sealed."""
    service, copied = Service(folder), folder / "copy"
    model, sync = trainer(service)
    sync.flush(WAIT)
    service.stop()
    service.copy(service.data, copied)
    service.start()
    send, answered, put_back = publisher._Stream.send, threading.Event(), threading.Event()

    def lose(stream: Any, part: Any) -> Position:
        send(stream, part)
        answered.set()
        put_back.wait()
        raise ServiceUnavailable("the answer was lost")

    with on_rank_1(publisher._Stream, "send", lose):
        model.weight.data += 1
        sync.step()
        if dist.get_rank() == 1:
            answered.wait()
        else:
            assert sync._under_way is not None
            assert sync._under_way.answer(WAIT)
    service.stop()
    service.copy(copied, service.data)
    service.start()
    put_back.set()
    model.bias.data += 1
    sync._stall = StallDetector(patience_seconds=0.2)
    assert sync.flush(WAIT).number == 2
    assert sync.trouble == ""
    sync.abort()
    service.stop()


def a_flush_that_fails_on_one_rank_while_the_other_learns_what_came_after(folder: Path) -> None:
    """Their next parts are of one step."""
    service = Service(folder)
    model, sync = trainer(service)
    sync.flush(WAIT)
    state: list[Any] = [None, None]
    dist.all_gather_object(state, sync.state_dict())
    model.weight.data += 1
    sync.step()
    sync.flush(WAIT)
    sync.abort()
    _, resumed = trainer(service)
    resumed.load_state_dict(state)

    def fail(*_: object) -> None:
        raise ServiceFailed("an error of its own")

    with on_rank_1(publisher.Publisher, "_check_opened", fail), pytest.raises(DeltasyncError):
        resumed.flush(WAIT)
    for _ in range(3):
        resumed.flush(WAIT)
        steps: list[Any] = [None, None]
        dist.all_gather_object(steps, resumed.tracker.steps)
        assert steps[0] == steps[1], steps
    resumed.abort()
    service.stop()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    a_flush_that_fails_on_one_rank_while_the_other_learns_what_came_after(Path(sys.argv[1]) / "flush")
    an_answer_that_one_rank_has_not_got_to_a_cut_that_the_service_has_lost(Path(sys.argv[1]) / "answer")
    dist.barrier()
    dist.destroy_process_group()
    leave()
