"""What a predictor is asked and what it answers: the JSON of `POST /predict`."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from deltasync.core.errors import InvalidInput
from deltasync.trainer.clicks.batch import SPARSE_FEATURES, ClickBatch, click_batch
from deltasync.trainer.clicks.features import DENSE_FEATURES, Features

MOST_EVENTS = 1024
"""Of one request."""
MOST_BYTES = 1 << 20
"""Of one request's body."""

_SINGLE = SPARSE_FEATURES[:-1]
_MOST_HISTORY = 100
# Far beyond any value there is, and small enough for float32 to multiply two of them.
_LARGEST = 1e6

# One wrong entry is enough: to list a hundred thousand of them would stop all threads for a second.
_Id = Annotated[int, Field(ge=0, lt=2**63)]
_History = Annotated[list[_Id], Field(max_length=_MOST_HISTORY), FailFast()]
_Value = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]


class Event(BaseModel):
    """The features of one event, in the types of `Features`: ids are those that the model's lookups take.

    Other fields are passed over: who asks may know of a feature before the model does.
    """

    model_config = ConfigDict(strict=True)

    dense: list[_Value] = Field(min_length=len(DENSE_FEATURES), max_length=len(DENSE_FEATURES))
    user: _Id
    item: _Id
    cross: _Id
    hour: _Id
    history: _History


class PredictionRequest(BaseModel):
    """Events to score."""

    model_config = ConfigDict(strict=True)

    events: Annotated[list[Event], Field(min_length=1, max_length=MOST_EVENTS), FailFast()]


class Prediction(BaseModel):
    """Scores, and the version of the model that made all of them.

    Attributes:
        scores: log odds of a click, of each event in turn.
        version: of the model, as lag and the trainer count.
        step: the trainer's step of that version.
        age_seconds: since the newest event that the version was trained on, or, where the trainer does not say
            it, since the version's step ended.
        age_of: which of the two: `event` or `step`.

    Step and age are null where they are not known.
    """

    scores: list[float]
    version: int
    step: int | None
    age_seconds: float | None
    age_of: Literal["event", "step"]


def batch_of(body: bytes, ids: Mapping[str, int]) -> ClickBatch:
    """The batch that a request's body describes, with labels of zero.

    Args:
        body: the JSON of a `PredictionRequest`.
        ids: how many ids the model knows of each sparse feature: they are from 0 up to there.

    Raises:
        InvalidInput: it is no such JSON, or an id is beyond; the message names the first place that is wrong.
    """
    try:
        events = PredictionRequest.model_validate_json(body).events
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidInput(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error
    features = _features(events)
    for name, values in {**features.ids, "history": features.history}.items():
        if (values >= ids[name]).any():
            raise InvalidInput(f"{name}: {values.max()}, expected ids below {ids[name]}")
    return click_batch(features)


def _features(events: list[Event]) -> Features:
    history = [event.history for event in events]
    return Features(
        index=np.arange(len(events)),
        label=np.zeros(len(events), np.float32),
        dense=np.array([event.dense for event in events], np.float32),
        ids={name: np.array([getattr(event, name) for event in events], np.int64) for name in _SINGLE},
        history=np.array([item for items in history for item in items], np.int64),
        history_lengths=np.array([len(items) for items in history], np.int32),
    )


def request_of(features: Features) -> bytes:
    """The JSON that asks for the scores of these events, without their labels."""
    ends = np.cumsum(features.history_lengths)[:-1]
    columns = {
        "dense": features.dense.tolist(),
        **{name: features.ids[name].tolist() for name in _SINGLE},
        "history": [items.tolist() for items in np.split(features.history, ends)],
    }
    events = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps({"events": events}).encode()
