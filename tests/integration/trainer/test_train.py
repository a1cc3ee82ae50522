"""The example's `train.py` under torchrun against a real service: every row arrives, and a checkpoint goes on."""

from pathlib import Path

import numpy as np
import pytest
from tests.integration.trainer.following import published_rows, subscriber
from tests.support.process import ServiceProcess
from tests.support.ranks import torchrun

from deltasync.client import NumpyTarget
from deltasync.trainer.example.results import trainer_facts, trainer_tables, unequal_rows

SIZES = ["--users", "500", "--items", "300", "--cross-buckets", "200", "--dim", "8", "--batch-size", "32"]


def train(service: ServiceProcess, folder: Path, events: int, *ways: str) -> None:
    folder.mkdir()
    stream = ["--events", str(events), "--events-per-second", "1e6", *SIZES, *ways]
    kept = ["--checkpoint", str(folder.parent / "checkpoint"), "--results", str(folder)]
    publish = ["--service", service.grpc, "--publish-every", "3"]
    torchrun("-m", "deltasync.trainer.example.train", *publish, *stream, *kept)


@pytest.mark.nightly
@pytest.mark.parametrize("ways", [(), ("--managed",)], ids=["plain", "managed"])
def test_replica_equals_the_trainer_also_after_a_restart(
    ways: tuple[str, ...], service: ServiceProcess, tmp_path: Path
) -> None:
    target = NumpyTarget()
    with subscriber(service, target) as replica:
        train(service, tmp_path / "first", 640, *ways)
        head = service.get_json("/consumers/predictors")["head"]
        assert head > 1, "the last steps are a version of their own"
        assert head + sum(each["absorbed"] for each in trainer_facts(tmp_path / "first", 2)) >= 20 // 3
        replica.wait_for(head, 30)
        trainer = trainer_tables(tmp_path / "first", 2)
        assert unequal_rows(trainer, target.tables) == {}
        assert all(np.isfinite(rows).all() for rows in trainer.values())
        first = published_rows(service)
        assert first > sum(len(rows) for rows in trainer.values())

        train(service, tmp_path / "second", 640 + 96, *ways)
        assert published_rows(service) - first < 1000 < first, (
            "a run that continues publishes only what it changes"
        )
        replica.wait_for(service.get_json("/consumers/predictors")["head"], 30)
        assert unequal_rows(trainer_tables(tmp_path / "second", 2), target.tables) == {}
