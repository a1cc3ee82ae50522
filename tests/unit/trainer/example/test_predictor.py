"""The example predictor's HTTP side: what it answers, and what it says of itself."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from deltasync.client import Position, ServiceFailed, ValueType
from deltasync.client.targets.target import Reading
from deltasync.client.targets.torch_target import ModuleReading
from deltasync.trainer.example import predictor
from deltasync.trainer.example.model import ClickModel, outputs, quantised
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.predictor import MOST_BYTES, MeteredTarget, batch_of, create_app

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

OPTIONS = ModelOptions(users=40, items=30, cross_buckets=10, dim=4, hidden=4, managed=True)
EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2]}
BODY = json.dumps({"events": [EVENT, EVENT | {"hour": 5}]})
THREADS = 2


class Client:
    """Asks an application without a socket."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self.ask("GET", path))

    def post(self, path: str, content: str | bytes) -> httpx.Response:
        return asyncio.run(self.ask("POST", path, content))

    async def ask(
        self, method: str, path: str, content: str | bytes | AsyncIterator[bytes] = b""
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://test") as client:
            return await client.request(method, path, content=content)


class Held:
    """A target that holds version 7, and a subscriber that has brought it there."""

    scores = MeteredTarget.scores

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = quantised(ClickModel(OPTIONS).eval(), ValueType.INT8_TBE)
        metered = MeteredTarget(self.module)
        self.watch, self.registry, self.predict_seconds = metered.watch, metered.registry, metered.predict_seconds
        self.ready, self.readiness = True, SimpleNamespace(reason="")
        self.version = Position("h", 7)
        self.event_time_unix_ns: int | None = time.time_ns() - 3_000_000_000
        self.step_end_unix_ns = time.time_ns() - 2_000_000_000
        self.broken: Exception | None = None
        self.gate = threading.Lock()
        self.asked = threading.Event()

    @contextmanager
    def reading(self) -> Iterator[Any]:
        if self.broken:
            raise self.broken
        self.asked.set()
        with self.gate:
            yield ModuleReading(
                module=self.module,
                version=self.version.number,
                kept="good",
                step=70,
                step_end_unix_ns=self.step_end_unix_ns,
                event_time_unix_ns=self.event_time_unix_ns,
            )

    def newest(self) -> Reading:
        return Reading(version=self.version.number, kept="good")

    def check(self) -> None:
        """It has not stopped."""


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def http(held: Held) -> Client:
    return Client(create_app(held, held, OPTIONS.ids, THREADS))  # type: ignore[arg-type]


def metric(http: Client, name: str) -> float:
    families = text_string_to_metric_families(http.get("/metrics").text)
    (value,) = [sample.value for family in families for sample in family.samples if sample.name == name]
    return float(value)


def test_an_answer_has_the_model_s_scores_and_says_which_version_made_them(http: Client, held: Held) -> None:
    answer = http.post("/predict", content=BODY)
    assert answer.status_code == 200
    found = answer.json()
    expected = outputs(held.module, batch_of(BODY.encode(), OPTIONS.ids))
    assert torch.equal(torch.tensor(found["scores"], dtype=torch.float32), expected)
    assert (found["version"], found["kept"], found["step"], found["age_of"]) == (7, "good", 70, "event")
    assert found["age_seconds"] >= 3
    held.event_time_unix_ns = None
    found = http.post("/predict", content=BODY).json()
    assert found["age_of"] == "step", "where event times are not known"
    assert found["age_seconds"] >= 2


def test_a_predictor_that_is_not_ready_says_why_and_is_alive(http: Client, held: Held) -> None:
    held.ready, held.readiness = False, SimpleNamespace(reason="no release has come yet")
    for answer in (http.get("/ready"), http.post("/predict", content=BODY)):
        assert answer.status_code == 503
        assert answer.json() == {"detail": "not ready: no release has come yet"}
    assert http.get("/livez").status_code == 200
    assert metric(http, "predictor_ready") == 0
    held.ready = True
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"version": 7, "kept": "good"})
    assert metric(http, "predictor_ready") == 1


def test_a_model_that_holds_no_version_whole_is_not_served(http: Client, held: Held) -> None:
    held.broken = ServiceFailed("between versions 7 and 8")
    answer = http.post("/predict", content=BODY)
    assert (answer.status_code, answer.json()) == (503, {"detail": "between versions 7 and 8"})


def test_wrong_requests_are_refused_in_a_sentence(http: Client) -> None:
    answer = http.post("/predict", content=json.dumps({"events": [EVENT | {"hour": 168}]}))
    assert (answer.status_code, answer.json()) == (422, {"detail": "hour: 168, expected ids below 168"})
    nan = http.post("/predict", content=BODY.replace("0.5", "NaN"))
    assert nan.status_code == 422
    assert nan.json()["detail"] == "events.0.dense.1: Input should be a finite number"
    large = http.post("/predict", content=b" " * (MOST_BYTES + 1))
    assert (large.status_code, large.json()) == (413, {"detail": f"body: more than {MOST_BYTES} bytes"})
    assert http.get("/predict").status_code == 405


def test_probes_are_answered_while_a_forward_waits(http: Client, held: Held) -> None:
    async def scenario() -> None:
        with held.gate:
            answer = asyncio.create_task(http.ask("POST", "/predict", BODY))
            await asyncio.to_thread(held.asked.wait)
            assert (await http.ask("GET", "/ready")).status_code == 200
            assert not answer.done()
        assert (await answer).status_code == 200

    asyncio.run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for(http: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "_BODY_SECONDS", 0.01)

    async def half() -> AsyncIterator[bytes]:
        yield BODY[:9].encode()
        await asyncio.Event().wait()

    answer = asyncio.run(http.ask("POST", "/predict", half()))
    assert (answer.status_code, answer.json()) == (408, {"detail": "body: not complete after 0 s"})


@pytest.mark.timeout(30)
def test_requests_beyond_those_that_may_wait_are_refused(http: Client, held: Held) -> None:
    async def scenario() -> None:
        with held.gate:
            places = THREADS + predictor.MOST_WAITING
            asked = [asyncio.create_task(http.ask("POST", "/predict", BODY)) for _ in range(places + 2)]
            refused = [await each for _, each in zip(range(2), asyncio.as_completed(asked), strict=False)]
            for answer in refused:
                assert answer.status_code == 503
                assert answer.json() == {
                    "detail": f"busy: {predictor.MOST_WAITING} requests are already waiting; try again later"
                }
            assert (await http.ask("GET", "/livez")).status_code == 200
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers].count(200) == places

    asyncio.run(scenario())


def test_scores_that_are_no_numbers_are_not_answered(http: Client, held: Held) -> None:
    with torch.no_grad():
        held.module.get_parameter("top.0.bias").fill_(float("nan"))
    answer = http.post("/predict", content=BODY)
    assert answer.status_code == 503
    assert answer.json() == {"detail": "version 7 of the model gives scores that are not finite"}


def test_metrics_count_what_was_answered(http: Client, held: Held) -> None:
    http.post("/predict", content=BODY)
    http.post("/predict", content=BODY)
    assert metric(http, "predictor_predict_seconds_count") == 2
    assert metric(http, "predictor_version") == 7
    assert metric(http, "predictor_event_age_seconds") >= 3
    held.event_time_unix_ns = None
    assert "predictor_event_age_seconds NaN" in http.get("/metrics").text
