"""Trainers that are killed go on from the last checkpoint that they have saved meanwhile, on other ranks."""

from pathlib import Path

import pytest
from tests.integration.trainer.following import published_rows, subscriber
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

from deltasync.client import NumpyTarget
from deltasync.trainer.checkpoints import checkpoints_in
from deltasync.trainer.example.results import trainer_tables, unequal_rows

SIZES = ["--users", "6000", "--items", "4000", "--cross-buckets", "3000", "--dim", "8", "--batch-size", "32"]
KILLED = str(Path(__file__).with_name("killed_train.py"))


def options(service: ServiceProcess, steps: int) -> list[str]:
    stream = ["--events", str(steps * 32), "--events-per-second", "1e6", *SIZES]
    return [*stream, "--service", service.grpc, "--publish-every", "2", "--checkpoint-every", "5"]


@pytest.mark.nightly
def test_they_publish_what_came_after_it(service: ServiceProcess, tmp_path: Path) -> None:
    target, saved = NumpyTarget(), tmp_path / "checkpoints"
    with subscriber(service, target) as replica:
        with pytest.raises(AssertionError):
            run_ranks(KILLED, "18", str(saved), service.http, *options(service, 30), ranks=2)
        everything = sum(map(len, target.tables.values()))
        assert published_rows(service) > everything > 10_000
        for ranks in (1, 2):
            before, head = published_rows(service), service.get_json("/consumers/predictors")["head"]
            with pytest.raises(AssertionError):
                run_ranks(
                    KILLED, str(18 + 2 * ranks), str(saved), service.http, *options(service, 30), ranks=ranks
                )
            assert service.get_json("/consumers/predictors")["head"] > head
            assert 0 < published_rows(service) - before < everything / 2
            assert 1 <= len(checkpoints_in(saved)) <= 3, "the oldest is removed once the newest is there"
        results = tmp_path / "results"
        results.mkdir()
        last = ["-m", "deltasync.trainer.example.train", *options(service, 30), "--checkpoint", str(saved)]
        run_ranks(*last, "--results", str(results), ranks=2)
        replica.wait_for(service.get_json("/consumers/predictors")["head"], 30)
        assert unequal_rows(trainer_tables(results, 2), target.tables) == {}
        kept = sorted(each.name for each in saved.iterdir())
        assert (len(kept), kept[-1]) == (2, "step-000000000030"), "no step is left out, and nothing is left over"
