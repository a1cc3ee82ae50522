"""The tracker in further ways to train: copies built from its deltas alone equal the weights.

By day, tests/integration/trainer/tracking does the same under every pipeline.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from tests.integration.trainer.pipelines.prepared import Prepared, Shift
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Batch, Regression, Training, batches
from tests.integration.trainer.tracking.follower import Follower
from tests.integration.trainer.tracking.rows import changed
from torch import nn

from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode


class OfTensorDicts(Regression):
    """The same, of batches that are TensorDicts."""

    def forward(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = self.over(torch.cat([self.bags(batch).values(), batch["dense"]], dim=1)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, batch["label"])
        return loss, loss.detach()


def as_tensordict(batch: Batch) -> TensorDict:
    return TensorDict({**batch.sparse.to_dict(), "dense": batch.dense, "label": batch.label}, batch_size=[])


def follow(module: nn.Module, stream: Iterable[Any], **options: Any) -> None:
    """Train on a stream, and see after each batch that consumers are given the rows that it has changed."""
    training = Training(module, BOTH_RANKS)
    tracker = Tracker(training.model, TrackerOptions(dense=True, verify=True, consumers=()))
    followers = [
        Follower(tracker, TrackingMode.EMBEDDING_LAST, 1, training.held),
        Follower(tracker, TrackingMode.EMBEDDING, 3, training.held),
    ]
    pipeline, iterator, seen = training.pipeline(**options), iter(stream), 0
    before = first = training.held()
    while True:
        try:
            pipeline.progress(iterator)
        except StopIteration:
            break
        if pipeline.stepped:
            tracker.step()
        now, seen = training.held(), seen + 1
        for follower in followers:
            follower.after(f"batch {seen}", changed(before, now), read=False)
        before = now
    for follower in followers:
        follower.after("the end", {}, read=True)
    assert not [problem for follower in followers for problem in follower.problems]
    assert all(changed(first, before).values()), "a table has not changed: the checks would pass anyway"


@SCENARIOS.scenario("tracked", ranks=2, nightly=True)
def float16_with_steps_that_overflow() -> None:
    follow(Regression(), batches(9), enable_amp=True, amp_dtype=torch.float16, loss_scale=2.0**17)


@SCENARIOS.scenario("tracked", ranks=2, nightly=True)
def preprocessing_called_twice() -> None:
    model = Prepared(lambda m, b: [m.shift(m.shift(b.sparse, 1), 4)], {"shift": Shift})
    follow(model(), batches(6))


@SCENARIOS.scenario("tracked", ranks=2, nightly=True)
def all_at_once() -> None:
    follow(OfTensorDicts(), map(as_tensordict, batches(10)), grad_accum=3, accumulate_tables=True, enable_amp=True)
