"""The example's `train.py` under torchrun against a real service: every row arrives, and a checkpoint goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.integration.trainer.following import published_rows, subscriber
from tests.support.command import deltasync
from tests.support.process import ServiceProcess
from tests.support.ranks import torchrun

from deltasync.client import NumpyTarget
from deltasync.trainer.example.compare import Tables, id_map_shards, load_state, trainer_tables, unequal_rows

SIZES = ["--users", "500", "--items", "300", "--cross-buckets", "200", "--dim", "8", "--batch-size", "32"]


def train(service: ServiceProcess, folder: Path, events: int, *ways: str) -> None:
    folder.mkdir()
    stream = ["--events", str(events), "--events-per-second", "1e6", *SIZES, *ways]
    kept = ["--checkpoint", str(folder.parent / "checkpoint"), "--results", str(folder)]
    kept += ["--tensorboard", str(folder.parent / "scalars"), "--tensorboard-lag", "predictors"]
    endpoint = folder.parent / "endpoint.toml"
    endpoint.write_text(f'address = "{service.grpc}"\nhttp = "{service.http}"\n')
    publish = ["--endpoint", str(endpoint), "--publish-every", "3"]
    torchrun("-m", "deltasync.trainer.example.train", *publish, *stream, *kept)


def absorbed_cuts(folder: Path) -> int:
    """Steps that were to publish while a cut was under way on some rank: how many, the machine decides."""
    return sum(json.loads((folder / f"trainer-{rank}.json").read_text())["absorbed"] for rank in range(2))


def trainer_state(folder: Path) -> Tables:
    """Everything the trainer holds, as it is published."""
    _, buffers = load_state(folder / "state-trainer-0.pt")
    maps = {
        f"managed._managed_collision_collection._managed_collision_modules.{name}.raw_ids": np.concatenate(
            [shard.ids[:, np.newaxis] for shard in shards]
        )
        for name, shards in id_map_shards(folder, 2).items()
    }
    return trainer_tables(folder, 2) | maps | {name: values.reshape(1, -1) for name, values in buffers.items()}


def held(target: NumpyTarget) -> Tables:
    """The same of a replica: what unknown ids take is no state of the trainer's."""
    return {name: rows for name, rows in target.tables.items() if not name.endswith(".id_ranges")}


def scalars(folder: Path) -> set[str]:
    """The names of the scalars in a folder."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ways",
    [(), ("--grad-accum", "2"), ("--managed",)],
    ids=["plain", "micro-batches", "managed"],
)
def test_a_replica_holds_the_trainers_rows_and_a_checkpoint_goes_on(
    ways: tuple[str, ...], service: ServiceProcess, tmp_path: Path
) -> None:
    target = NumpyTarget()
    with subscriber(service, target) as replica:
        train(service, tmp_path / "first", 640, *ways)
        head = service.get_json("/consumers/predictors")["head"]
        assert head > 1, "the last steps are a version of their own"
        assert head + absorbed_cuts(tmp_path / "first") >= 20 // 3
        replica.wait_for(head, 30)
        trainer = trainer_state(tmp_path / "first")
        assert unequal_rows(trainer, held(target)) == {}
        assert all(np.isfinite(rows).all() for rows in trainer.values())
        first = published_rows(service)
        assert first > sum(len(rows) for rows in trainer.values())

        train(service, tmp_path / "second", 640 + 96, *ways)
        assert published_rows(service) - first < 1000 < first, (
            "a run that continues publishes only what it changes"
        )
        replica.wait_for(service.get_json("/consumers/predictors")["head"], 30)
        assert unequal_rows(trainer_state(tmp_path / "second"), held(target)) == {}
    assert len(list((tmp_path / "scalars").glob("rank-*/events.out.tfevents.*"))) == 4
    told, others = scalars(tmp_path / "scalars/rank-0"), scalars(tmp_path / "scalars/rank-1")
    assert {"train/loss", "deltasync/tracking_seconds_per_step"} <= told & others
    assert told - others == {f"lag/predictors_{name}" for name in ("versions", "rows", "seconds")}
    code, found, said = deltasync(
        *("verify", "predictors", "--service", service.grpc, "--json"),
        *("--torch-checkpoint", str(tmp_path / "checkpoint")),
    )
    tables = json.loads(found)
    managed = "--managed" in ways  # A checkpoint has no maps of raw ids: that these are not held is said.
    assert (code, {each["version"] for each in tables}) == (3 if managed else 0, {replica.version.number}), said
    stored = {each["table"] for each in tables if each["status"] == "equal"}
    assert {each["status"] for each in tables} == {"equal"} or "--managed" in ways
    assert all(each["rows"] and not each["changed"] for each in tables if each["table"] in stored)
    assert stored == {each["table"] for each in tables if not each["table"].endswith((".raw_ids", ".id_ranges"))}
