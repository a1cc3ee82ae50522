"""Consumers that follow kept versions: their replicas hold exactly those, while the trainer goes on."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.support.command import deltasync
from tests.support.fleet import ITEM, TABLES, USER, Trainer, as_sent, follow, held, wait_for_lag
from tests.support.metrics import samples_of
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for

from deltasync.base.errors import Contradiction, NotFound
from deltasync.cli.output import size
from deltasync.client import Admin, Endpoint, NumpyTarget
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.value_types import ValueType

POLICIES = {
    "ranked": Policy(top_k=3),
    "int8": Policy(value_type=ValueType.INT8),
    "budget": Policy(max_bytes=200),
}
VALUE_TYPES = {"int8": ValueType.INT8}
CONSUMERS = ["predictors", *POLICIES]


def in_sync_with(service: RunningService, consumer: str, version: int, replicas: int = 1) -> dict[str, Any]:
    found = version, "in sync", replicas
    return wait_for_lag(service, consumer, lambda lag: (lag["head"], lag["state"], len(lag["replicas"])) == found)


def named(target: NumpyTarget) -> tuple[int, str, dict[str, bytes]]:
    """What readers are told of the version, with the rows that they see."""
    with target.reading() as reading:
        rows = {name: rows.tobytes() for name, rows in reading.tables.items()}
        assert target.newest().kept == reading.kept
        return reading.version, reading.kept, rows


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies=POLICIES, progress_seconds=0.05) as service:
        yield service


@pytest.fixture
def admin(service: RunningService) -> Admin:
    return Admin(Endpoint(service.http, TOKEN))


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_fleet_is_rolled_back_and_goes_on(service: RunningService, admin: Admin, consumer: str) -> None:
    target, late = NumpyTarget(), NumpyTarget()
    value_type = VALUE_TYPES.get(consumer, ValueType.FP32)
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target):
        trainer.publish_all()
        trainer.delete(USER, [7])
        good = trainer.expected(value_type)
        admin.keep_version("clicks", "good")
        trainer.set(USER, 7, 2.5)
        for _ in range(3):
            trainer.change(20)
        admin.follow_version(consumer, "good")
        lag = in_sync_with(service, consumer, 2)
        assert "version 2 (good) since" in lag["follows"]
        assert held(target) == good
        trainer.change(20)
        with follow(service, consumer, "b", late):
            in_sync_with(service, consumer, 2, replicas=2)
            assert held(late) == held(target) == good
        admin.follow_version(consumer, "live")
        trainer.change(20)
        wait_for(lambda: held(target) == trainer.expected(value_type))


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_reading_has_the_name_of_its_rows_and_no_other(
    service: RunningService, admin: Admin, consumer: str, tmp_path: Path
) -> None:
    checkpoints = str(tmp_path / "data/checkpoints")
    targets, value_type = [NumpyTarget(), NumpyTarget(reads="copies")], VALUE_TYPES.get(consumer, ValueType.FP32)

    def all_hold(version: int, kept: str) -> None:
        wait_for(lambda: [named(each)[:2] for each in targets] == [(version, kept)] * len(targets))
        assert all(named(each)[2] == rows[version] for each in targets)

    with Trainer(service.grpc) as trainer, ExitStack() as stack:
        for at, target in enumerate(targets):
            stack.enter_context(follow(service, consumer, str(at), target))
        trainer.publish_all()
        rows = {1: trainer.expected(value_type)}
        all_hold(1, "")
        admin.keep_version("clicks", "good")
        admin.follow_version(consumer, "good")
        all_hold(1, "good")
        admin.follow_version(consumer, "live")  # It has no newer version.
        all_hold(1, "")
        admin.keep_version("clicks", "same")
        admin.keep_version("clicks")
        admin.follow_version(consumer, "same")
        all_hold(1, "same")
        admin.follow_version(consumer, "good")
        all_hold(1, "good")
        trainer.change(20)
        rows[2] = trainer.expected(value_type)
        admin.keep_version("clicks")
        admin.follow_version(consumer, 2)
        all_hold(2, "")  # It has no name.
        admin.follow_version(consumer, "good")
        all_hold(1, "good")
        with follow(service, consumer, "late", late := NumpyTarget()) as replica:
            wait_for(lambda: named(late) == (1, "good", rows[1]))
            position = replica.held
        admin.make_checkpoint("clicks")
        # It goes on from its position, with rows and without a name that an earlier process has stored.
        again = NumpyTarget()
        again.tables = late.tables
        with follow(service, consumer, "late", again, held=position):
            wait_for(lambda: named(again) == (1, "good", rows[1]))
        # The checkpoint has the name, too. The pause keeps the newer release from the new replica.
        admin.follow_version(consumer, "live")
        wait_for(lambda: [named(each)[1] for each in targets] == [""] * len(targets))
        admin.pause_consumer(consumer)
        with follow(service, consumer, "from-disk", start := NumpyTarget(), checkpoints=checkpoints):
            wait_for(lambda: named(start) == (1, "good", rows[1]))


def test_a_consumer_follows_its_version_through_a_restart(tmp_path: Path) -> None:
    target, histories = NumpyTarget(), set[str]()
    for start in range(3):
        with RunningService(tmp_path / "data", policies=POLICIES) as service:
            admin = Admin(Endpoint(service.http, TOKEN))
            with Trainer(service.grpc, run=f"run-{start}", started=start + 1, seed=start) as trainer:
                trainer.publish_all()
                if start == 0:
                    good = trainer.expected()
                    admin.keep_version("clicks", "good")
                    trainer.change(20)
                    admin.follow_version("predictors", "good")
                with follow(service, "predictors", "a", target):
                    lag = in_sync_with(service, "predictors", 1)
                    assert held(target) == good
                    assert named(target)[:2] == (1, "good")
                    if start:
                        with follow(service, "predictors", "late", late := NumpyTarget()):
                            wait_for(lambda: named(late) == (1, "good", good))  # noqa: B023
                    histories.add(lag["history"])
    assert len(histories) == 1, "the view was rebuilt from its checkpoint and the log, with the kept version"


def test_what_cannot_be_followed_or_released_is_refused(service: RunningService, admin: Admin) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin.keep_version("clicks", "good")
        with pytest.raises(NotFound, match="has no kept version '99999"):
            admin.follow_version("predictors", "9" * 5000)
        with pytest.raises(NotFound, match="has no kept version 'bad'; kept versions: good"):
            admin.follow_version("predictors", "bad")
        admin.follow_version("predictors", 1)
        with pytest.raises(Contradiction, match="is followed by predictors"):
            admin.release_version("clicks", "good")
    with pytest.raises(Contradiction, match="may be in the kept version that consumers follow"):
        admin.delete_table("clicks", "user")
    admin.follow_version("predictors", "live")
    admin.release_version("clicks", "good")
    wait_for_lag(service, "predictors", lambda lag: lag["follows"] == "")


def test_followers_are_listed_with_the_cost_of_following(
    service: RunningService, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow_by_command(*version: str) -> list[str]:
        _, out, err = deltasync("consumers", "follow", "predictors", *version, "--service", service.http)
        return (out + err).splitlines()

    def samples() -> tuple[float, float]:
        found = samples_of(service)
        follows = found["deltasync_consumer_follows_seconds", (("consumer", "predictors"),)]
        return found["deltasync_model_kept_versions", (("model", "clicks"),)], follows

    monkeypatch.setenv("DELTASYNC_TOKEN", TOKEN)
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        kept = admin.keep_version("clicks", "good")
        trainer.change(20)
        other = admin.keep_version("clicks")
        assert samples() == (2, 0)
        assert follow_by_command("--version", "good") == [
            f"the service loads kept version 1 (good): {size(kept['bytes'])}",
            "consumer predictors follows version good",
        ]
        wait_for(lambda: samples()[1] > 0)
        assert [each["followers"] for each in admin.kept_versions("clicks")] == [["predictors"], []]
        _, listed, _ = deltasync("versions", "list", "clicks", "--service", service.http)
        assert [line.split()[-1] for line in listed.splitlines()[1:]] == ["predictors", other["by"].split()[-1]]
        assert follow_by_command("--version", "2") == [
            f"the service loads kept version 2: {size(other['bytes'])}",
            "consumer predictors follows version 2",
        ]
        assert [each["followers"] for each in admin.kept_versions("clicks")] == [[], ["predictors"]]
        (refused,) = follow_by_command("--version", "bad")
        assert "has no kept version 'bad'" in refused
        assert follow_by_command("--live") == ["consumer predictors follows the newest version"]
        admin.release_version("clicks", "good")
        wait_for(lambda: samples() == (1, 0))  # Requests within 0.1 s share the metrics.


@pytest.mark.parametrize("seed", range(3))
def test_every_fleet_holds_what_it_follows_whatever_happens(tmp_path: Path, seed: int) -> None:
    """Dictionaries say what the trainer's tables were at each kept version, and who follows which."""

    def wanted(consumer: str) -> dict[str, bytes]:
        return trainer.expected(VALUE_TYPES.get(consumer, ValueType.FP32))

    random, follows = Random(seed), dict.fromkeys(CONSUMERS, 0)
    kept, rows = dict[int, dict[str, dict[str, bytes]]](), dict[int, tuple[Position, dict[str, Values]]]()
    targets = {consumer: NumpyTarget() for consumer in CONSUMERS}
    with RunningService(tmp_path / "data", policies=POLICIES) as service, ExitStack() as stack:
        admin = Admin(Endpoint(service.http, TOKEN))
        trainer = stack.enter_context(Trainer(service.grpc, seed=seed))
        at = trainer.publish_all()
        for consumer, target in targets.items():
            stack.enter_context(follow(service, consumer, "a", target))
        for turn in range(12):
            match random.choice(["change", "delete", "keep", "follow", "follow", "checkpoint", "roll back"]):
                case "change":
                    at = trainer.change(random.randrange(1, 30))
                case "delete":
                    at = trainer.delete(USER, sorted(random.sample(range(USER.rows), 3)))
                case "checkpoint":
                    admin.make_checkpoint("clicks")
                case "keep":
                    assert admin.keep_version("clicks")["version"] == at.number
                    kept[at.number] = {each: wanted(each) for each in CONSUMERS}
                    rows[at.number] = at, {name: some.copy() for name, some in trainer.rows.items()}
                case "roll back" if kept:
                    to = random.choice([*kept])
                    admin.roll_back("clicks", to)
                    with pytest.raises(Contradiction, match=f"rolled back to version {to}"):
                        trainer.change(1)
                    before, old = rows[to]
                    run, now = f"run-{turn}", time.time_ns()
                    trainer = Trainer(service.grpc, run=run, started=now, seed=turn, continues=before)
                    trainer.rows = {name: some.copy() for name, some in old.items()}
                    stack.enter_context(trainer)
                    at = trainer.change(5)
                case "follow":
                    consumer = random.choice(CONSUMERS)
                    follows[consumer] = random.choice([0, *kept])
                    admin.follow_version(consumer, follows[consumer] or "live")
            for consumer, version in follows.items():
                if version:
                    in_sync_with(service, consumer, version)
                    assert held(targets[consumer]) == kept[version][consumer]
        for consumer in CONSUMERS:
            admin.follow_version(consumer, "live")
            wait_for(lambda: held(targets[consumer]) == wanted(consumer))  # noqa: B023


