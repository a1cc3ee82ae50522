"""Checkpoints of the service and of trainers, compared with what the service gives replicas now, row by row."""

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.command import deltasync
from tests.support.fleet import (
    TABLES,
    USER,
    WAIT,
    Recorder,
    Trainer,
    admin_of,
    follow,
    lost,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from deltasync.base.errors import Contradiction, InvalidInput, NotFound, StorageFailed
from deltasync.cli.lag import BEHIND
from deltasync.client import CallbackTarget, Mode, Policy, Position, SubscriberOptions, TableSpec, ValueType
from deltasync.client.stored_copy import Comparison, Rows, StoredCopy, compare, stored_checkpoint
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.client.torch_checkpoint import checkpoint_copy
from deltasync.core.comparison import TableComparison

CHECKPOINTS = True
POLICIES = {
    "ranked": Policy(top_k=10_000, min_interval_seconds=0.01),
    "int8": Policy(top_k=10_000, value_type=ValueType.INT8),
    "ids": Policy(mode=Mode.IDS),
}


def found(comparison: Comparison) -> dict[str, TableComparison]:
    return {each.table: each for each in comparison.tables}


def statuses(comparison: Comparison) -> dict[str, str]:
    return {name: each.status.value for name, each in found(comparison).items()}


def copy_of(rows: Mapping[str, np.ndarray[Any, Any]], position: Position) -> StoredCopy:
    held = {name: values.copy() for name, values in rows.items()}

    def of(table: TableSpec) -> Rows | None:
        values = held.get(table.name)
        return None if values is None else iter([(np.arange(len(values)), values)])

    return StoredCopy("a copy", position, of)


def compared(service: RunningService, copy: StoredCopy, consumer: str = "predictors") -> Comparison:
    return compare(service.grpc, consumer, copy, WAIT)


def test_rows_that_come_in_parts_are_compared_like_others(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deltasync.client.stored_copy.SubscriberOptions", partial(SubscriberOptions, max_outstanding_bytes=1 << 18)
    )
    large = TableSpec("large", 24_000, 64)  # Seven chunks, of which two make a part.
    with Trainer(service.grpc, [large]) as trainer:
        copy = copy_of(trainer.rows, trainer.publish_all())
        trainer.change(2)
        unknown = StoredCopy(copy.name, Position(), copy.rows)
        (of_known,), (of_unknown,) = compared(service, copy).tables, compared(service, unknown).tables
    assert (of_known.status.value, of_known.rows, of_known.changed) == ("equal", 23_998, 2)
    assert (of_unknown.status.value, of_unknown.rows, of_unknown.differing) == ("differs", 24_000, 2)


@pytest.mark.parametrize("consumer", ["predictors", "ranked", "int8"])
def test_a_checkpoint_is_equal_but_for_what_has_changed_since(
    service: RunningService, trainer: Trainer, tmp_path: Path, consumer: str
) -> None:
    head = trainer.publish_all()
    with follow(service, consumer, "early", CallbackTarget(lambda _: None)) as early:
        early.wait_for(head, WAIT)
    admin_of(service).make_checkpoint("clicks")
    copy = stored_checkpoint(str(tmp_path / "checkpoints"), consumer)
    now = compared(service, copy, consumer)
    assert (now.since, statuses(now)) == (True, {"user": "equal", "item": "equal"})
    assert [each.changed for each in now.tables] == [0, 0]
    assert all(each.checksum == each.held != 0 for each in now.tables)

    head = trainer.change(3)
    with follow(service, consumer, "late", CallbackTarget(lambda _: None)) as late:
        late.wait_for(head, WAIT)
    later = compared(service, copy, consumer)
    assert (later.version, later.since, statuses(later)) == (head.number, True, {"user": "equal", "item": "equal"})
    changed = {table.name: 3 for table in TABLES}
    assert {each.table: each.changed for each in later.tables} == changed
    assert {each.table: each.rows + each.changed for each in later.tables} == {
        table.name: table.rows for table in TABLES
    }


@pytest.mark.nightly
@given(st.sets(st.integers(0, USER.rows - 1), max_size=8), st.sets(st.integers(0, USER.rows - 1), max_size=8))
def test_rows_that_differ_are_named_unless_they_have_changed_since(
    tmp_path_factory: pytest.TempPathFactory, wrong: set[int], changed: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("service")
    with RunningService(folder / "data") as service, Trainer(service.grpc) as trainer:
        position = trainer.publish_all()
        rows = {name: values.copy() for name, values in trainer.rows.items()}
        rows["user"][list(wrong), 1] += 1
        for row in changed:
            trainer.set(USER, row, 3.5)
        comparison = compared(service, copy_of(rows, position))
    user, item = found(comparison)["user"], found(comparison)["item"]
    assert user.ids.tolist() == sorted(wrong - changed)
    assert (user.differing, user.changed) == (len(wrong - changed), len(changed))
    assert user.status.value == ("differs" if wrong - changed else "equal")
    assert item.status.value == "equal"


def test_without_a_known_position_all_rows_are_compared(service: RunningService, trainer: Trainer) -> None:
    position = trainer.publish_all()
    rows = {name: values.copy() for name, values in trainer.rows.items()}
    trainer.set(USER, 7, 3.5)
    for unknown in (Position(), Position("another", 1, 77), Position(position.history, position.number, 77)):
        comparison = compared(service, copy_of(rows, unknown))
        assert (comparison.since, statuses(comparison)["user"]) == (False, "differs")
        assert found(comparison)["user"].ids.tolist() == [7]


def test_rows_deleted_here_and_there_are_equal_and_a_table_that_is_not_there_is_not(
    service: RunningService, trainer: Trainer
) -> None:
    trainer.publish_all()
    position = trainer.delete(USER, np.array([3, 4]))
    assert statuses(compared(service, copy_of(trainer.rows, position))) == {"user": "equal", "item": "equal"}
    alone = copy_of({"user": trainer.rows["user"]}, position)
    assert statuses(compared(service, alone)) == {"user": "equal", "item": "not held"}


def test_what_cannot_be_compared_is_an_error(service: RunningService, trainer: Trainer, tmp_path: Path) -> None:
    position, url = trainer.publish_all(), str(tmp_path / "checkpoints")
    copy = copy_of(trainer.rows, position)
    with pytest.raises(Contradiction, match="'ranked' has a policy"):
        compared(service, copy, "ranked")
    with pytest.raises(Contradiction, match="ids"):
        compared(service, copy, "ids")
    with pytest.raises(
        Contradiction, match=f"rows of 3 float32 in table 'user', replicas have {USER.dim} float32"
    ):
        compared(service, copy_of({"user": trainer.rows["user"][:, :3]}, position))
    with pytest.raises(Contradiction, match=f"row {USER.rows} of table 'user', which has {USER.rows} rows"):
        compared(service, copy_of({"user": np.zeros((USER.rows + 1, USER.dim), np.float32)}, position))
    with pytest.raises(NotFound, match="has no checkpoint for consumer 'predictors'"):
        stored_checkpoint(url, "predictors")
    admin_of(service).make_checkpoint("clicks")
    with pytest.raises(Contradiction, match="has mode ids"):
        stored_checkpoint(url, "ids")
    for piece in (tmp_path / "checkpoints").rglob("*"):
        if piece.is_file() and "manifest" not in str(piece):
            piece.write_bytes(b"x" + piece.read_bytes()[1:])
    with pytest.raises(StorageFailed, match="cannot be read"):
        stored_checkpoint(url, "predictors")


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {f"sparse.{name}.weight": torch.from_numpy(rows.copy()) for name, rows in trainer.rows.items()}


def write_checkpoint(form: str, folder: Path, weights: dict[str, torch.Tensor], position: Position) -> Path:
    """A folder of torch.distributed.checkpoint, one of several, or a file of torch.save, of two ranks."""
    at = folder / "step-000000000009" if form == "several" else folder
    at.mkdir(parents=True, exist_ok=True)
    state = {"model": weights, "optimizer": {"sparse.user.weight.momentum": torch.ones(3)}}
    if form == "file":
        torch.save(state, at / "model.pt")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That it is alone.
            save(state, checkpoint_id=at, no_dist=True)
    for rank, number in enumerate((position.number, position.number + 1)):
        saved = {"history": position.history, "version": number, "seal": position.seal if rank == 0 else 1}
        torch.save(saved, at / f"sync-{rank}.pt")
    if form == "several":
        (folder / "step-000000000002").mkdir()
    return at / "model.pt" if form == "file" else folder


@pytest.mark.parametrize("form", ["folder", "several", "file"])
def test_a_checkpoint_is_compared(service: RunningService, trainer: Trainer, tmp_path: Path, form: str) -> None:
    position, weights = trainer.publish_all(), weights_of(trainer)
    weights["sparse.item.weight"][5] += 1
    trainer.set(USER, 7, 3.5)
    comparison = compared(service, checkpoint_copy(write_checkpoint(form, tmp_path / "c", weights, position)))
    assert (comparison.since, statuses(comparison)) == (True, {"user": "equal", "item": "differs"})
    assert found(comparison)["item"].ids.tolist() == [5]
    assert found(comparison)["user"].changed == 1


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"nothing of torch")
    for path in (tmp_path, tmp_path / "model.pt", tmp_path / "missing"):
        with pytest.raises(InvalidInput, match="not a checkpoint that torch can read"):
            checkpoint_copy(path)


@pytest.mark.parametrize("harm", ["missing", "cut short", "damaged"])
def test_weights_of_a_checkpoint_that_cannot_be_read_are_an_error_of_one_line(
    service: RunningService, trainer: Trainer, tmp_path: Path, harm: str
) -> None:
    folder = write_checkpoint("folder", tmp_path / "c", weights_of(trainer), trainer.publish_all())
    for piece in folder.glob("*.distcp"):
        content = piece.read_bytes()
        piece.write_bytes(content[:100] if harm == "cut short" else b"x" * 100 + content[100:])
        if harm == "missing":
            piece.unlink()
    error = error_of(service, folder)
    assert f"checkpoint {folder}: model.sparse.user.weight cannot be read: " in error
    assert ("No such file" in error) is (harm == "missing")


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "sparse"])
def test_weights_of_another_type_are_an_error_of_one_line(
    service: RunningService, trainer: Trainer, tmp_path: Path, kind: str
) -> None:
    trainer.publish_all()
    weights = weights_of(trainer)["sparse.user.weight"]
    other = weights.to_sparse() if kind == "sparse" else weights.to(getattr(torch, kind))
    torch.save({"user.weight": other}, tmp_path / "m.pt")
    error = error_of(service, tmp_path / "m.pt")
    assert f"has {'sparse ' * (kind == 'sparse')}rows of " in error
    assert f"in table 'user', replicas have {USER.dim} float32" in error
    assert kind in error


