"""Poisoned updates stop at the service, and everybody says why."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import USER, Recorder, Trainer, admin_of, follow, wait_for_lag, wait_until_in_sync
from tests.support.metrics import samples_of
from tests.support.server import RunningService

from deltasync.client import InvalidInput, Policy

CONSUMERS = ("predictors", "top")
POLICIES = {"top": Policy(top_k=1000)}


def events(service: RunningService, kind: str) -> float:
    return samples_of(service)["deltasync_events_total", (("event", kind),)]


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (float("nan"), "table 'user'"),
        (1e6, "table 'user': row 7 has norm .*, more than 50 times .* so far"),
    ],
)
def test_a_cut_that_is_refused_reaches_nobody_and_is_told(tmp_path: Path, poison: float, said: str) -> None:
    target = Recorder()
    with (
        RunningService(tmp_path / "data", max_norm_growth=50.0) as service,
        follow(service, "predictors", "a", target),
    ):
        with Trainer(service.grpc) as trainer:
            head = trainer.publish_all()
            wait_until_in_sync(service, "predictors", head)
            good = trainer.expected()
            with pytest.raises(InvalidInput, match=said):
                trainer.set(USER, 7, poison)
        lag = wait_for_lag(service, "predictors", lambda lag: "cut was refused: table 'user'" in lag["reason"])
        assert (lag["state"], lag["head"]) == ("in sync", head.number)
        lines = {line["table"]: line["refused"] for line in service.get_json("/tables")}
        assert lines["user"]
        assert not lines["item"]
        (model,) = service.get_json("/models")
        assert model["refused"]["reason"] == lines["user"]
        assert events(service, "cut_refused") == 1
        assert target.bytes() == good
        with Trainer(service.grpc, run="s", started=2) as trainer:
            wait_until_in_sync(service, "predictors", trainer.publish_all())
        assert service.get_json("/models")[0]["refused"] is None
        assert "refused" not in service.get_json("/consumers/predictors")["reason"]


def test_a_limit_holds_over_a_restart(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    with (
        RunningService(tmp_path / "data", max_norm_growth=50.0) as service,
        Trainer(service.grpc, run="s", started=2) as trainer,
    ):
        trainer.rows["user"][3] = 1e6
        with pytest.raises(InvalidInput, match="row 3 has norm"):
            trainer.publish_all()


QUARANTINE: dict[str, Any] = {"max_norm_growth": 50.0, "poisoned": "quarantine"}


def test_in_quarantine_replicas_keep_the_last_good_version(tmp_path: Path) -> None:
    fleet = {name: Recorder() for name in CONSUMERS}
    with (
        RunningService(tmp_path / "data", policies=POLICIES, **QUARANTINE) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "a", fleet["predictors"]),
        follow(service, "top", "a", fleet["top"]),
    ):
        head = trainer.publish_all()
        for name in CONSUMERS:
            wait_until_in_sync(service, name, head)
        admin_of(service).pause_consumer("probes", "mine")
        good, value = trainer.expected(), trainer.rows["user"][7].copy()
        bad = trainer.set(USER, 7, 1e6)
        for name in CONSUMERS:
            lag = wait_for_lag(service, name, lambda lag: lag["head"] == bad.number)
            assert (lag["state"], lag["paused"]["by"]) == ("paused", "the service itself")
            assert "version 2 is in quarantine: table 'user': row 7 has norm" in lag["reason"]
            assert "was refused" not in lag["reason"]
            assert fleet[name].bytes() == good
        reason = service.get_json("/consumers/probes")["paused"]["reason"]
        assert reason.startswith("version 2 is in quarantine: ")
        assert reason.endswith("; mine")
        assert events(service, "cut_quarantined") == 1
        assert reason.startswith(trainer.publisher.quarantine)
        assert trainer.publisher.quarantine.startswith("version 2 is in quarantine: ")
        assert reason.startswith(service.get_json("/models")[0]["quarantine"])
        refused = {each["table"]: each["refused"] for each in service.get_json("/tables")}
        assert refused["user"] == trainer.publisher.quarantine
        trainer.rows["user"][7] = value
        trainer.set(USER, 7, 2e6)  # As much again, twice.
        again = trainer.publisher.quarantine
        assert again.startswith("2 versions from 2 to 3 are in quarantine: ")
        trainer.rows["user"][7] = value
        mended = trainer.set(USER, 7, 0.5)
        assert trainer.publisher.quarantine == again  # Replicas are kept from what is good, too.
        for name in CONSUMERS:
            admin_of(service).resume_consumer(name)
            wait_until_in_sync(service, name, mended)
            assert fleet[name].bytes() == trainer.expected()
            assert max(largest(fleet[name])) < 1e5  # Nobody was ever given it.
        assert service.get_json("/models")[0]["quarantine"] == again  # Of one more consumer.
        admin_of(service).resume_consumer("probes")
        assert service.get_json("/models")[0]["quarantine"] == ""
        trainer.set(USER, 7, 2e6)  # What operators have let pass is history.
        assert not trainer.publisher.quarantine


def test_a_consumer_that_comes_later_is_never_given_it(tmp_path: Path) -> None:
    policies = {"late": Policy(), "ranked": Policy(top_k=1000)}
    with (
        RunningService(tmp_path / "data", **QUARANTINE) as service,
        Trainer(service.grpc) as trainer,
    ):
        trainer.publish_all()
        trainer.set(USER, 7, 1e6)
        admin_of(service).create_consumer("late", "clicks", Policy())
    fleet = {name: Recorder() for name in policies}
    with (
        RunningService(tmp_path / "data", policies=policies, **QUARANTINE) as service,  # "ranked" is new.
        Trainer(service.grpc, run="s", started=2) as trainer,
        follow(service, "late", "a", fleet["late"]),
        follow(service, "ranked", "a", fleet["ranked"]),
    ):
        for name in policies:
            lag = wait_for_lag(service, name, lambda lag: len(lag["replicas"]) == 1)
            assert (lag["state"], lag["paused"]["by"]) == ("paused", "the service itself")
            assert "version 2 is in quarantine: table 'user': row 7 has norm" in lag["reason"]
        mended = trainer.publish_all()
        for name, target in fleet.items():
            assert not target.releases
            admin_of(service).resume_consumer(name)
            wait_until_in_sync(service, name, mended)
            assert target.bytes() == trainer.expected()
            assert max(largest(target)) < 1e5


def largest(target: Recorder) -> list[float]:
    """The largest value of each batch of rows that a replica was given."""
    return [np.abs(rows.values).max() for each in target.releases for rows in each.rows if len(rows.ids)]
