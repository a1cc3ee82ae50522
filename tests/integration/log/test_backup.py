"""Backups of services that go on, and what is restored of them."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from tests.support.command import deltasync
from tests.support.fleet import (
    ITEM,
    TABLES,
    USER,
    WAIT,
    Recorder,
    Trainer,
    admin_of,
    follow,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.local_service import back_up
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN, RunningService

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore
from deltasync.client import (
    Admin,
    Contradiction,
    Endpoint,
    InvalidInput,
    NotFound,
    NotPermitted,
    Policy,
    Position,
    ServiceUnavailable,
    TableSpec,
)
from deltasync.log.data_directory import BACKUP_MARKER
from deltasync.service.restore import restore

LATER = TableSpec("later", 50, 4)
GROWN = TableSpec("user", 90, 8)
TOP = Policy(top_k=20, min_interval_seconds=0.01)
POLICIES = {"ranked": TOP}


class Past(Trainer):
    """Remembers what it had at every version."""

    def __init__(self, address: str, **fields: Any) -> None:
        super().__init__(address, **fields)
        self.versions: dict[int, dict[str, bytes]] = {}

    def _publish(self, ids: list[Any], *, full: bool = False) -> Position:
        rows = self.expected()
        head = super()._publish(ids, full=full)
        self.versions[head.number] = rows
        return head


class Window:
    """A backup that has copied its first model, and waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        copy = CheckpointStore.copy

        def waiting(
            store: CheckpointStore, manifest: Manifest, place: Place, check: Callable[[], None] = lambda: None
        ) -> None:
            copy(store, manifest, place, check)
            self.reached.set()
            while not self._go.wait(0.01):
                check()  # Whether it is to be broken off.

        patch.setattr(CheckpointStore, "copy", waiting)

    @contextmanager
    def open(self, service: RunningService, directory: Path) -> Iterator[None]:
        """While a backup is being made; it is complete afterwards."""
        made = list[object]()
        thread = threading.Thread(target=lambda: made.append(admin_of(service).backup(str(directory))))
        thread.start()
        assert self.reached.wait(WAIT)
        yield
        self._go.set()
        thread.join(WAIT)
        assert made


def held_by_newcomers(data_dir: Path, *consumers: str) -> tuple[int, list[dict[str, bytes]]]:
    """The newest version that a service of a data directory has, and what new replicas of consumers are given."""
    targets = [Recorder() for _ in consumers]
    with RunningService(data_dir) as service:
        head = service.get_json(f"/consumers/{consumers[0]}")["head"]
        for consumer, target in zip(consumers, targets, strict=True):
            with follow(service, consumer, "newcomer", target) as follower:
                follower.wait_for(head, WAIT)
    return head, [target.bytes() for target in targets]


@pytest.mark.nightly
def test_a_backup_under_load_has_all_rows_of_one_version(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "data", "--consumer", "predictors=clicks")
    stopping = threading.Event()
    with service, Past(service.grpc) as trainer:
        admin_of(service).create_consumer("ranked", "clicks", TOP)
        trainer.publish_all()
        load = threading.Thread(target=lambda: [trainer.change(7) for _ in iter(stopping.is_set, True)])
        load.start()
        with follow(service, "ranked", "r", Recorder()):
            for number in range(3):
                made = admin_of(service).backup(str(tmp_path / f"backup-{number}"))
                assert made["bytes"] > 0
        stopping.set()
        load.join(WAIT)
        service.kill()
    for number in range(3):
        restore(tmp_path / f"backup-{number}", tmp_path / f"restored-{number}")
        head, (rows,) = held_by_newcomers(tmp_path / f"restored-{number}", "predictors")
        assert rows == trainer.versions[head]