def verify(service: RunningService, *arguments: str) -> tuple[int, str, str]:
    subscribes = {"--checkpoint", "--torch-checkpoint"} & set(arguments)
    address = service.grpc if subscribes else service.http
    return deltasync("verify", "predictors", "--service", address, *arguments, token="secret")  # noqa: S106


def error_of(service: RunningService, checkpoint: Path) -> str:
    """The one line that is said of a checkpoint, and nothing else."""
    code, shown, said = verify(service, "--torch-checkpoint", str(checkpoint))
    assert (code, shown, "Traceback" in said) == (1, "", False)
    (error,) = [line for line in said.splitlines() if line.startswith("Error: ")]
    return error


def test_the_command_says_which_row_of_whom_differs(
    service: RunningService, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.client.targets.checksums.TargetChecksums._sweep", lambda *_: None)
    code, _, said = verify(service)
    assert (code, "consumer 'predictors' has no replicas" in said) == (1, True)
    good, bad = Recorder(), Recorder()
    with follow(service, "predictors", "good", good), follow(service, "predictors", "bad", bad):
        position = trainer.publish_all()
        wait_until_in_sync(service, "predictors", position, replicas=2)
        code, shown, said = verify(service)
        assert (code, shown.count(" equal ")) == (0, 4)
        assert said.splitlines() == [f"replica {name} is reading its rows again" for name in ("bad", "good")]
        bad.tables["user"][7, 0] += 1
        code, shown, _ = verify(service)
        assert (code, shown.count(" equal "), shown.count(" differs ")) == (BEHIND, 3, 1)
        assert "replica bad " in next(line for line in shown.splitlines() if "differs" in line)
        wait_until_in_sync(service, "predictors", position, replicas=2)
        assert verify(service, "--replica", "bad")[0] == 0
    with follow(service, "predictors", "looks", Recorder(), guest=True) as guest:
        guest.wait_for(position, WAIT)
        assert "has no replicas" in verify(service)[2]  # Of guests nobody is asked.
    admin_of(service).make_checkpoint("clicks")
    trainer.set(USER, 7, 3.5)
    code, shown, said = verify(service, "--checkpoint", str(tmp_path / "checkpoints"))
    assert (code, "1 row changed since" in shown) == (0, True)
    assert "fetching the service's rows" in said
    folder = write_checkpoint("folder", tmp_path / "c", weights_of(trainer), position)
    assert verify(service, "--torch-checkpoint", str(folder))[0] == 0
    code, _, said = verify(service, "--torch-checkpoint", str(folder), "--replica", "bad")
    assert (code, "give only one of" in said) == (2, True)


def test_one_that_shows_nothing_does_not_hide_what_others_show(service: RunningService, trainer: Trainer) -> None:
    module = nn.Module()
    module.user = nn.EmbeddingBag(USER.rows, USER.dim)
    position = trainer.publish_all()
    with lost(follow(service, "predictors", "away", Recorder())) as away:
        away.wait_for(position, WAIT)
    with (
        follow(service, "predictors", "good", Recorder()) as good,
        follow(service, "predictors", "plain", CallbackTarget(lambda _: None)) as plain,
        follow(service, "predictors", "part", TorchTarget(module, leave_out=["item"])) as part,
    ):
        for each in (good, plain, part):
            each.wait_for(position, WAIT)
        wait_for_lag(service, "predictors", lambda lag: [each["offset"] for each in lag["replicas"]] == 4 * [1])
        code, shown, _ = verify(service, "--json")
        found = json.loads(shown)
        assert (code, {(each["what"], each["table"]): each["status"] for each in found}) == (
            BEHIND,
            {
                ("replica away", ""): "not shown",
                ("replica good", "user"): "equal",
                ("replica good", "item"): "equal",
                ("replica part", "user"): "equal",
                ("replica part", "item"): "not held",
                ("replica plain", "user"): "not shown",
                ("replica plain", "item"): "not shown",
            },
        )
        assert all(bool(each["held"]) == (each["status"] == "equal") for each in found)
        why = {each["what"]: each["reason"] for each in found}
        assert "away for" in why["replica away"]
        code, shown, _ = verify(service)
        assert (code, shown.count("away for"), shown.count(" equal ")) == (BEHIND, 1, 3)
        assert "None" not in shown
        assert verify(service, "--replica", "good")[0] == 0
        for name in ("part", "plain", "old", "away", "nobody"):
            code, shown, _ = verify(service, "--replica", "good", "--replica", name)
            assert (code, shown.count(" equal ")) == (BEHIND, 3 if name == "part" else 2), name


def test_who_has_no_right_is_told_so_once(service: RunningService, trainer: Trainer) -> None:
    trainer.publish_all()
    code, shown, said = deltasync("verify", "predictors", "--replica", "a", "--service", service.http)
    assert (code, shown, "DELTASYNC_TOKEN" in said) == (1, "", True)
