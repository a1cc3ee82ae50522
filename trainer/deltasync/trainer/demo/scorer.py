"""Scoring events by a model, and by a copy of it that is frozen at some point of the stream."""

import copy

import numpy as np
import torch

from deltasync.trainer.clicks.batch import ClickBatch, click_batch
from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.features import Featurizer
from deltasync.trainer.clicks.model import ClickModel


class Scorer:
    """Scores a stream, batch by batch, and keeps the scores if asked to.

    Attributes:
        batches: batches scored so far.
    """

    def __init__(self, model: ClickModel, featurizer: Featurizer, freeze_at: int | None, keep: bool) -> None:
        self._model = model
        self._featurizer = featurizer
        self._freeze_at = freeze_at
        self._keep = keep
        self._frozen: ClickModel | None = None
        self._last: ClickBatch | None = None
        self._scores: list[dict[str, torch.Tensor]] = []
        self.batches = 0

    def score(self, events: Events) -> None:
        """Score a batch with the weights the model has now; freeze a copy of them when it is time."""
        if self._freeze_at is not None and self._frozen is None and int(events.index[-1]) >= self._freeze_at:
            self._frozen = copy.deepcopy(self._model)
        self._last = batch = click_batch(self._featurizer.features(events))
        scores = {"index": batch.index, "label": batch.label, "logit": outputs(self._model, batch)}
        if self._freeze_at is not None:
            scores["frozen"] = outputs(self._frozen, batch) if self._frozen else scores["logit"]
        if self._keep:
            self._scores.append(scores)
        self.batches += 1

    def columns(self) -> dict[str, np.ndarray]:
        """Index, label, logit and, with a frozen copy, its logit of every event scored."""
        if not self._scores:
            return {}
        return {name: torch.cat([scores[name] for scores in self._scores]).numpy() for name in self._scores[0]}

    def last_outputs(self) -> dict[str, np.ndarray]:
        """Index, and logit by the weights the model has now, of the events of the last batch."""
        if self._last is None:
            return {}
        return {"index": self._last.index.numpy(), "logit": outputs(self._model, self._last).numpy()}


def outputs(model: ClickModel, batch: ClickBatch) -> torch.Tensor:
    """Log odds of a click for each event of a batch, without gradients."""
    with torch.no_grad():
        return model.logits(batch.dense, batch.sparse)
