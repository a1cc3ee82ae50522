"""The example predictor as a process: from a service's releases to answers over HTTP."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.support.deployments import COMMAND
from tests.support.ports import free_port
from tests.support.process import environment
from tests.support.programs import killed
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.client import (
    Part,
    Policy,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    TableKind,
    TableSpec,
    ValueType,
)
from deltasync.client.shared.layout import folder_of
from deltasync.core.tables import matrix_shape
from deltasync.trainer.example.model import ClickModel, outputs, quantised
from deltasync.trainer.example.options import ModelOptions, arguments
from deltasync.trainer.example.predictor import batch_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

OPTIONS = ModelOptions(users=40, items=30, cross_buckets=10, dim=8, hidden=4)
EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2, 7]}
BODY = json.dumps({"events": [EVENT, EVENT | {"user": 39, "history": []}]}).encode()
INT8 = ValueType.INT8_TBE
POLICIES = {INT8.value: Policy(value_type=INT8)}
DEADLINE_SECONDS = 60.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        yield service


class Trainer:
    """A model in this process, all of whose parameters are published."""

    def __init__(self, service: RunningService) -> None:
        torch.manual_seed(0)
        self.model = ClickModel(OPTIONS).eval()
        self._shards = {name: Shard.whole(_spec(name, each)) for name, each in self.model.named_parameters()}
        options = PublisherOptions(service=service.grpc, model="clicks", run="r", run_started_unix_ns=1)
        shards = list(self._shards.values())
        self._publisher = Publisher(options, [shard.table for shard in shards], shards)
        self._step = 0

    def publish(self) -> int:
        """Change every value a little, and publish; the version."""
        self._step += 1
        with torch.no_grad():
            for each in self.model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        rows = [self._rows(name, each) for name, each in self.model.named_parameters()]
        now = time.time_ns()
        part = Part(step=self._step, step_end_unix_ns=now, event_time_unix_ns=now, rows=rows, full=True)
        return self._publisher.publish(part).result(DEADLINE_SECONDS).number

    def scores(self, value_type: ValueType) -> torch.Tensor:
        """Of the events of BODY, by the model, quantised anew if that is the type."""
        copy = ClickModel(OPTIONS).eval()
        copy.load_state_dict(self.model.state_dict())
        served = quantised(copy, value_type) if value_type.tbe_bits else copy
        return outputs(served, batch_of(BODY, OPTIONS.ids))

    def close(self) -> None:
        self._publisher.close()

    def _rows(self, name: str, parameter: torch.Tensor) -> RowBatch:
        shard = self._shards[name]
        values = parameter.detach().numpy().reshape(shard.table.rows, shard.table.dim).copy()
        return RowBatch(shard, np.arange(shard.table.rows), values)


def _spec(name: str, parameter: torch.Tensor) -> TableSpec:
    kind = TableKind.EMBEDDING if "embedding_bags" in name else TableKind.PARAMETER
    return TableSpec(
        name.removesuffix(".weight") if kind.ranked else name, *matrix_shape(parameter.shape), kind=kind
    )


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    trainer = Trainer(service)
    yield trainer
    trainer.close()


@contextmanager
def predictor(service: RunningService, consumer: str) -> "Iterator[Predictor]":
    port = free_port()
    command = [sys.executable, "-m", "deltasync.trainer.example.predictor", "--service", service.grpc]
    command += ["--consumer", consumer, "--replica", "p", "--http-port", str(port), "--value-type", INT8.value]
    with killed(subprocess.Popen([*command, *arguments(OPTIONS)], env=environment())) as process:
        yield Predictor(process, f"http://127.0.0.1:{port}")


@contextmanager
def workers(service: RunningService, consumer: str) -> "Iterator[Predictor]":
    """Two workers over one mirror, which are started before it."""
    port, name = free_port(), f"test-{os.getpid()}"
    follow = [*COMMAND, "mirror", name, "--consumer", consumer, "--service", service.grpc]
    command = [sys.executable, "-m", "deltasync.trainer.example.workers", name, "--http-port", str(port)]
    command += [*arguments(OPTIONS), "--workers", "2"]
    try:
        with (
            killed(subprocess.Popen(command, env=environment(), process_group=0)) as process,
            killed(subprocess.Popen(follow, env=environment())),
        ):
            try:
                yield Predictor(process, f"http://127.0.0.1:{port}")
                process.terminate()
                assert process.wait(DEADLINE_SECONDS) == 0
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Also workers that go on.
    finally:
        shutil.rmtree(folder_of(name), ignore_errors=True)


class Predictor:
    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.process, self._url = process, url

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._url + path, timeout=DEADLINE_SECONDS)

    def predict(self) -> dict[str, Any]:
        answer = httpx.post(f"{self._url}/predict", content=BODY, timeout=DEADLINE_SECONDS)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def children(self) -> set[int]:
        """The processes that it has started."""
        pid = self.process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def await_that(self, path: str, true: Callable[[httpx.Response], bool]) -> httpx.Response:
        """Ask until the answer is right."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            assert self.process.poll() is None, "the predictor has ended"
            try:
                if true(answer := self.get(path)):
                    return answer
            except httpx.TransportError:
                pass  # It does not listen yet.
            assert time.monotonic() < deadline, path
            time.sleep(0.02)


