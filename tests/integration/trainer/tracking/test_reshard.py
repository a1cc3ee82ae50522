"""A run goes on with other ranks and another plan: nothing is lost, and not everything is published again."""

from pathlib import Path

import pytest
from tests.integration.trainer.following import published_rows, subscriber
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

from deltasync.client import NumpyTarget
from deltasync.trainer.example.results import Tables, trainer_tables, unequal_rows

BATCH = 32
SIZES = ["--users", "500", "--items", "300", "--cross-buckets", "200", "--dim", "8", "--batch-size", str(BATCH)]


def train(service: ServiceProcess, folder: Path, steps: int, ranks: int) -> Tables:
    """Train up to a step; the trainer's tables after it."""
    folder.mkdir()
    stream = ["--events", str(steps * BATCH), "--events-per-second", "1e6", *SIZES]
    kept = ["--checkpoint", str(folder.parent / "checkpoint"), "--results", str(folder)]
    publish = ["--service", service.grpc, "--publish-every", "100"]
    run_ranks("-m", "deltasync.trainer.example.train", *publish, *stream, *kept, ranks=ranks)
    return trainer_tables(folder, ranks)


def changed_rows(before: Tables, after: Tables) -> int:
    """As they are published: a row of the table that is sharded by columns goes in two parts."""
    changed = unequal_rows(before, after)
    return sum(changed.values()) + changed["sparse.embedding_bags.history"]


@pytest.mark.nightly
def test_a_run_that_goes_on_with_other_ranks_publishes_what_it_changes(
    service: ServiceProcess, tmp_path: Path
) -> None:
    target = NumpyTarget()
    with subscriber(service, target) as replica:
        before = train(service, tmp_path / "first", 20, ranks=2)
        for run, (steps, ranks) in enumerate([(21, 1), (22, 2)]):
            published = published_rows(service)
            after = train(service, tmp_path / f"run{run}", steps, ranks)
            assert published_rows(service) - published == changed_rows(before, after) > 0
            replica.wait_for(service.get_json("/consumers/predictors")["head"], 30)
            assert unequal_rows(after, target.tables) == {}
            before = after
