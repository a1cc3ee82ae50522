"""The predictor's HTTP application."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from deltasync.base.decision import Decision
from deltasync.client import ServiceFailed
from deltasync.client.targets.target import Reading
from deltasync.trainer.example.model import ClickBatch, ClickModel, outputs
from deltasync.trainer.example.options import RAW_IDS, ModelOptions
from deltasync.trainer.example.predictor import PredictionRequest, Replica, batch_of, create_app

OPTIONS = ModelOptions(users=40, items=30, cross_buckets=10, dim=4, hidden=4)
EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2]}
REQUEST = {"events": [EVENT, EVENT | {"hour": 5, "history": []}]}
YES, NO = Decision(True, ""), Decision(False, "no release has come yet")


def expected_scores(model: ClickModel) -> list[float]:
    batch = batch_of(PredictionRequest.model_validate(REQUEST), OPTIONS.ids)
    return [float(score) for score in outputs(model, batch)]


class Client:
    """Calls an application without a socket."""

    def __init__(self, replica: Replica) -> None:
        self._transport = httpx.ASGITransport(create_app(replica, OPTIONS.ids))

    def get(self, path: str) -> httpx.Response:
        return asyncio.run(self._ask("GET", path, ""))

    def post(self, body: object) -> httpx.Response:
        return asyncio.run(self._ask("POST", "/predict", json.dumps(body)))

    async def _ask(self, method: str, path: str, content: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as http:
            return await http.request(method, path, content=content)


@pytest.fixture
def model() -> ClickModel:
    torch.manual_seed(0)
    return ClickModel(OPTIONS).eval()


@pytest.fixture
def replica(model: ClickModel) -> Replica:
    """A replica that serves version 7."""

    def scores(batch: ClickBatch) -> tuple[torch.Tensor, Reading]:
        return outputs(model, batch), Reading(version=7)

    return Replica(scores, lambda: YES, lambda: 7, lambda: None)


def test_answer_has_scores_and_the_version_that_made_them(replica: Replica, model: ClickModel) -> None:
    answer = Client(replica).post(REQUEST)
    assert answer.json() == {"scores": expected_scores(model), "version": 7, "age_seconds": None}


def test_probes_and_metrics(replica: Replica) -> None:
    http = Client(replica)
    assert http.get("/ready").json() == {"version": 7}
    assert http.get("/livez").status_code == 200
    assert "predictor_version 7.0" in http.get("/metrics").text.splitlines()


def test_predictor_that_is_not_ready_says_why_and_is_alive(replica: Replica) -> None:
    http = Client(replace(replica, readiness=lambda: NO))
    for answer in (http.get("/ready"), http.post(REQUEST)):
        assert (answer.status_code, answer.json()) == (503, {"detail": "not ready: no release has come yet"})
    assert http.get("/livez").status_code == 200


def test_predictor_whose_subscriber_has_stopped_is_not_alive(replica: Replica) -> None:
    def check() -> None:
        raise ServiceFailed("between versions 7 and 8")

    answer = Client(replace(replica, check=check)).get("/livez")
    assert (answer.status_code, answer.json()) == (503, {"detail": "between versions 7 and 8"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dense": [0.0] * 3}, "events.1.dense: List should have at least 4 items"),
        ({"dense": [0.0, 0.0, 0.0, float("nan")]}, "events.1.dense.3: Input should be"),
        ({"dense": [0.0, 0.0, 0.0, 1e30]}, "events.1.dense.3: Input should be less than or equal to 1000000"),
        ({"user": -1}, "events.1.user: Input should be greater than or equal to 0"),
        ({"user": 1.5}, "events.1.user: Input should be a valid integer"),
        ({"user": 2**64}, "events.1.user: Input should be less than"),
        ({"user": 40}, "user: 40, expected ids below 40"),
        ({"hour": 168}, "hour: 168, expected ids below 168"),
        ({"history": [1, 30]}, "history: 30, expected ids below 30"),
        ({"history": [1] * 101}, "events.1.history: List should have at most 100 items"),
    ],
)
def test_error_for_a_wrong_event_names_the_field(replica: Replica, change: dict[str, Any], why: str) -> None:
    answer = Client(replica).post({"events": [EVENT, EVENT | change]})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(why)


def test_raw_ids_are_accepted_with_managed_collision() -> None:
    ids = replace(OPTIONS, managed=True).ids
    event = EVENT | {"user": RAW_IDS - 1, "item": 5, "history": [6, 7]}
    batch = batch_of(PredictionRequest.model_validate({"events": [event]}), ids)
    assert batch.sparse.values().tolist() == [RAW_IDS - 1, 5, 3, 4, 6, 7]
