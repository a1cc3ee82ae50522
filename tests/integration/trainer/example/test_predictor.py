"""The predictor follows a service: each answer is that of one version, while releases come."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from tests.support.ports import free_port
from tests.support.process import environment
from tests.support.programs import killed
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.client import Policy, SharedReader, SharedTarget, Subscriber, SubscriberOptions, ValueType
from deltasync.client.shared.layout import DIRECTORY, folder_of
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.example.model import ClickModel, outputs, quantised
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.predictor import (
    PredictionRequest,
    Replica,
    batch_of,
    create_app,
    mirrored_model,
    own_model,
)
from deltasync.trainer.sync import DeltaSync, SyncOptions

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
        self.sync = DeltaSync(self._model, SyncOptions(service=service.grpc, model="clicks"))

    def publish(self) -> int:
        """Change every value a little, and publish; returns the version."""
        with torch.no_grad():
            for each in self._model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        self.sync.mark_all()
        self.sync.step(time.time_ns())
        return self.sync.flush(DEADLINE_SECONDS).number

    def scores(self, value_type: ValueType | None) -> list[float]:
        """The scores of REQUEST, by a copy of the model that is quantised again."""
        served = ClickModel(OPTIONS).eval()
        served.load_state_dict(self._model.state_dict())
        if value_type:
            served = quantised(served, value_type)
        batch = batch_of(PredictionRequest.model_validate(REQUEST), OPTIONS.ids)
        return [float(each) for each in outputs(served, batch)]


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    trainer = Trainer(service)
    with trainer.sync:
        yield trainer


def served(url: str) -> int:
    """The version that is served; 0 before the predictor is ready."""
    try:
        return int(httpx.get(f"{url}/ready", timeout=DEADLINE_SECONDS).json().get("version", 0))
    except httpx.TransportError:
        return 0


def predict(url: str) -> dict[str, Any]:
    answer = httpx.post(f"{url}/predict", json=REQUEST, timeout=DEADLINE_SECONDS)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def assert_answers_follow(url: str, trainer: Trainer, value_type: ValueType | None) -> None:
    """Each answer, while versions are published, has the scores of the version that it names."""
    wait_for(partial(served, url), seconds=DEADLINE_SECONDS)
    expected, answers, ended = {1: trainer.scores(value_type)}, [predict(url)], threading.Event()
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(lambda: list(_until(ended, partial(predict, url)))) for _ in range(2)]
        for _ in range(5):
            version = trainer.publish()
            expected[version] = trainer.scores(value_type)
            while served(url) != version:
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
def listening(replica: Replica) -> Iterator[str]:
    """Serve a replica from a thread; yields the URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(replica, OPTIONS.ids), port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_each_answer_is_that_of_one_version(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    target = TorchTarget(quantised(ClickModel(OPTIONS).eval(), INT8))
    options = SubscriberOptions(service=service.grpc, consumer=INT8.value, replica="p")
    with Subscriber(options, target) as subscriber, listening(own_model(target, subscriber)) as url:
        assert_answers_follow(url, trainer, INT8)


def test_each_answer_over_a_mirror_is_that_of_one_version(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as folder:
        target = SharedTarget("m", "predictors", directory=folder)
        options = SubscriberOptions(
            service=service.grpc, consumer="predictors", replica="p", on_readiness=target.note_readiness
        )
        replica = mirrored_model(SharedReader("m", directory=folder), OPTIONS)
        with closing(target), Subscriber(options, target), listening(replica) as url:
            assert_answers_follow(url, trainer, None)


@contextmanager
def process(*command: str, **variables: str) -> Iterator[None]:
    """A process that ends with 0 on SIGTERM."""
    with killed(subprocess.Popen([sys.executable, "-m", *command], env=environment() | variables)) as running:
        yield
        running.terminate()
        assert running.wait(DEADLINE_SECONDS) == 0


@pytest.mark.nightly
def test_predictor_process_follows_and_ends_on_sigterm(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    port = str(free_port())
    options = ("--service", service.grpc, "--consumer", INT8.value, "--http-port", port)
    with process("deltasync.trainer.example.predictor", *options):
        assert_answers_follow(f"http://127.0.0.1:{port}", trainer, INT8)


@pytest.mark.nightly
def test_workers_over_one_mirror_follow(service: RunningService, trainer: Trainer) -> None:
    trainer.publish()
    port, name = str(free_port()), f"test-{os.getpid()}"
    application = "deltasync.trainer.example.predictor:over_mirror"
    options = ("--workers", "2", "--port", port, "--timeout-worker-healthcheck", "120")
    follow = ("mirror", name, "--consumer", "predictors", "--service", service.grpc)
    try:
        with process("uvicorn", "--factory", application, *options, MIRROR=name), process("deltasync", *follow):
            assert_answers_follow(f"http://127.0.0.1:{port}", trainer, None)
    finally:
        shutil.rmtree(folder_of(name), ignore_errors=True)
