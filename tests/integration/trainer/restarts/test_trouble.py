"""Publishing that is refused, or impossible: training goes on, what it changes is published once that is over."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.following import WAIT, Trainer, expect
from tests.support.server import RunningService

from deltasync.base.errors import DeltasyncError, InvalidInput, RunRefused
from deltasync.base.process import this_process
from deltasync.trainer.sync import OnRefusal, PublishFailure, SyncOptions


@pytest.fixture
def trainer(running: RunningService) -> Iterator[Trainer]:
    trainer = Trainer(running.grpc)
    trainer.sync.flush(WAIT)
    yield trainer
    trainer.sync.abort()


def test_a_row_of_nan_stops_publishing_until_it_is_finite_again(
    running: RunningService, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    assert trainer.sync.trouble == ""
    trainer.weight[2, 1] = float("nan")
    with caplog.at_level(logging.INFO):
        trainer.step_until("table '0.weight': row 2 holds nan in column 1")
        refusals = trainer.sync.stats.refusals
        while trainer.sync.stats.refusals < refusals + 2:
            trainer.step()
    said = [each.getMessage() for each in caplog.records if each.name == "deltasync.trainer.sync"]
    assert len(said) == 1, "once, however often it is tried"
    assert trainer.sync.stats.cuts[-1][0] == 1
    trainer.weight[2, 1] = 7.0
    trainer.step_until("")
    assert trainer.sync.stats.cuts[-1][0] == 2
    expect(running, trainer.sync, trainer.model)


def test_a_long_retry_pause_is_not_a_stall(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    trainer.sync._stall._now = trainer.sync._publish_failure._now = lambda: now[0]
    trainer.weight[2, 1] = float("nan")
    trainer.step_until_refused()
    refusals, trainer.sync._publish_failure._due = trainer.sync.stats.refusals, 300.0
    for _ in range(4):
        now[0] += 61.0
        trainer.step()
    assert trainer.sync.stats.refusals == refusals
    assert "again" not in caplog.text


def test_how_publishing_goes_is_told_as_numbers(running: RunningService, trainer: Trainer) -> None:
    before = trainer.sync.metrics()
    assert before == before | {"version": 1, "cuts": 1, "unpublished_steps": 0, "connected": 1, "connections": 1}
    assert before == before | dict.fromkeys(("refusals", "refused_seconds", "disconnected_seconds"), 0)
    assert before["rows"] == trainer.sync.stats.rows
    trainer.weight[2, 1] = float("nan")
    trainer.step_until_refused()
    refused = trainer.sync.metrics()
    assert refused["refusals"] == trainer.sync.stats.refusals > 0
    assert refused["refused_seconds"] > 0
    assert refused["unpublished_steps"] == trainer.sync.tracker.steps - trainer.sync.stats.cuts[-1][1] > 0
    assert (refused["version"], refused["connected"]) == (1, 0)
    trainer.weight[2, 1] = 7.0
    trainer.sync.flush(WAIT)
    after = trainer.sync.metrics()
    assert after == after | {"version": 2, "cuts": 2, "unpublished_steps": 0, "refused_seconds": 0, "connected": 1}
    assert after["connections"] > 1, "each refusal ends one"
    assert all(type(value) in (int, float) for value in after.values())


def test_steps_before_a_checkpoint_are_not_unpublished_ones(running: RunningService, trainer: Trainer) -> None:
    saved = trainer.sync.state_dict()
    for _ in range(3):
        trainer.step()
    trainer.sync.flush(WAIT)
    trainer.sync.load_state_dict([saved])
    assert trainer.sync.metrics()["unpublished_steps"] == 0
    trainer.sync.abort()
    restarted = Trainer(running.grpc)
    saved = restarted.sync.state_dict()
    saved["tracker"]["steps"] = 1000
    restarted.sync.load_state_dict([saved])
    assert restarted.sync.metrics()["unpublished_steps"] == 0
    restarted.sync.abort()


def test_what_goes_back_to_a_checkpoint_is_published_without_a_pause(trainer: Trainer) -> None:
    """It is why one goes back: another try is not too soon."""
    now = [0.0]
    trainer.sync._publish_failure._now = lambda: now[0]
    saved, before = trainer.sync.state_dict(), trainer.weight.clone()
    trainer.weight[2, 1] = float("nan")
    trainer.step_until_refused()
    trainer.sync._publish_failure._due = 300.0
    trainer.weight[:] = before
    trainer.sync.load_state_dict([saved])
    assert "row 2 holds nan" in trainer.sync.trouble, "nothing is published yet"
    trainer.step_until("")
    assert trainer.sync.stats.cuts[-1][0] == 2


def test_what_cannot_be_read_stops_publishing_until_it_can(running: RunningService, trainer: Trainer) -> None:
    before = trainer.model[1].running_mean
    trainer.model[1].register_buffer("running_mean", torch.zeros(4))
    trainer.step_until("'1.running_mean' is [4] of torch.float32 now, and was [5]")
    trainer.model[1].register_buffer("running_mean", before)
    trainer.step_until("")
    expect(running, trainer.sync, trainer.model)


def test_a_flush_raises_what_could_not_be_published(trainer: Trainer) -> None:
    trainer.weight[2, 1] = float("nan")
    trainer.step()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="row 2 holds nan"):
            trainer.sync.flush(WAIT)
    assert "row 2 holds nan" in trainer.sync.trouble
    with pytest.raises(InvalidInput, match="row 2 holds nan"):
        trainer.sync.close(WAIT)


@pytest.mark.parametrize("options", [{"on_refusal": OnRefusal.RAISE}, {"verify": True}])
def test_a_step_raises_it_if_asked_to(running: RunningService, options: dict[str, Any]) -> None:
    trainer = Trainer(running.grpc, **options)
    trainer.sync.flush(WAIT)
    trainer.model[1].register_buffer("running_mean", torch.zeros(4))
    trainer.step()  # All ranks learn of it when they agree next.
    with pytest.raises(InvalidInput, match=r"'1.running_mean' is \[4\] of torch.float32 now, and was \[5\]"):
        trainer.step()
    trainer.sync.abort()
    assert running.get_json("/consumers/predictors")["head"] == 1


def test_of_two_trainers_of_a_model_the_later_one_publishes(running: RunningService, trainer: Trainer) -> None:
    later = Trainer(running.grpc)
    later.sync.flush(WAIT)
    with pytest.raises(RunRefused, match="which has taken over: stop run"):
        trainer.step_for_ever()
    assert trainer.sync.trouble.count(this_process()) == 2, "both are in this process"
    with pytest.raises(RunRefused, match="which has taken over: stop run"):
        trainer.sync.flush(WAIT)
    later.step()
    assert later.sync.flush(WAIT).number > 2
    assert later.sync.trouble == ""
    expect(running, later.sync, later.model)
    later.sync.abort()
    with pytest.raises(RunRefused, match="which has taken over: stop run"):
        trainer.sync.flush(WAIT)


def test_a_superseded_trainer_stays_so_after_the_service_lost_both_runs(
    tmp_path: Path,
) -> None:
    """However often it has to begin anew: it is no younger for that."""
    data = tmp_path / "data"
    with RunningService(data) as service:
        port = int(service.grpc.rpartition(":")[2])
        earlier, later = Trainer(service.grpc), Trainer(service.grpc)
        earlier.sync.flush(WAIT)
        later.sync.flush(WAIT)
    with RunningService(tmp_path / "empty", grpc_port=port) as service:
        earlier.step()
        earlier.sync.flush(WAIT)  # Of the other one, this service knows nothing yet.
        later.step()
        later.sync.flush(WAIT)
        earlier.step()
        with pytest.raises(RunRefused, match="which has taken over: stop run"):
            earlier.sync.flush(WAIT)
        expect(service, later.sync, later.model)
        for each in (earlier, later):
            each.sync.abort()


@pytest.mark.parametrize("begins_anew", ["resharded", "from a checkpoint"])
def test_a_superseded_trainer_does_not_continue_as_another_run(
    running: RunningService, trainer: Trainer, begins_anew: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, later = trainer.sync.state_dict(), Trainer(running.grpc)
    later.sync.close(WAIT)
    monkeypatch.setattr("deltasync.cuts.admission.GONE_SECONDS", 0.0)
    if begins_anew == "resharded":
        trainer.sync.tracker.attachments += 1
    else:
        trainer.sync.load_state_dict([saved])
    trainer.step()
    with pytest.raises(RunRefused, match=r"run [0-9a-f]{32}\+1 began before run .* taken over: stop run"):
        trainer.sync.flush(WAIT)


def test_trouble_and_metrics_say_that_the_service_cannot_be_reached(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        port = int(service.grpc.rpartition(":")[2])
        trainer = Trainer(service.grpc)
        assert trainer.sync.metrics()["connections"] == 0, "it connects with its first cut"
        trainer.sync.flush(WAIT)
    trainer.step_until(service.grpc)
    while not trainer.sync.metrics()["failed_attempts"]:
        trainer.step()
    assert trainer.sync.metrics()["disconnected_seconds"] > 0
    assert trainer.sync.stats.refusals == 0, "nobody has refused anything"
    with RunningService(tmp_path / "data", grpc_port=port) as service:
        trainer.sync.flush(WAIT)
        assert trainer.sync.trouble == ""
        trainer.sync.abort()


def test_wrong_options_are_an_error_at_once(running: RunningService) -> None:
    with pytest.raises(InvalidInput, match="on_refusal: 'raise', expected an OnRefusal"):
        Trainer(running.grpc, on_refusal="raise")
    with pytest.raises(InvalidInput, match="model"):
        SyncOptions(service=running.grpc, model="a/b")


def test_pauses_between_tries_are_counted_in_time(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    failure = PublishFailure(lambda: now[0])
    assert failure.allows_attempt
    for tries in range(20):
        failure.record(DeltasyncError("first" if tries < 10 else "second"))
        assert not failure.allows_attempt
        now[0] += min(0.1 * 2**tries, 300.0)
        assert failure.allows_attempt
    failure.record(DeltasyncError("second"))
    now[0] += 0.1 * 300.0 - 1.0
    assert not failure.allows_attempt, "each try sends everything: there is one in half a minute at most"
    assert [each.getMessage() for each in caplog.records] == [
        "nothing is published for now: first",
        "nothing is published for now: second",
    ]
    failure.clear()
    assert (failure.reason, failure.allows_attempt) == ("", True)
