"""Data directories that are made of snapshots."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow
from tests.support.server import RunningService

from deltasync.client import Policy
from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.service.restore import restore
from deltasync.service.snapshots import SnapshotOptions

TOP = Policy(top_k=20, min_interval_seconds=0.01)


def running_with_snapshots(data_dir: Path, url: str) -> RunningService:
    service = RunningService(data_dir, policies={"ranked": TOP})
    service.options = replace(service.options, snapshots=SnapshotOptions(url=url, seconds=3600))
    return service


def rows_of(data_dir: Path, *consumers: str) -> list[dict[str, bytes]]:
    """What new replicas of consumers are given."""
    targets = [Recorder() for _ in consumers]
    with RunningService(data_dir) as service:
        for consumer, target in zip(consumers, targets, strict=True):
            head = service.get_json(f"/consumers/{consumer}/lag")["head"]
            with follow(service, consumer, "newcomer", target) as follower:
                follower.wait_for(head, WAIT)
    return [target.bytes() for target in targets]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_data_directory_is_made_of_the_newest_snapshots(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}{tmp_path / 'snapshots'}"
    with running_with_snapshots(tmp_path / "data", url) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).make_snapshot("clicks")
        head = trainer.change(7)
        admin_of(service).make_snapshot("clicks")
        expected = trainer.expected()
        trainer.change(7)
    status, said, _ = deltasync("restore", url, "--data-dir", str(tmp_path / "new"))
    assert (status, f"has what {url} has: clicks at version {head.number}, " in said) == (0, True)
    plain, _ = rows_of(tmp_path / "new", "predictors", "ranked")
    assert plain == expected


def test_what_is_no_backup_and_has_no_snapshot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageFailed, match="is no complete backup"):
        restore(tmp_path / "empty", tmp_path / "new")
    with pytest.raises(StorageFailed, match="has no snapshot of any model"):
        restore(f"file://{tmp_path / 'empty'}", tmp_path / "new")
    with pytest.raises(InvalidInput, match="nosuch"):
        restore("nosuch://bucket", tmp_path / "new")
    (tmp_path / "snapshots" / "clicks" / "manifests").mkdir(parents=True)
    (tmp_path / "snapshots" / "clicks" / "manifests" / "00000000000000000001-x.json").write_text("{")
    with pytest.raises(StorageFailed, match=r"no snapshot of model 'clicks' can be used: .* is damaged"):
        restore(tmp_path / "snapshots", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_consumer_whose_model_was_not_published_is_in_a_backup(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        admin_of(service).create_consumer("early", "later", TOP)
        admin_of(service).backup(str(tmp_path / "backup"))
    assert restore(tmp_path / "backup", tmp_path / "new").models == {}
    with RunningService(tmp_path / "new") as service:
        assert "early" in {each["consumer"] for each in admin_of(service).consumers()}


def test_snapshots_are_listed_and_checked_without_a_service(tmp_path: Path) -> None:
    url = str(tmp_path / "snapshots")
    with running_with_snapshots(tmp_path / "data", url) as service, Trainer(service.grpc) as trainer:
        for _ in range(2):
            trainer.publish_all()
            admin_of(service).make_snapshot("clicks")
    status, said, _ = deltasync("snapshots", "--at", url, "--check")
    assert status == 0
    assert re.sub(r"  +", "  ", said.splitlines()[0]) == "model  version  age  bytes  new  snapshot"
    stored = json.loads(deltasync("snapshots", "--at", url, "--json")[1])
    assert [(each["model"], each["version"]) for each in stored] == [("clicks", 2), ("clicks", 1)]
    assert [line.split()[-1] for line in said.splitlines()[1:]] == [each["name"] for each in stored]
    assert deltasync("snapshots", "other", "--at", url)[1] == f"no snapshots of other at {url}\n"
    damaged = max((tmp_path / "snapshots" / "clicks" / "data").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert deltasync("snapshots", "--at", url)[0] == 0
    status, _, said = deltasync("snapshots", "--at", url, "--check")
    assert (status, f"{damaged.name} is damaged at byte" in said) == (1, True)
    assert "--check reads what is at --at URL" in deltasync("snapshots", "--check")[2]