def test_changes_while_files_are_copied_do_not_alter_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts, tables that are new or have grown, models, checkpoints, and consumers with a policy."""
    window = Window(monkeypatch)
    with RunningService(tmp_path / "data", policies=POLICIES | {"gone": TOP}, keep_checkpoints=2) as service:
        with Past(service.grpc) as trainer, follow(service, "ranked", "r", Recorder()) as early:
            trainer.publish_all()
            head = trainer.change(7)
            early.wait_for(head, WAIT)
            with window.open(service, tmp_path / "backup"):
                trainer.change(7)
                later = Past(service.grpc, tables=[GROWN, ITEM, LATER], run="later", started=2, seed=3)
                with later:
                    later.publish_all()
                    for _ in range(3):  # Of those that are kept, none is that of the backup.
                        admin_of(service).make_checkpoint("clicks")
                        later.change(5)
                    admin_of(service).create_consumer("new", "clicks", TOP)
                    admin_of(service).delete_consumer("gone")
                    with pytest.raises(Contradiction, match="another backup is being made"):
                        admin_of(service).backup(str(tmp_path / "another"))
        monkeypatch.undo()
    restore(str(tmp_path / "backup"), tmp_path / "restored")
    found, rows = held_by_newcomers(tmp_path / "restored", "predictors", "ranked", "gone")
    assert found == head.number
    assert rows[0] == trainer.versions[found]
    with RunningService(tmp_path / "restored") as service, pytest.raises(NotFound):
        admin_of(service).delete_consumer("new")


def test_a_backup_goes_on_as_a_new_epoch_of_the_same_past(tmp_path: Path) -> None:
    """Also of a restored one; what a replica holds of it is not sent again."""
    with RunningService(tmp_path / "0", policies=POLICIES) as service, Trainer(service.grpc) as trainer:
        targets = {name: Recorder() for name in ("predictors", "ranked")}
        followers = {name: follow(service, name, "r", target) for name, target in targets.items()}
        trainer.publish_all()
        head = trainer.change(3)
        for name, each in followers.items():
            each.wait_for(head, WAIT)
            wait_until_in_sync(service, name, head)
        admin_of(service).backup(str(tmp_path / "backup-0"))
        for each in followers.values():
            each.close()
    held, histories = {name: each.held for name, each in followers.items()}, [head.history]
    for number in (1, 2):
        restore(tmp_path / f"backup-{number - 1}", tmp_path / str(number))
        received = {name: target.received_rows for name, target in targets.items()}
        with RunningService(tmp_path / str(number), policies=POLICIES) as service:
            lag = service.get_json("/consumers/predictors")
            assert (lag["offset"], [each["replica"] for each in lag["replicas"]]) == (head.number, ["r"])
            followers = {
                name: follow(service, name, "r", target, held=held[name]) for name, target in targets.items()
            }
            for name, each in followers.items():
                each.wait_for(head.number, WAIT)
                while each.held.history == held[name].history:
                    pass
                held[name] = each.held
                wait_until_in_sync(service, name, head)
            histories.append(held["predictors"].history)
            admin_of(service).backup(str(tmp_path / f"backup-{number}"))
            for each in followers.values():
                each.close()
        assert {name: target.received_rows for name, target in targets.items()} == received
    assert len(set(histories)) == 3
    assert {each.partition(".")[0] for each in histories} == {head.history}


@pytest.mark.parametrize("backed_up", [False, True], ids=["url", "backup"])
def test_a_consumer_follows_its_kept_version_after_a_restore(tmp_path: Path, backed_up: bool) -> None:
    """Also if no replica has had it before."""
    data, copies = tmp_path / "data", tmp_path / "copies"
    settings: dict[str, Any] = {} if backed_up else {"checkpoints": str(copies)}
    with RunningService(data, policies=POLICIES, **settings) as service, Trainer(service.grpc) as trainer:
        admin = admin_of(service)
        trainer.publish_all()
        good = trainer.expected()
        admin.keep_version("clicks", "good")
        trainer.change(5)
        admin.keep_version("clicks", "later")
        admin.follow_version("predictors", "good")
        admin.follow_consumer("ranked", "predictors", 60.0, version="good")
        trainer.change(5)
        admin.make_checkpoint("clicks")
        if backed_up:
            admin.backup(str(tmp_path / "backup"))
    source = tmp_path / "backup" if backed_up else copies
    if backed_up:
        (kept,) = (source / "checkpoints" / "clicks" / "kept").iterdir()
        content = kept.read_bytes()
        kept.write_bytes(_flipped(content))
        with pytest.raises(StorageFailed, match=r"needs version 1 \(good\).*use another backup"):
            restore(source, tmp_path / "restored")
        kept.write_bytes(content)
    assert restore(source, tmp_path / "restored").lacking == []
    shutil.rmtree(data)
    with RunningService(tmp_path / "restored") as service:
        for consumer in ("predictors", "ranked"):
            target = Recorder()
            with follow(service, consumer, "newcomer", target):
                wait_for_lag(service, consumer, lambda lag: (lag["head"], lag["state"]) == (1, "in sync"))
                assert target.bytes() == good
        assert [each["name"] for each in admin_of(service).kept_versions("clicks")] == ["good"]


def test_a_restore_names_the_consumers_whose_kept_version_is_gone(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    with RunningService(tmp_path / "data", checkpoints=str(copies)) as service, Trainer(service.grpc) as trainer:
        admin = admin_of(service)
        trainer.publish_all()
        admin.keep_version("clicks", "good")
        admin.follow_version("predictors", "good")
        trainer.change(5)
        admin.make_checkpoint("clicks")
    for each in (copies / "clicks" / "kept").iterdir():
        each.unlink()
    assert restore(copies, tmp_path / "restored").lacking == [
        f"consumer 'predictors' needs version 1 (good), which {copies} lacks: let it follow another version "
        "(deltasync consumers follow predictors --live)"
    ]


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A backup of a service that is stopped."""
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    back_up(tmp_path / "data", tmp_path / "backup")
    return tmp_path / "backup"


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A process whose new files every user may read and write, unless it says otherwise."""
    before = os.umask(0)
    yield
    assert os.umask(before) == 0, "commands leave it as it was"


@pytest.mark.usefixtures("open_umask")
def test_all_that_is_kept_is_for_its_owner_only(tmp_path: Path) -> None:
    """What the service and every command write, whatever the umask that they are started with."""
    data, checkpoints = tmp_path / "data", tmp_path / "checkpoints"
    with ServiceProcess(data, "--consumer", "predictors=clicks", "--checkpoints", str(checkpoints)) as service:
        admin = admin_of(service)
        admin.create_consumer("ranked", "clicks", TOP)
        with Trainer(service.grpc) as trainer, follow(service, "ranked", "r", Recorder()) as follower:
            trainer.publish_all()
            follower.wait_for(trainer.change(7), WAIT)
            admin.make_checkpoint("clicks")
            admin.backup(str(tmp_path / "backup"))
    (data / "lock").unlink()
    for command in (
        ("restore", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "restored")),
        ("restore", str(checkpoints), "--data-dir", str(tmp_path / "restored-checkpoints")),
    ):
        status, _, said = deltasync(*command)
        assert status == 0, said
    made = [path for path in tmp_path.rglob("*") if "kernels" not in path.relative_to(tmp_path).parts]
    assert {path.relative_to(tmp_path).parts[0] for path in made} == {
        *("data", "checkpoints", "backup", "restored", "restored-checkpoints")
    }
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in made}
    assert modes == {str(path.relative_to(tmp_path)): 0o700 if path.is_dir() else 0o600 for path in made}


def test_a_damaged_backup_is_refused_by_name_and_leaves_nothing(backup: Path, tmp_path: Path) -> None:
    files = [path for path in backup.rglob("*") if path.is_file() and path.name != BACKUP_MARKER]
    assert {path.relative_to(backup).parts[2] for path in files} == {"data", "manifests"}
    for path in files:
        content = path.read_bytes()
        for damaged in (_flipped(content), content[:-1], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            said = f"{path.name}( is damaged| is missing| has)"
            with pytest.raises(StorageFailed, match=said):
                restore(backup, tmp_path / "new")
            assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())
        path.write_bytes(content)
    restore(backup, tmp_path / "new")


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_a_backup_without_a_sound_marker_is_none(backup: Path, tmp_path: Path) -> None:
    marker, new = backup / BACKUP_MARKER, tmp_path / "new"
    first, _, content = marker.read_text().partition("\n")
    marker.unlink()
    with pytest.raises(StorageFailed, match="has neither a backup nor a checkpoint"):
        restore(backup, new)
    later = b"deltasync checkpoint 2 " + xxhash.xxh3_128_hexdigest(b"{}", 2).encode() + b"\n{}"
    for stored, said in (
        (b"{", "is damaged"),
        (f"{first}\n{content.replace('clicks', 'klicks')}".encode(), "is damaged"),
        (later, "has format 2, this version reads 1: update"),
    ):
        marker.write_bytes(stored)
        with pytest.raises(StorageFailed, match=said):
            restore(backup, new)
    with pytest.raises(StorageFailed, match="gone has neither a backup nor a checkpoint"):
        restore(tmp_path / "gone", new)
    assert not new.exists()


def test_no_service_starts_on_a_backup(backup: Path) -> None:
    """It would be one no more, and its histories no new epochs."""
    status, _, said = deltasync("serve", "--data-dir", str(backup))
    assert status == 1
    assert f"{backup} is a backup: make a data directory from it with deltasync restore" in said


def test_places_that_cannot_take_a_backup_are_refused(running: RunningService, tmp_path: Path) -> None:
    admin, data = admin_of(running), tmp_path / "data"
    with pytest.raises(NotPermitted):
        Admin(Endpoint(running.http)).backup(str(tmp_path / "backup"))
    with pytest.raises(InvalidInput, match="expected an absolute path"):
        admin.backup("backup")
    with pytest.raises(InvalidInput, match="inside the data directory"):
        admin.backup(str(data / "backup"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match=r"file.* cannot be written"):
        admin.backup(str(tmp_path / "file"))
    assert not (tmp_path / "backup").exists()
    assert not list(data.rglob("backup*"))


def test_a_backup_ends_once_its_client_disconnects(
    running: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of it; the next one can be made at once."""
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
    window = Window(monkeypatch)
    body = json.dumps({"url": str(tmp_path / "left")})
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with closing(HTTPConnection(running.http.removeprefix("http://"))) as client:
        client.request("POST", "/backup", body, headers)
        assert window.reached.wait(WAIT)
    monkeypatch.undo()
    _made_soon(admin_of(running), tmp_path)
    assert list((tmp_path / "left").iterdir()) == []
    restore(tmp_path / "next", tmp_path / "new")


