"""What trackers of runs are told: nothing that a step would wait for, and nothing that ends it."""

import logging
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.documents import ROOT
from tests.support.fleet import follow, wait_until_in_sync
from tests.support.server import RunningService
from torch import nn

from deltasync.client import NumpyTarget
from deltasync.core.errors import InvalidInput
from deltasync.trainer.demo.ports import free_port
from deltasync.trainer.prometheus import COUNTERS, GAUGES, TrainerCollector, serve_metrics
from deltasync.trainer.scalars import ScalarOptions, Scalars, TensorBoard
from deltasync.trainer.sync import DeltaSync, SyncOptions

WAIT = 20.0


@pytest.fixture
def sync(running: RunningService) -> Iterator[DeltaSync]:
    """Publishes with each step a model that changes with none."""
    sync = DeltaSync(nn.Linear(4, 5), SyncOptions(service=running.grpc, model="clicks", publish_every=1))
    sync.flush(WAIT)
    yield sync
    sync.abort()


class Told:
    """A callback that keeps what it is told, and waits where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Mapping[str, float]]] = []
        self.busy, self.goes_on, self.closed = threading.Event(), threading.Event(), False
        self.goes_on.set()

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        self.calls.append((step, numbers))
        self.busy.set()
        assert self.goes_on.wait(WAIT)

    def close(self) -> None:
        self.closed = True


def test_callbacks_are_told_of_every_tenth_step(sync: DeltaSync) -> None:
    told = Told()
    with Scalars(sync, [told], ScalarOptions(every=10)) as scalars:
        for step in range(1, 31):
            sync.step()
            told.busy.clear()
            scalars.step(loss=torch.tensor(step / 2, requires_grad=True), learning_rate=0.1)
            assert step % 10 or told.busy.wait(WAIT)
    assert [step for step, _ in told.calls] == [10, 20, 30]
    assert [numbers["loss"] for _, numbers in told.calls] == [5.0, 10.0, 15.0]
    last = told.calls[-1][1]
    assert last["learning_rate"] == 0.1
    assert set(sync.metrics()) < set(last)
    assert (told.closed, scalars.dropped) == (True, 0)


def test_no_step_waits_for_a_callback_and_the_newest_sample_is_told(sync: DeltaSync) -> None:
    told = Told()
    told.goes_on.clear()
    with Scalars(sync, [told], ScalarOptions(every=1)) as scalars:
        sync.step()
        scalars.step(loss=1.0)
        assert told.busy.wait(WAIT)  # And stays so until all steps are done.
        for step in range(2, 100):
            sync.step()
            scalars.step(loss=float(step))
        assert scalars.dropped == 97
        told.goes_on.set()
    assert [step for step, _ in told.calls] == [1, 99]


def test_a_callback_that_fails_is_logged_once_and_ends_nothing(
    sync: DeltaSync, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()

    def broken(*_: Any) -> None:
        raise OSError("the disk is full")

    with Scalars(sync, [broken, told], ScalarOptions(every=1)) as scalars:
        for _ in range(5):
            sync.step()
            told.busy.clear()
            scalars.step()
            assert told.busy.wait(WAIT)
    assert len(told.calls) == 5
    said = [each for each in caplog.records if "the disk is full" in each.getMessage()]
    assert [each.levelno for each in said] == [logging.WARNING]


def test_lag_of_consumers_is_told_and_left_out_where_nobody_answers(
    running: RunningService, sync: DeltaSync, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    options = ScalarOptions(every=1, http=running.http, consumers=["predictors", "nobody"])
    with follow(running, "predictors", "a", NumpyTarget()):
        wait_until_in_sync(running, "predictors", sync.flush(WAIT))
        with Scalars(sync, [told], options) as scalars:  # No step of training: it would publish, and be a lag.
            scalars.step()
    (_, numbers), *_ = told.calls
    lag = {name: value for name, value in numbers.items() if name.startswith("lag/")}
    assert lag == {f"lag/predictors_{name}": 0.0 for name in ("versions", "rows", "seconds")}
    assert "no consumer 'nobody'" in caplog.text


def test_tensorboard_reads_what_is_written(sync: DeltaSync, tmp_path: Path) -> None:
    with Scalars(sync, [TensorBoard(tmp_path / "rank-0")], ScalarOptions(every=1)) as scalars:
        sync.step()
        scalars.step(loss=0.5)
    events = EventAccumulator(str(tmp_path / "rank-0"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {f"deltasync/{name}" for name in sync.metrics()} | {"train/loss"} == set(tags)
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(1, 0.5)]


def test_the_time_to_publish_and_what_is_not_published_are_told(running: RunningService) -> None:
    model = nn.Linear(4, 5)
    with DeltaSync(model, SyncOptions(service=running.grpc, model="clicks", publish_every=100)) as sync:
        assert (sync.metrics()["publish_seconds"], sync.metrics()["unpublished_seconds"]) == (0, 0)
        sync.flush(WAIT)
        assert sync.metrics()["publish_seconds"] > 0
        assert sync.metrics()["unpublished_seconds"] == 0
        with torch.no_grad():
            model.weight += 1
        sync.step()
        assert sync.metrics()["unpublished_steps"] == 1
        assert sync.metrics()["unpublished_seconds"] > 0


def test_promtool_accepts_a_trainers_metrics(sync: DeltaSync, tool: Callable[[str], str]) -> None:
    registry = CollectorRegistry()
    registry.register(TrainerCollector(sync, "clicks", 3))
    written = generate_latest(registry).decode()
    assert COUNTERS.keys() | GAUGES.keys() == sync.metrics().keys()
    assert 'deltasync_trainer_cuts_total{model="clicks",rank="3"} 1.0' in written
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=written, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_readme_names_all_numbers(sync: DeltaSync) -> None:
    text = (ROOT / "trainer/README.md").read_text()
    assert [name for name in sync.metrics() if f"`{name}`" not in text] == []


def test_each_rank_answers_on_a_port_of_its_own(sync: DeltaSync) -> None:
    port = free_port()
    serve_metrics(sync, "clicks", 1, f"127.0.0.1:{port - 1}", 1)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    written = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=WAIT).read().decode()
    assert 'deltasync_trainer_version{model="clicks",rank="1"} 1.0' in written
    assert "process_resident_memory_bytes" in written
    with pytest.raises(InvalidInput, match=r"of rank 1: .*in use"):
        serve_metrics(sync, "clicks", 1, f"127.0.0.1:{port - 1}", 1)
    for wrong in ("9400", "host:", "host:70000", ":9400"):
        with pytest.raises(InvalidInput, match="expected HOST:PORT"):
            serve_metrics(sync, "clicks", 0, wrong)
