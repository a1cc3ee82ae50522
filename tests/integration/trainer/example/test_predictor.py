"""The predictor follows a service: each answer is that of one version, while releases come."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
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
    Subscriber,
    SubscriberOptions,
    TableKind,
    TableSpec,
    ValueType,
)
from deltasync.client.shared.layout import folder_of
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.tables import matrix_shape
from deltasync.trainer.example.model import ClickModel, outputs, quantised
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.predictor import PredictionRequest, batch_of, create_app, own_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

OPTIONS = ModelOptions()
EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2, 7]}
REQUEST = {"events": [EVENT, EVENT | {"user": 39, "history": []}]}
INT8 = ValueType.INT8_TBE
DEADLINE_SECONDS = 60.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies={INT8.value: Policy(value_type=INT8)}) as service:
        yield service


class Trainer:
    """A model in this process, all of whose parameters are published."""

    def __init__(self, service: RunningService) -> None:
        torch.manual_seed(0)
        self._model = ClickModel(OPTIONS).eval()
        self._shards = {name: Shard.whole(_spec(name, each)) for name, each in self._model.named_parameters()}
        options = PublisherOptions(service=service.grpc, model="clicks", run="r", run_started_unix_ns=1)
        shards = list(self._shards.values())
        self.publisher = Publisher(options, [shard.table for shard in shards], shards)
        self._step = 0

    def publish(self) -> int:
        """Change every value a little, and publish; returns the version."""
        self._step += 1
        with torch.no_grad():
            for each in self._model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        rows = list[RowBatch]()
        for name, each in self._model.named_parameters():
            table = self._shards[name].table
            values = each.detach().numpy().reshape(table.rows, table.dim).copy()
            rows.append(RowBatch(self._shards[name], np.arange(table.rows), values))
        now = time.time_ns()
        part = Part(step=self._step, step_end_unix_ns=now, event_time_unix_ns=now, rows=rows, full=True)
        return self.publisher.publish(part).result(DEADLINE_SECONDS).number

    def scores(self, value_type: ValueType | None) -> list[float]:
        """The scores of REQUEST, by a copy of the model that is quantised again."""
        served = ClickModel(OPTIONS).eval()
        served.load_state_dict(self._model.state_dict())
        if value_type:
            served = quantised(served, value_type)
        return [
            float(each)
            for each in outputs(served, batch_of(PredictionRequest.model_validate(REQUEST), OPTIONS.ids))
        ]


def _spec(name: str, parameter: torch.Tensor) -> TableSpec:
    kind = TableKind.EMBEDDING if "embedding_bags" in name else TableKind.PARAMETER
    name = name.removesuffix(".weight") if kind.ranked else name
    return TableSpec(name, *matrix_shape(parameter.shape), kind=kind)


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    trainer = Trainer(service)
    yield trainer
    trainer.publisher.close()


def get(url: str) -> int:
    """The status of an answer; 0 if nobody listens yet."""
    try:
        return httpx.get(url, timeout=DEADLINE_SECONDS).status_code
    except httpx.TransportError:
        return 0


def predict(url: str) -> dict[str, Any]:
    answer = httpx.post(f"{url}/predict", json=REQUEST, timeout=DEADLINE_SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def assert_answers_follow(url: str, trainer: Trainer, value_type: ValueType | None, versions: int) -> None:
    """Each answer, while versions are published, has the scores of the version that it names."""
    wait_for(lambda: get(f"{url}/ready") == 200, seconds=DEADLINE_SECONDS)
    expected, answers, ended = {1: trainer.scores(value_type)}, [predict(url)], threading.Event()
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(lambda: list(_until(ended, lambda: predict(url)))) for _ in range(2)]
        for _ in range(versions):
            version = trainer.publish()
            expected[version] = trainer.scores(value_type)
            while httpx.get(f"{url}/ready").json().get("version") != version:
                pass
        ended.set()
        answers += [answer for each in asked for answer in each.result()]
    assert {1, version} <= {answer["version"] for answer in answers}
    for answer in answers:
        assert answer["scores"] == pytest.approx(expected[answer["version"]], rel=1e-6)


def _until(ended: threading.Event, ask: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while not ended.is_set():
        yield ask()
    yield ask()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an application from a thread; yields its URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_each_answer_is_that_of_one_version(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    target = TorchTarget(quantised(ClickModel(OPTIONS).eval(), INT8))
    options = SubscriberOptions(service=service.grpc, consumer=INT8.value, replica="p")
    with (
        Subscriber(options, target) as subscriber,
        listening(create_app(own_model(target, subscriber), OPTIONS.ids)) as url,
    ):
        assert_answers_follow(url, trainer, INT8, versions=5)


@pytest.mark.nightly
def test_predictor_process_follows_and_ends_on_sigterm(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    port = free_port()
    command = [sys.executable, "-m", "deltasync.trainer.example.predictor", "--service", service.grpc]
    command += ["--consumer", INT8.value, "--http-port", str(port)]
    with killed(subprocess.Popen(command, env=environment())) as process:
        assert_answers_follow(f"http://127.0.0.1:{port}", trainer, INT8, versions=5)
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 0


@pytest.mark.nightly
def test_workers_over_one_mirror_follow(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    port, name = free_port(), f"test-{os.getpid()}"
    follow = [*COMMAND, "mirror", name, "--consumer", "predictors", "--service", service.grpc]
    command = [sys.executable, "-m", "uvicorn", "--factory", "deltasync.trainer.example.predictor:over_mirror"]
    command += ["--workers", "2", "--port", str(port), "--timeout-worker-healthcheck", "120"]
    try:
        with (
            killed(subprocess.Popen(command, env=environment() | {"MIRROR": name})) as process,
            killed(subprocess.Popen(follow, env=environment())),
        ):
            assert_answers_follow(f"http://127.0.0.1:{port}", trainer, None, versions=5)
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0
    finally:
        shutil.rmtree(folder_of(name), ignore_errors=True)


def test_predictor_of_another_value_type_is_not_alive(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    target = TorchTarget(quantised(ClickModel(OPTIONS).eval(), INT8))
    options = SubscriberOptions(service=service.grpc, consumer="predictors", replica="p")
    subscriber = Subscriber(options, target)
    with listening(create_app(own_model(target, subscriber), OPTIONS.ids)) as url:
        wait_for(lambda: get(f"{url}/livez") == 503, seconds=DEADLINE_SECONDS)
        assert "sparse.embedding_bags.user" in httpx.get(f"{url}/livez").json()["detail"]
        assert get(f"{url}/ready") == 503
    subscriber.close()