def _made_soon(admin: Admin, tmp_path: Path) -> None:
    """The thread of the one before may not have looked yet."""
    while True:
        try:
            admin.backup(str(tmp_path / "next"))
        except Contradiction:
            continue
        return


def test_a_service_that_is_stopped_breaks_a_backup_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = Window(monkeypatch)
    errors = list[Exception]()

    def make(service: RunningService) -> None:
        try:
            admin_of(service).backup(str(tmp_path / "backup"))
        except (ServiceUnavailable, grpc.RpcError) as error:
            errors.append(error)

    with RunningService(tmp_path / "data") as service:
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
        thread = threading.Thread(target=make, args=[service])
        thread.start()
        assert window.reached.wait(WAIT)
    thread.join(WAIT)
    assert errors
    with pytest.raises(StorageFailed, match=r"the backup is incomplete|has neither a backup nor a checkpoint"):
        restore(tmp_path / "backup", tmp_path / "new")
    monkeypatch.undo()
    _, (rows,) = held_by_newcomers(tmp_path / "data", "predictors")
    assert rows == trainer.expected()


def test_the_commands(running: RunningService, tmp_path: Path) -> None:
    with Trainer(running.grpc) as trainer:
        trainer.publish_all()
    made = deltasync("backup", str(tmp_path / "b"), "--service", running.http, admin_token="secret")  # noqa: S106
    assert made[0] == 0
    assert f"backup {tmp_path / 'b'} is complete: clicks at version 1, " in made[1]
    done = deltasync("restore", str(tmp_path / "b"), "--data-dir", str(tmp_path / "new"))
    assert done[0] == 0
    assert f"restored {tmp_path / 'new'} from {tmp_path / 'b'}: clicks at version 1, " in done[1]
    status, _, said = deltasync("restore", str(tmp_path / "b"), "--data-dir", str(tmp_path / "new"))
    assert (status, "is not empty" in said) == (1, True)
    # The environment of a container names the data directory of its service, which is not stopped.
    made = deltasync(
        "backup", str(tmp_path / "c"), "--service", running.http,
        data_dir=str(tmp_path / "data"), admin_token="secret",  # noqa: S106
    )  # fmt: skip
    assert made[0] == 0
    head, (rows,) = held_by_newcomers(tmp_path / "new", "predictors")
    assert (head, rows) == (1, trainer.expected())
    assert {table.name for table in TABLES} == rows.keys() == {USER.name, ITEM.name}