def _serves(version: int, metrics: httpx.Response) -> bool:
    return f"predictor_version {version}.0" in metrics.text


@pytest.mark.parametrize(
    ("served", "consumer", "value_type", "processes"),
    [
        (predictor, INT8.value, INT8, 1),
        pytest.param(workers, "predictors", ValueType.FP32, 2, marks=pytest.mark.nightly),
    ],
    ids=["quantised", "workers"],
)
def test_every_answer_is_that_of_one_version_while_releases_come(
    service: RunningService,
    trainer: Trainer,
    served: "Callable[[RunningService, str], AbstractContextManager[Predictor]]",
    consumer: str,
    value_type: ValueType,
    processes: int,
) -> None:
    trainer.publish()
    expected = {1: trainer.scores(value_type)}
    with served(service, consumer) as asked, ThreadPoolExecutor(16) as threads:
        asked.await_that("/ready", lambda answer: answer.status_code == 200)
        begun, ended = threading.Barrier(3), threading.Event()
        answers = [threads.submit(lambda: list(_until(ended, begun, asked.predict))) for _ in range(2)]
        begun.wait(DEADLINE_SECONDS)
        for _ in range(20):
            version = trainer.publish()
            expected[version] = trainer.scores(value_type)
            asked.await_that("/metrics", partial(_serves, version))
        ended.set()
        found = [answer for each in answers for answer in each.result()]
        while len({answer["worker"] for answer in found}) < processes:
            found += threads.map(lambda _: asked.predict(), range(16))
    assert {1, version} <= {answer["version"] for answer in found}, "releases came in between"
    for answer in found:
        assert torch.equal(torch.tensor(answer["scores"], dtype=torch.float32), expected[answer["version"]])


@pytest.mark.nightly
def test_a_killed_worker_is_started_again(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    with workers(service, "predictors") as asked, ThreadPoolExecutor(16) as threads:
        asked.await_that("/ready", lambda answer: answer.status_code == 200)
        # The supervisor looks at a dead worker only after the other one has started.
        while len({answer["worker"] for answer in threads.map(lambda _: asked.predict(), range(16))}) < 2:
            pass
        dead, before = asked.predict()["worker"], asked.children()
        os.kill(dead, signal.SIGKILL)
        (new,) = wait_for(lambda: asked.children() - before)
        for each in before - {dead}:
            os.kill(each, signal.SIGSTOP)  # So that only the new one can answer.
        try:
            asked.await_that("/livez", lambda answer: answer.status_code == 200)
            assert asked.predict()["worker"] == new
        finally:
            for each in before - {dead}:
                os.kill(each, signal.SIGCONT)


def _until(
    ended: threading.Event, begun: threading.Barrier, ask: Callable[[], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Answers, one of them before all have begun, and one after the end."""
    yield ask()
    begun.wait(DEADLINE_SECONDS)
    while not ended.is_set():
        yield ask()
    yield ask()


def test_a_predictor_of_another_value_type_is_not_alive_and_says_why(
    service: RunningService, trainer: Trainer
) -> None:
    trainer.publish()
    with predictor(service, "predictors") as asked:
        dead = asked.await_that("/livez", lambda answer: answer.status_code == 500)
        assert "sparse.embedding_bags.user" in dead.json()["detail"]
        assert asked.get("/ready").status_code == 503
