"""Clocks that are an hour apart, or are set while all runs: no time is negative, and none absurd."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import Recorder, Trainer, admin_of, follow, lost, wait_for_lag
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream

from deltasync.client import Contradiction, Policy

HOUR = 3600
# As long as a test may take, on a machine that is busy.
SOON = 600


@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["set forward", "set back"])
def test_the_services_clock_is_set_while_all_runs(
    running: RunningService, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    admin_of(running).create_consumer("top", "clicks", Policy(top_k=3, ready_within_seconds=SOON - 1))
    target = Recorder()
    with Trainer(running.grpc) as trainer, ReplicaStream(running.grpc, replica="behind") as behind:
        trainer.publish_all()
        behind.until("release_end")
        with follow(running, "top", "t", target) as replica:
            replica.wait_until_ready(20)
            trainer.change(20)
            right = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: right() + ahead * 10**9)
            for name in ("predictors", "top"):  # Of what was made before.
                _check(running.get_json(f"/consumers/{name}"))
            trainer.change(20)
            head = trainer.change(20)
            wait_for_lag(running, "top", lambda lag: lag["head"] == head.number and lag["state"] == "in sync")
            assert replica.ready
            for name in ("predictors", "top"):
                _check(running.get_json(f"/consumers/{name}"))
            lag = running.get_json("/consumers/predictors")
            assert (lag["lag"]["versions"], lag["state"]) == (4, "behind")
            assert lag["lag"]["seconds"] > 0
            _check({name: value for (name, _), value in samples_of(running).items() if "_seconds_" not in name})


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_a_service_comes_back_with_another_clock_than_its_peers(tmp_path: Path, ahead: int) -> None:
    """Releases go out, replicas are ready and not forgotten, and the later run is the one that publishes."""
    arguments = ("--consumer", "predictors=clicks", "--replica-retention-seconds", str(SOON))
    policy = Policy(top_k=3, min_interval_seconds=0.1, max_age_seconds=0.5, ready_within_seconds=20)
    target, began = Recorder(), time.time_ns()
    with ServiceProcess(tmp_path / "data", *arguments) as service, ExitStack() as stack:
        admin_of(service).create_consumer("top", "clicks", policy)
        trainer = stack.enter_context(Trainer(service.grpc, started=began))
        replica = stack.enter_context(follow(service, "top", "t", target))
        with lost(follow(service, "predictors", "away", Recorder())) as away:
            away.wait_for(trainer.publish_all(), 20)
        trainer.change(20)
        replica.wait_for(2, 20)
        service.kill()
        service.ahead_seconds = ahead
        service.start()
        head = trainer.change(20)
        replica.wait_for(head, 20)
        wait_for_lag(service, "top", lambda lag: lag["state"] == "in sync" and not lag["lag"]["rows"])
        assert replica.ready
        assert target.bytes() == trainer.expected()
        for name in ("predictors", "top"):
            _check(service.get_json(f"/consumers/{name}"), most=2 * HOUR)
        assert [each["replica"] for each in service.get_json("/consumers/predictors")["replicas"]] == ["away"]
        with Trainer(service.grpc, run="later", started=began + 1) as later:
            if ahead > 0:
                assert later.publish_all().number == head.number + 1
            else:  # It cannot be told from a run of a machine whose clock is ahead, which nobody could follow.
                with pytest.raises(Contradiction, match="ahead of the service's clock: synchronise the clocks"):
                    later.publish_all()


def _check(answer: Any, name: str = "", most: float = SOON) -> None:
    """All ages in an answer are of this test."""
    if isinstance(answer, dict):
        for key, each in answer.items():
            _check(each, key, most)
    elif isinstance(answer, list):
        for each in answer:
            _check(each, name, most)
    elif "seconds" in name and isinstance(answer, float):
        assert 0 <= answer < most, name
