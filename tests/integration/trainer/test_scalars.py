"""What trackers of runs are told: nothing that a step would wait for, and nothing that ends it."""

import logging
import re
import subprocess
import sys
import threading
import time
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
from tests.support.ports import free_port
from tests.support.server import RunningService
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.client import NumpyTarget
from deltasync.trainer.prometheus import TrainerCollector, serve_metrics
from deltasync.trainer.scalars import SUMS, ScalarOptions, Scalars, TensorBoard
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.sync_options import COUNTERS, GAUGES

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


def step(sync: DeltaSync, scalars: Scalars, told: Told, **numbers: Any) -> None:
    """One that is told."""
    sync.step()
    told.busy.clear()
    scalars.step(**numbers)
    assert told.busy.wait(WAIT)


class Broken(dict[str, Any]):
    """A callback that fails, and that no set could hold."""

    def __call__(self, *_: Any) -> None:
        raise OSError("the disk is full")

    def close(self) -> None:
        raise OSError("the file was not closed")


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
    assert set(sync.metrics()) - SUMS.keys() < set(last)
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
    with Scalars(sync, [Broken(), told], ScalarOptions(every=1)) as scalars:
        for _ in range(5):
            step(sync, scalars, told)
    assert len(told.calls) == 5
    said = [each for each in caplog.records if "the disk is full" in each.getMessage()]
    assert [each.levelno for each in said] == [logging.WARNING]
    assert "the file was not closed" in caplog.text
    assert told.closed


def test_a_number_that_is_none_is_logged_once_and_the_others_are_told(
    sync: DeltaSync, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    with Scalars(sync, [told], ScalarOptions(every=1)) as scalars:
        for loss in (torch.ones(2), torch.ones(2), torch.ones(1)):
            step(sync, scalars, told, loss=loss, learning_rate=0.1)
    assert [numbers.get("loss") for _, numbers in told.calls] == [None, None, 1.0]
    assert all(numbers["learning_rate"] == 0.1 and "version" in numbers for _, numbers in told.calls)
    assert caplog.text.count("number 'loss' failed: only one element tensors") == 1


def test_what_is_told_is_what_a_tensor_held_then(sync: DeltaSync) -> None:
    told, loss = Told(), torch.zeros(())
    told.goes_on.clear()
    with Scalars(sync, [told], ScalarOptions(every=1)) as scalars:
        for _ in range(2):
            sync.step()
            loss += 1
            scalars.step(loss=loss)
            assert told.busy.wait(WAIT)
        loss += 1
        told.goes_on.set()
    assert [numbers["loss"] for _, numbers in told.calls] == [1.0, 2.0]


def test_a_callback_that_hangs_is_waited_for_no_longer_than_asked_and_what_is_left_is_said(
    sync: DeltaSync, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    told.goes_on.clear()
    scalars = Scalars(sync, [told], ScalarOptions(every=1, close_seconds=0.1))
    for _ in range(2):
        sync.step()
        scalars.step()
        assert told.busy.wait(WAIT)
    began = time.monotonic()
    scalars.close()
    assert time.monotonic() - began < WAIT / 2
    assert caplog.messages == ["scalars: callback 1 (Told) takes more than 0.1 s: 2 steps are not reported: 1, 2"]
    assert not told.closed, "it is still in use"
    told.goes_on.set()


def test_a_tracker_that_hangs_keeps_no_row_from_being_published(running: RunningService) -> None:
    model, told = nn.Linear(4, 5), Told()
    told.goes_on.clear()
    publishing = SyncOptions(service=running.grpc, model="clicks", publish_every=100)
    with (
        DeltaSync(model, publishing) as sync,
        Scalars(sync, [told], ScalarOptions(every=1, close_seconds=0.1)) as s,
    ):
        sync.step()
        s.step()
    assert sync.metrics()["unpublished_steps"] == 0
    assert told.busy.wait(WAIT)
    told.goes_on.set()


def test_seconds_are_told_per_step_since_the_sample_before(sync: DeltaSync) -> None:
    told = Told()
    with Scalars(sync, [told], ScalarOptions(every=10)) as scalars:
        for step in range(1, 21):
            sync.step()
            sync.stats.step_seconds = 3.0 * step
            told.busy.clear()
            scalars.step()
            assert step % 10 or told.busy.wait(WAIT)
        scalars.step()  # And no time where no step was done.
    assert [numbers.get("step_seconds_per_step") for _, numbers in told.calls][1:] == [3.0, None]
    assert all(numbers.keys().isdisjoint(SUMS) for _, numbers in told.calls)
    assert "tracking_seconds_per_step" in told.calls[0][1]


def test_lag_of_consumers_is_told_and_left_out_where_nobody_answers(
    running: RunningService, sync: DeltaSync, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    options = ScalarOptions(every=1, service=running.http, consumers=["predictors", "nobody"])
    with follow(running, "predictors", "a", NumpyTarget()):
        wait_until_in_sync(running, "predictors", sync.flush(WAIT))
        with Scalars(sync, [told], options) as scalars:  # No step of training: it would publish, and be a lag.
            scalars.step()
    (_, numbers), *_ = told.calls
    lag = {name: value for name, value in numbers.items() if name.startswith("lag/")}
    assert lag == {f"lag/predictors_{name}": 0.0 for name in ("versions", "rows", "seconds")}
    assert "no consumer 'nobody'" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"consumers": ["predictors"]}, "service '': expected http://HOST:PORT"),
        ({"consumers": ["predictors"], "service": "http://"}, "expected http://HOST:PORT"),
        ({"consumers": "predictors"}, "consumers: 'predictors', expected several names"),
        ({"every": 0}, "every: 0, expected a whole number"),
        ({"close_seconds": 0}, "close_seconds: 0, expected a positive number"),
    ],
)
def test_options_that_tell_nothing_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(why)):
        ScalarOptions(**wrong)


def test_tensorboard_reads_what_is_written(sync: DeltaSync, tmp_path: Path) -> None:
    with Scalars(sync, [TensorBoard(tmp_path / "rank-0")], ScalarOptions(every=1)) as scalars:
        sync.step()
        scalars.step(loss=0.5, learning_rate=0.25)
    events = EventAccumulator(str(tmp_path / "rank-0"))
    events.Reload()
    tags = events.Tags()["scalars"]
    ours = {f"deltasync/{SUMS.get(name, name)}" for name in sync.metrics()}
    assert set(tags) == {"train/loss", "train/learning_rate", *ours}
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(1, 0.5)]


def test_who_lacks_tensorboard_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'deltasync[tensorboard]'")):
        TensorBoard(tmp_path)


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
    assert [name for name in (*sync.metrics(), *SUMS.values()) if f"`{name}`" not in text] == []


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
