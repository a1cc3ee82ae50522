"""Data loaders and `multiprocessing` fork a trainer: the parent goes on, and a child publishes nothing."""

from typing import Any

from tests.support.forked_child import answers_in_a_fork, error_of
from tests.support.server import RunningService
from torch import nn

from deltasync.trainer.sync import DeltaSync, SyncOptions

WAIT = 20.0


def test_a_forked_child_publishes_nothing_and_the_parent_goes_on(running: RunningService) -> None:
    options = SyncOptions(service=running.grpc, model="clicks", publish_every=1)
    with DeltaSync(nn.Linear(4, 5), options) as sync:
        sync.step()
        before = sync.flush(WAIT)

        def ask() -> dict[str, Any]:
            answers = {"step": error_of(sync.step), "flush": error_of(sync.flush)}
            sync.close()
            return answers

        answers = answers_in_a_fork(ask)
        assert all("was forked" in answer for answer in answers.values()), answers
        sync.mark_all()
        assert sync.flush(WAIT).number == before.number + 1