def test_a_new_policy_keeps_the_version_and_a_rollback_sends_differences(
    service: RunningService, admin: Admin
) -> None:
    target, late = NumpyTarget(), NumpyTarget()
    with Trainer(service.grpc) as trainer, follow(service, "ranked", "a", target):
        trainer.publish_some({USER: 2, ITEM: 2})  # The other rows are born after the kept version.
        good = trainer.expected()
        admin.keep_version("clicks", "good")
        wait_for_lag(service, "ranked", lambda lag: lag["state"] == "in sync")
        trainer.change(40)
        wait_for_lag(service, "ranked", lambda lag: lag["state"] == "current" and lag["release"]["version"] == 2)
        admin.follow_version("ranked", "good")
        lag = in_sync_with(service, "ranked", 1)
        assert 0 < lag["release"]["rows"] <= 10, "those that the ranked releases sent, and none that they left"
        assert held(target) == good
        admin.update_consumer("ranked", Policy(top_k=4))
        with follow(service, "ranked", "b", late):
            in_sync_with(service, "ranked", 1, replicas=2)
            assert held(late) == held(target) == good
        admin.pause_consumer("ranked")
        admin.update_consumer("ranked", Policy(value_type=ValueType.FP16))
        admin.resume_consumer("ranked")
        lag = in_sync_with(service, "ranked", 1)
        rows = {each: np.frombuffer(good[each.name], each.dtype).reshape(-1, each.dim) for each in TABLES}
        assert held(target) == {
            each.name: as_sent(each, some, ValueType.FP16).tobytes() for each, some in rows.items()
        }
        assert lag["damages"] == 0


def test_a_table_that_was_deleted_since_does_not_cost_the_view(tmp_path: Path) -> None:
    histories = set[str]()
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        admin = Admin(Endpoint(service.http, TOKEN))
        with Trainer(service.grpc) as trainer, follow(service, "ranked", "a", NumpyTarget()):
            trainer.publish_all()
            admin.keep_version("clicks", "good")
            trainer.change(5)
            admin.follow_version("ranked", "good")
            in_sync_with(service, "ranked", 1)
            admin.follow_version("ranked", "live")
            lag = wait_for_lag(service, "ranked", lambda lag: lag["release"]["version"] == 2)
            histories.add(lag["history"])
        admin.delete_table("clicks", "item")
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        histories.add(service.get_json("/consumers/ranked")["history"])
    assert len(histories) == 1
