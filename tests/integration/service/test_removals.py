"""Forgetting replicas, and deleting tables and models: refused, done, and never half done."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.support.faults import Faults, Held, Hook
from tests.support.fleet import (
    AT_ONCE,
    ITEM,
    USER,
    Recorder,
    Trainer,
    admin_of,
    follow,
    lost,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.metrics import samples_of
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for
from torch import nn

from deltasync.cli.consumers import replicas
from deltasync.cli.tables import models, tables
from deltasync.client import (
    Admin,
    Contradiction,
    Endpoint,
    NotFound,
    NotPermitted,
    Policy,
    Position,
    ServiceFailed,
    TableSpec,
)
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.views.view import View

EXTRA = TableSpec("extra", 5000, 8)
ALL = [USER, EXTRA, ITEM]  # In the middle: slots after it move.
RIGHTS = {"DELTASYNC_TOKEN": TOKEN}
CONSUMERS = ("predictors", "top")


def checkpoint_files(data_dir: Path) -> list[Path]:
    return [path for path in (data_dir / "checkpoints").rglob("*") if path.is_file()]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies={"top": Policy(top_k=1000)}, releases=AT_ONCE) as service:
        yield service


def test_a_replica_that_is_away_is_forgotten(service: RunningService) -> None:
    admin = admin_of(service)
    with Trainer(service.grpc) as trainer:
        with (
            lost(follow(service, "predictors", "gone", Recorder())),
            follow(service, "predictors", "a", Recorder()),
        ):
            wait_until_in_sync(service, "predictors", trainer.publish_all(), 2)
            with pytest.raises(Contradiction, match="replica 'gone' of consumer 'predictors' is connected"):
                admin.forget_replica("predictors", "gone")
        wait_for_lag(service, "predictors", lambda lag: lag["state"] == "away")
        with pytest.raises(NotFound, match="replicas: gone"):
            admin.forget_replica("predictors", "a")
        with pytest.raises(NotPermitted):
            Admin(Endpoint(service.http, "wrong")).forget_replica("predictors", "gone")
        options = ["--service", service.http]
        done = CliRunner(env=RIGHTS).invoke(replicas, ["forget", "predictors", "gone", *options])
        assert done.output == "replica gone of consumer predictors is forgotten\n"
        assert service.get_json("/consumers/predictors")["replicas"] == []
        assert samples_of(service)["deltasync_events_total", (("event", "replica_forgotten"),)] == 1


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_a_table_disappears_and_the_others_stay(service: RunningService, restart: bool) -> None:
    admin, fleet = admin_of(service), {name: Recorder() for name in CONSUMERS}
    with Trainer(service.grpc, ALL) as trainer:
        for name, target in fleet.items():
            with lost(follow(service, name, "a", target)):
                wait_until_in_sync(
                    service, name, trainer.publish_all() if name == "predictors" else _head(service)
                )
        with pytest.raises(Contradiction, match="table 'extra' is published by rank 0 of run r: stop"):
            admin.delete_table("clicks", "extra")
    left = Trainer(service.grpc, [USER, ITEM], run="s", started=2, seed=1)
    with left:
        held = left.publish_all()
        done = CliRunner(env=RIGHTS).invoke(tables, ["delete", "clicks", "extra", "--service", service.http])
        assert done.output == "table extra of model clicks deleted\n"
        assert [line["table"] for line in service.get_json("/tables")] == ["user", "item"]
        _check_without(service, left, fleet)
        left.change(4)
        _check_without(service, left, fleet)
    if restart:
        service.stop()
        service.start()
        _check_without(service, left, fleet)
    with Trainer(service.grpc, ALL, run="t", started=3, seed=2) as again:  # Made anew.
        again.publish_all()
        assert [line["table"] for line in service.get_json("/tables")] == ["user", "item", "extra"]
        for name in CONSUMERS:
            target = Recorder()
            with follow(service, name, "a", target):
                wait_until_in_sync(service, name, _head(service))
                assert target.bytes() == again.expected()
    assert held.number == 2


def _head(service: RunningService) -> Position:
    return Position("", service.get_json("/models")[0]["head"])


def _wait_until_all_in_sync(service: RunningService) -> None:
    for name in CONSUMERS:
        wait_until_in_sync(service, name, _head(service))


def _undamaged(service: RunningService) -> bool:
    return samples_of(service)["deltasync_events_total", (("event", "replica_damaged"),)] == 0


def _check_without(service: RunningService, trainer: Trainer, fleet: dict[str, Recorder]) -> None:
    for name, target in fleet.items():
        with lost(follow(service, name, "a", target, held=target.position)):
            wait_until_in_sync(service, name, _head(service))
            wait_for_lag(service, name, lambda lag: len(lag["tables"]) == 2)
            assert target.bytes() == trainer.expected()


@pytest.mark.parametrize(("rows", "restart"), [(50, False), (5000, True), (6000, False)])
def test_a_replica_keeps_no_row_of_a_deleted_table_of_a_reused_name(
    service: RunningService, rows: int, restart: bool
) -> None:
    """Also where it was away meanwhile; and nobody says that it was damaged."""
    fleet, again = {name: Recorder() for name in CONSUMERS}, TableSpec("extra", rows, 8)
    with Trainer(service.grpc, ALL) as trainer:
        trainer.publish_all()
        for name, target in fleet.items():
            with lost(follow(service, name, "a", target)):
                wait_until_in_sync(service, name, trainer.change(3))
    _wait_until_nobody_publishes(service)
    admin_of(service).delete_table("clicks", "extra")
    with Trainer(service.grpc, [USER, ITEM, again], run="s", started=2, seed=1) as trainer:
        trainer.publish_some({again: 2})
        with follow(service, "top", "other", Recorder()) as other:
            other.wait_for(trainer.change(3), 20)
        if restart:
            service.stop()
            service.start()
        for name, target in fleet.items():
            with lost(follow(service, name, "a", target, held=target.position)):
                wait_until_in_sync(service, name, _head(service))
            assert target.bytes() == trainer.expected()
            assert sum("extra" in each.whole for each in target.releases) == 1
    assert _undamaged(service)


class Bags(nn.Module):
    """A predictor: it has room for all tables, whichever there are."""

    def __init__(self) -> None:
        super().__init__()
        for table in ALL:
            dtype = torch.float16 if table is ITEM else torch.float32
            setattr(self, table.name, nn.EmbeddingBag(table.rows, table.dim, dtype=dtype))

    def bytes(self) -> dict[str, bytes]:
        return {table.name: getattr(self, table.name).weight.detach().numpy().tobytes() for table in ALL}


@pytest.mark.parametrize(
    ("versions", "stays"),
    [
        (2, True),
        (0, False),
        pytest.param(0, True, marks=pytest.mark.nightly),
        pytest.param(2, False, marks=pytest.mark.nightly),
    ],
)
def test_a_module_keeps_no_row_of_a_deleted_table_of_a_reused_name(
    service: RunningService, versions: int, stays: bool
) -> None:
    """Also where versions without it have come between; and nobody says that it was damaged."""
    fleet = {name: Bags() for name in CONSUMERS}
    with Trainer(service.grpc, ALL) as trainer:
        trainer.publish_all()
    with contextlib.ExitStack() as followers:
        targets = {name: TorchTarget(module) for name, module in fleet.items()}
        each = {name: followers.enter_context(follow(service, name, "a", targets[name])) for name in CONSUMERS}
        _wait_until_all_in_sync(service)
        _wait_until_nobody_publishes(service)
        admin_of(service).delete_table("clicks", "extra")
        with Trainer(service.grpc, [USER, ITEM], run="s", started=2, seed=1) as left:
            for number in range(versions):
                left.change(3) if number else left.publish_all()
                _wait_until_all_in_sync(service)
        if not stays:
            for subscriber in each.values():
                subscriber.close()
        with Trainer(service.grpc, ALL, run="t", started=3, seed=2) as again:
            again.publish_some({EXTRA: 2})
            again.change(3)
            for name, module in fleet.items():
                if not stays:
                    held = each[name].held
                    followers.enter_context(follow(service, name, "a", TorchTarget(module), held=held))
                wait_until_in_sync(service, name, _head(service))
                assert module.bytes() == again.expected()
    assert _undamaged(service)


def test_a_table_is_deleted_though_the_last_cut_was_too_large(tmp_path: Path) -> None:
    """That is no reason to keep it; it may be the table that was."""
    narrow, wide = TableSpec("narrow", 10, 16), TableSpec("wide", 60_000, 16)
    with RunningService(tmp_path / "data", log_max_bytes=2 << 20) as service:
        with Trainer(service.grpc, [USER, narrow]) as trainer:
            trainer.publish_all()
        with (
            Trainer(service.grpc, [USER, wide], run="s", started=2) as trainer,
            pytest.raises(Contradiction, match="log-max-bytes"),
        ):
            trainer.publish_all()
        _wait_until_nobody_publishes(service)
        admin_of(service).delete_table("clicks", "narrow")
        assert {line["table"] for line in service.get_json("/tables")} == {"user"}


def _wait_until_nobody_publishes(service: RunningService) -> None:
    while any(rank["connected"] for rank in service.get_json("/trainers")):
        pass


def _leave_to_nobody(service: RunningService) -> None:
    """Wait until nobody publishes the model, and have nobody follow it."""
    _wait_until_nobody_publishes(service)
    for name in ("predictors", "probes"):
        admin_of(service).delete_consumer(name)


def test_a_model_is_deleted_whole(tmp_path: Path, service: RunningService) -> None:
    admin = admin_of(service)
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with pytest.raises(Contradiction, match="published by rank 0: stop the trainer first"):
            admin.delete_model("clicks")
    admin.make_checkpoint("clicks")
    assert checkpoint_files(tmp_path / "data")
    _wait_until_nobody_publishes(service)
    with pytest.raises(Contradiction, match=r"model 'clicks' has consumers \(predictors, probes, top\): delete"):
        admin.delete_model("clicks")
    for name in ("predictors", "probes", "top"):
        admin.delete_consumer(name)
    with pytest.raises(NotFound, match="no model 'no'; models: clicks"):
        admin.delete_model("no")
    done = CliRunner(env=RIGHTS).invoke(models, ["delete", "clicks", "--service", service.http])
    assert done.output == "model clicks deleted\n"
    assert service.get_json("/models") == []
    assert checkpoint_files(tmp_path / "data") == []
    admin.create_consumer("predictors", "clicks", Policy())
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target):  # Under its name, anew.
        head = trainer.publish_all()
        assert head.number == 1
        wait_until_in_sync(service, "predictors", head)
        assert target.bytes() == trainer.expected()


class _Fuse:
    """Whatever a deletion writes or removes after so many steps fails."""

    def __init__(self, left: int) -> None:
        self.left = left

    def burn(self) -> None:
        if self.left == 0:
            raise RuntimeError("the process ends here")
        self.left -= 1


@contextlib.contextmanager
def _failing_after(faults: Faults, step: int) -> Iterator[_Fuse]:
    """While a deletion fails after so many steps."""
    fuse = _Fuse(step)

    def burn(call: Hook, *arguments: Any, **named: Any) -> Any:
        fuse.burn()
        return call(*arguments, **named)

    def put(call: Hook, name: str, value: bytes | None, **named: Any) -> Any:
        return call(name, value, **named) if value is not None else burn(call, name, value, **named)

    with faults.log.replaced(put=put, truncate=burn), faults.place.replaced(remove=burn):
        yield fuse


# Of the log six before the files, three of a checkpoint, and the note that it is to be done.
STEPS = [pytest.param(step, marks=[] if step % 4 == 1 else pytest.mark.nightly) for step in range(10)]


@pytest.mark.parametrize("step", STEPS)
def test_a_deletion_that_is_cut_short_is_finished_at_the_next_start(tmp_path: Path, step: int) -> None:
    """Whichever of its steps is the last that was done."""
    with RunningService(tmp_path / "data") as service:
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
        _leave_to_nobody(service)
        admin_of(service).make_checkpoint("clicks")
        with _failing_after(service.faults, step) as fuse, pytest.raises(ServiceFailed):
            admin_of(service).delete_model("clicks")
        assert fuse.left == 0
    with RunningService(tmp_path / "data") as service:
        assert service.get_json("/models") == []
        assert checkpoint_files(tmp_path / "data") == []
        with Trainer(service.grpc) as trainer:
            assert trainer.publish_all().number == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_new_model_is_not_taken_for_one_whose_deletion_failed(tmp_path: Path, step: int) -> None:
    """Whichever step was refused."""
    with RunningService(tmp_path / "data") as service:
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            admin_of(service).make_checkpoint("clicks")
            trainer.change(3)
        _leave_to_nobody(service)
        with _failing_after(service.faults, step), pytest.raises(ServiceFailed):
            admin_of(service).delete_model("clicks")
        with Trainer(service.grpc, run="s", started=2, seed=1) as trainer:
            assert trainer.publish_all().number == 1
    with RunningService(tmp_path / "data") as service:
        assert [model["head"] for model in service.get_json("/models")] == [1]
        target = Recorder()
        with follow(service, "predictors", "a", target):
            wait_until_in_sync(service, "predictors", _head(service))
            assert target.bytes() == trainer.expected()


def test_a_table_that_is_written_down_as_deleted_is_gone_after_a_crash(
    tmp_path: Path, service: RunningService
) -> None:
    """A checkpoint still has its rows, and a view has it."""
    crashed, fleet = tmp_path / "crashed", {name: Recorder() for name in CONSUMERS}
    with Trainer(service.grpc, ALL) as trainer:
        trainer.publish_all()
        for name, target in fleet.items():
            with lost(follow(service, name, "a", target)):
                wait_until_in_sync(service, name, trainer.change(3))
    _wait_until_nobody_publishes(service)
    admin_of(service).make_checkpoint("clicks")

    def copied(put: Hook, name: str, *arguments: Any, **named: Any) -> Any:
        written = put(name, *arguments, **named)
        if name == "model/clicks":
            written.result(20)
            shutil.copytree(tmp_path / "data", crashed)
        return written

    with service.faults.log.replaced(put=copied):
        admin_of(service).delete_table("clicks", "extra")
    with RunningService(crashed, policies={"top": Policy(top_k=1000)}) as again:
        assert not [problem for each in admin_of(again).fsck() for problem in each["problems"]]
        assert [line["table"] for line in again.get_json("/tables")] == ["user", "item"]
        expected = {name: rows for name, rows in trainer.expected().items() if name != "extra"}
        for name, target in fleet.items():
            with follow(again, name, "a", target, held=target.position):
                wait_until_in_sync(again, name, _head(again))
                assert target.bytes() == expected


def test_a_view_of_a_deleted_table_is_not_taken_for_one_of_a_new_table(
    tmp_path: Path, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it had noticed: rows that the new table lacks were held by replicas."""
    crashed, target = tmp_path / "crashed", Recorder()
    with Trainer(service.grpc, ALL) as trainer:
        head = trainer.publish_all()
        with lost(follow(service, "top", "a", target)):
            wait_until_in_sync(service, "top", head)
    _wait_until_nobody_publishes(service)
    monkeypatch.setattr(View, "drop_removed", lambda _: None)
    admin_of(service).delete_table("clicks", "extra")
    with Trainer(service.grpc, ALL, run="s", started=2, seed=1) as trainer:
        trainer.rows["extra"][9:] = 0
        trainer._publish([np.arange(USER.rows), np.arange(9), np.arange(ITEM.rows)], full=True)
        shutil.copytree(tmp_path / "data", crashed)
    monkeypatch.undo()
    with RunningService(crashed, policies={"top": Policy(top_k=1000)}) as again:
        with follow(again, "top", "a", target, held=target.position):
            wait_until_in_sync(again, "top", _head(again))
            assert target.bytes() == trainer.expected()
        assert _undamaged(again)


def test_a_checkpoint_under_way_does_not_bring_back_a_deleted_model(tmp_path: Path) -> None:
    slow = Held()
    with RunningService(tmp_path / "data", checkpoint_bytes=1) as service, service.faults.place.replaced(put=slow):
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
        _leave_to_nobody(service)
        assert slow.begun.wait(20)
        deleting = threading.Thread(target=lambda: admin_of(service).delete_model("clicks"))
        deleting.start()
        wait_for(lambda: service.get_json("/models") == [], "the model is still there")
        slow.let_go()
        deleting.join()
        assert checkpoint_files(tmp_path / "data") == []
    with RunningService(tmp_path / "data") as service:
        assert service.get_json("/models") == []
