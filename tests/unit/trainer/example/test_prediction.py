"""What a predictor is asked: features survive the JSON bit by bit, and what is wrong is said in a sentence."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deltasync.base.errors import InvalidInput
from deltasync.trainer.example.features import Features
from deltasync.trainer.example.model import click_batch
from deltasync.trainer.example.options import RAW_IDS, ModelOptions
from deltasync.trainer.example.predictor import MOST_BYTES, MOST_EVENTS, PredictionRequest, batch_of, request_of

IDS = ModelOptions(users=40, items=30, cross_buckets=10, managed=True).ids

raw_ids = st.integers(0, RAW_IDS - 1)
values = st.floats(-1e6, 1e6, width=32)
events = st.lists(
    st.tuples(
        st.lists(values, min_size=4, max_size=4),
        st.tuples(raw_ids, raw_ids, st.integers(0, 9), st.integers(0, 167)),
        st.lists(raw_ids, max_size=5),
    ),
    min_size=1,
    max_size=20,
)


def _features(drawn: list[Any]) -> Features:
    dense, ids, history = zip(*drawn, strict=True)
    return Features(
        index=np.arange(len(drawn)),
        label=np.zeros(len(drawn), np.float32),
        dense=np.array(dense, np.float32),
        ids=dict(zip(("user", "item", "cross", "hour"), np.array(ids, np.int64).T, strict=True)),
        history=np.array([item for items in history for item in items], np.int64),
        history_lengths=np.array([len(items) for items in history], np.int32),
    )


@given(events)
def test_a_request_brings_the_features_bit_by_bit(drawn: list[Any]) -> None:
    sent = click_batch(_features(drawn))
    taken = batch_of(request_of(_features(drawn)), IDS)
    assert torch.equal(taken.dense.view(torch.int32), sent.dense.view(torch.int32))
    assert taken.sparse.keys() == sent.sparse.keys()
    assert torch.equal(taken.sparse.values(), sent.sparse.values())
    assert torch.equal(taken.sparse.lengths(), sent.sparse.lengths())


EVENT = {"dense": [0.0, 0.5, 1.0, -1.0], "user": 1, "item": 2, "cross": 3, "hour": 4, "history": [2]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dense": [0.0] * 3}, "events.1.dense: List should have at least 4 items"),
        ({"dense": [0.0, 0.0, 0.0, float("nan")]}, "events.1.dense.3: Input should be a finite number"),
        ({"dense": [0.0, 0.0, 0.0, 1e30]}, "events.1.dense.3: Input should be less than or equal to 1000000"),
        ({"dense": ["0", 0.0, 0.0, 0.0]}, "events.1.dense.0: Input should be a valid number"),
        ({"user": -1}, "events.1.user: Input should be greater than or equal to 0"),
        ({"user": 1.5}, "events.1.user: Input should be a valid integer"),
        ({"user": True}, "events.1.user: Input should be a valid integer"),
        ({"user": 2**64}, "events.1.user: Input should be less than"),
        ({"user": RAW_IDS}, f"user: {RAW_IDS}, expected ids below {RAW_IDS}"),
        ({"cross": 10}, "cross: 10, expected ids below 10"),
        ({"hour": 168}, "hour: 168, expected ids below 168"),
        ({"history": [1, RAW_IDS]}, f"history: {RAW_IDS}, expected ids below {RAW_IDS}"),
        ({"history": [1] * 101}, "events.1.history: List should have at most 100 items"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        batch_of(json.dumps({"events": [EVENT, EVENT | change]}).encode(), IDS)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "body: Invalid JSON"),
        (b"\xff", "body: Invalid JSON"),
        (b"[" * 100_000, "body: Invalid JSON"),
        (b"[]", "body: Input should be an object"),
        (b"{}", "events: Field required"),
        (b'{"events": []}', "events: List should have at least 1 item"),
        (
            json.dumps({"events": [EVENT] * (MOST_EVENTS + 1)}).encode(),
            f"events: List should have at most {MOST_EVENTS}",
        ),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        batch_of(body, IDS)
    assert str(refused.value).startswith(why)


def test_fields_that_the_model_does_not_know_are_passed_over() -> None:
    known, more = {"events": [EVENT]}, {"events": [EVENT | {"country": 1}], "model": "m"}
    ours, theirs = (batch_of(json.dumps(each).encode(), IDS) for each in (known, more))
    assert torch.equal(ours.sparse.values(), theirs.sparse.values())


@pytest.mark.parametrize(
    "event",
    [
        {},
        EVENT | {"history": ["a"] * 100},
        EVENT | {"dense": ["a"] * 100_000},
        {str(name): 1 for name in range(80_000)},
    ],
    ids=["no fields", "histories", "values", "fields"],
)
def test_what_is_wrong_is_not_listed_without_end(event: dict[str, Any]) -> None:
    as_many_as_fit = min(MOST_EVENTS, MOST_BYTES // (len(json.dumps(event)) + 2)) or 1
    many = json.dumps({"events": [event] * as_many_as_fit}).encode()
    with pytest.raises(ValidationError) as refused:
        PredictionRequest.model_validate_json(many)
    assert refused.value.error_count() < 10


def test_a_model_without_managed_collision_takes_rows() -> None:
    ids = ModelOptions(users=40, items=30, cross_buckets=10).ids
    taken = batch_of(json.dumps({"events": [EVENT | {"user": 39, "item": 29, "history": [29]}]}).encode(), ids)
    assert taken.sparse.values().tolist() == [39, 29, 3, 4, 29]
    with pytest.raises(InvalidInput, match="user: 40, expected ids below 40"):
        batch_of(json.dumps({"events": [EVENT | {"user": 40}]}).encode(), ids)
    with pytest.raises(InvalidInput, match="history: 30, expected ids below 30"):
        batch_of(json.dumps({"events": [EVENT | {"history": [30]}]}).encode(), ids)