def running_with_checkpoints(data_dir: Path, url: str) -> RunningService:
    return RunningService(data_dir, policies={"ranked": TOP}, checkpoints=url)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_data_directory_is_made_of_the_newest_checkpoints(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'checkpoints'}"
    with running_with_checkpoints(tmp_path / "data", url) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).make_checkpoint("clicks")
        head = trainer.change(7)
        admin_of(service).make_checkpoint("clicks")
        expected = trainer.expected()
        trainer.change(7)
    status, said, _ = deltasync("restore", url, "--data-dir", str(tmp_path / "new"))
    assert (status, f" from {url}: clicks at version {head.number}, " in said) == (0, True)
    _, (plain, _) = held_by_newcomers(tmp_path / "new", "predictors", "ranked")
    assert plain == expected


def test_a_place_without_backup_or_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for url in (str(tmp_path / "empty"), f"file://{tmp_path / 'empty'}"):
        with pytest.raises(StorageFailed, match="has neither a backup nor a checkpoint"):
            restore(url, tmp_path / "new")
    with pytest.raises(InvalidInput, match="nosuch"):
        restore("nosuch://bucket", tmp_path / "new")
    name = "00000000000000000001-0123abcd.json"
    (tmp_path / "checkpoints" / "clicks" / "manifests").mkdir(parents=True)
    (tmp_path / "checkpoints" / "clicks" / "manifests" / name).write_text("{")
    with pytest.raises(StorageFailed, match=r"no usable checkpoint of model 'clicks': .* is damaged"):
        restore(tmp_path / "checkpoints", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_consumer_whose_model_was_not_published_is_in_a_backup(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        admin_of(service).create_consumer("early", "later", TOP)
        admin_of(service).backup(str(tmp_path / "backup"))
    assert restore(tmp_path / "backup", tmp_path / "new").models == {}
    with RunningService(tmp_path / "new") as service:
        assert "early" in {each["consumer"] for each in admin_of(service).consumers()}


def test_checkpoints_are_listed_without_a_service(tmp_path: Path) -> None:
    url = str(tmp_path / "checkpoints")
    with running_with_checkpoints(tmp_path / "data", url) as service, Trainer(service.grpc) as trainer:
        for _ in range(2):
            trainer.publish_all()
            admin_of(service).make_checkpoint("clicks")
    status, said, _ = deltasync("checkpoints", "--at", url)
    assert status == 0
    assert re.sub(r"  +", "  ", said.splitlines()[0]) == "model  version  age  bytes  new  checkpoint"
    stored = json.loads(deltasync("checkpoints", "--at", url, "--json")[1])
    assert [(each["model"], each["version"]) for each in stored] == [("clicks", 2), ("clicks", 1)]
    assert [line.split()[-1] for line in said.splitlines()[1:]] == [each["name"] for each in stored]
    assert deltasync("checkpoints", "other", "--at", url)[1] == f"no checkpoints of other at {url}\n"
    damaged = max((tmp_path / "checkpoints" / "clicks" / "manifests").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, _, said = deltasync("checkpoints", "--at", url)
    assert (status, damaged.name in said) == (1, True)
