"""A model is rolled back to a kept version: its consumers follow, and its trainer is refused."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import ITEM, USER, Trainer, follow, held, wait_for_lag
from tests.support.server import TOKEN, RunningService

from deltasync.base.errors import NotFound, RunRefused
from deltasync.client import Admin, Endpoint, KeyedTarget, NumpyTarget, TableKind, TableSpec
from deltasync.core.policy import Policy

POLICIES = {"ranked": Policy(top_k=3), "budget": Policy(max_bytes=200), "pinned": Policy()}
LIVE = ["predictors", "ranked", "budget"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        yield service


@pytest.fixture
def admin(service: RunningService) -> Admin:
    return Admin(Endpoint(service.http, TOKEN))


def at(service: RunningService, consumer: str, version: int) -> None:
    wait_for_lag(service, consumer, lambda lag: (lag["head"], lag["state"]) == (version, "in sync"))


def test_all_live_fleets_follow_a_rollback_and_the_trainer_is_refused(
    service: RunningService, admin: Admin
) -> None:
    targets = {name: NumpyTarget() for name in LIVE}
    with (
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "a", targets["predictors"]),
        follow(service, "ranked", "a", targets["ranked"]),
        follow(service, "budget", "a", targets["budget"]),
    ):
        trainer.publish_some({USER: 2, ITEM: 1})  # The other rows are born later.
        trainer.delete(USER, [8])
        good = trainer.expected()
        admin.keep_version("clicks", "good")
        trainer.set(USER, 8, 2.5)
        trainer.change(30)
        later = trainer.delete(USER, [0, 2])
        with pytest.raises(NotFound, match="no kept version '1'; kept versions: good"):
            admin.roll_back("clicks", 1)
        newest = admin.roll_back("clicks", "good")
        assert newest == later.number + 1
        for name, target in targets.items():
            at(service, name, newest)
            assert held(target) == good, name
        with pytest.raises(RunRefused, match="rolled back to version 2: restart the trainer of run r from"):
            trainer.change(1)
    (cut,) = service.get_json("/versions?last=1")
    differing = 1 + 30 + 30 + 2  # At most.
    assert 0 < cut["rows"] <= differing + USER.rows // 2
    assert cut["run"].startswith("rollback-to-2-")


def test_a_rollback_outlives_a_restart_and_the_trainer_continues_from_it(tmp_path: Path) -> None:
    target = NumpyTarget()
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        admin = Admin(Endpoint(service.http, TOKEN))
        with Trainer(service.grpc) as trainer:
            kept = trainer.publish_all()
            good, rows = trainer.expected(), {name: each.copy() for name, each in trainer.rows.items()}
            admin.keep_version("clicks", "good")
            later = trainer.change(10)
            trainer.change(10)
            newest = admin.roll_back("clicks", 1)
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        admin = Admin(Endpoint(service.http, TOKEN))
        with follow(service, "predictors", "a", target):
            at(service, "predictors", newest)
            assert held(target) == good
            trainer = Trainer(service.grpc, run="r", started=1, continues=later)
            with (
                trainer,
                pytest.raises(RunRefused, match=f"version {later.number}, but the model was rolled back"),
            ):
                trainer.change(1)
            with (
                Trainer(service.grpc, run="reloaded", started=time.time_ns()) as trainer,
                pytest.raises(
                    RunRefused, match="no version, as without a DeltaSync state, but the model was rolled"
                ),
            ):
                trainer.publish_all()
            trainer = Trainer(service.grpc, run="second", started=time.time_ns(), continues=kept)
            trainer.rows = rows
            with trainer:
                version = trainer.change(5).number
                at(service, "predictors", version)
                assert held(target) == trainer.expected()
                joined = [each for each in service.get_json("/events") if each["event"] == "rank_joined"]
                assert f"the run holds version {newest}, the newest one" in joined[-1]["text"]


def test_a_run_without_a_state_follows_a_rollback_only_with_accept_any(
    service: RunningService, admin: Admin
) -> None:
    def begun(run: str, *, start_over: bool = False) -> Trainer:
        return Trainer(service.grpc, run=run, started=time.time_ns(), seed=7, start_over=start_over)

    target = NumpyTarget()
    with follow(service, "predictors", "a", target):
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            admin.keep_version("clicks", "good")
            trainer.change(30)
        newest = admin.roll_back("clicks", "good")
        at(service, "predictors", newest)
        good = held(target)
        for _ in range(2):
            with begun("reloaded") as trainer, pytest.raises(RunRefused, match=r"start_over=True.* --accept-any"):
                trainer.publish_all()
        assert service.get_json("/models")[0]["head"] == newest
        assert held(target) == good
        with begun("vouched", start_over=True) as trainer:
            at(service, "predictors", trainer.publish_all().number)
            assert held(target) == trainer.expected()
        with begun("later") as trainer:  # A version follows the rollback, so this is a restart like any other.
            trainer.publish_all()
        assert admin.roll_back("clicks", "good", accept_any=True) == newest + 3
        with begun("admitted") as trainer:
            at(service, "predictors", trainer.publish_all().number)
            assert held(target) == trainer.expected()


def test_maps_and_dense_tensors_go_back_with_the_rows(service: RunningService, admin: Admin) -> None:
    raw_ids = TableSpec("user.raw_ids", USER.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
    bias = TableSpec("over.bias", 1, 3, kind=TableKind.PARAMETER)
    target, keyed = NumpyTarget(), KeyedTarget()
    with (
        Trainer(service.grpc, [USER, raw_ids, bias]) as trainer,
        follow(service, "predictors", "a", target),
        follow(service, "pinned", "a", keyed),
    ):
        trainer.rows[raw_ids.name][:, 0] = np.arange(1, USER.rows + 1)
        trainer.publish_all()
        good = {name: rows.tobytes() for name, rows in trainer.rows.items()}
        admin.keep_version("clicks", "good")
        trainer.set(raw_ids, 7, 4711)  # Row 7 belongs to another raw id.
        trainer.set(bias, 0, 0.5)
        trainer.set(USER, 7, 2.5)
        newest = admin.roll_back("clicks", "good")
        for consumer in ("predictors", "pinned"):
            at(service, consumer, newest)
        assert held(target) == good
        with keyed.reading() as now:
            keys = now.tables[USER.name].keys()
            values, exist = now.tables[USER.name].lookup(keys)
            assert len(keys) == USER.rows
            assert exist.all()
            assert sorted(map(bytes, values)) == sorted(
                map(bytes, np.frombuffer(good[USER.name], "<f4").reshape(-1, 8))
            )
