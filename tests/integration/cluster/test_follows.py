"""Consumers that follow kept versions, and a model that was rolled back, are taken over by other processes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import MODEL, TABLE, Cluster
from tests.support.fleet import Recorder
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.waiting import wait_for

from deltasync.base.errors import Contradiction
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.core.policy import Policy

POLICIES = {"canary": Policy(), "fleet": Policy(), "ranked": Policy(top_k=3, min_interval_seconds=0.01)}
TIMEOUT = 60


def admin_of(service: ServiceProcess) -> Admin:
    return Admin(Endpoint(service.http, ADMIN_TOKEN))


def set_by_operators(admin: Admin) -> list[tuple[str, str]]:
    consumers = [admin.consumer(name) for name in POLICIES]
    return [(each["follows"], each["objects"]) for each in consumers]


def lag(cluster: Cluster, consumer: str) -> dict[str, Any]:
    status, text = cluster.owner().get(f"/consumers/{consumer}")
    found: dict[str, Any] = json.loads(text) if status == 200 else {"head": 0, "state": text}
    return found


def at(cluster: Cluster, consumer: str, version: int) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        found = lag(cluster, consumer)
        return found if (found["head"], found["state"]) == (version, "in sync") else {}

    return wait_for(there, lambda: lag(cluster, consumer), TIMEOUT)


@pytest.mark.parametrize("takeovers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_all_that_operators_have_set_outlives_takeovers(tmp_path: Path, takeovers: int) -> None:
    with Cluster(tmp_path, services=2, brokers=1) as cluster:
        trainer = cluster.trainer()
        trainer.publish()
        admin = admin_of(cluster.owner())
        targets = dict[str, Recorder]()
        for name, policy in POLICIES.items():
            admin.create_consumer(name, MODEL, policy)
            targets[name] = cluster.replica("a", name)[1]
        admin.keep_version(MODEL, "one")
        one = trainer.rows.copy()
        at(cluster, "canary", 1)
        trainer.publish(50)
        two = trainer.rows.copy()
        admin.keep_version(MODEL, "two")
        trainer.publish(50)
        admin.follow_version("ranked", "one")
        admin.follow_consumer("fleet", "canary", 0.1, "back", "one")
        at(cluster, "fleet", 2)
        admin.object("canary", "its AUC fell")
        at(cluster, "fleet", 1)
        at(cluster, "ranked", 1)
        newest = admin.roll_back(MODEL, "two")
        at(cluster, "canary", newest)
        wanted = {"canary": two, "fleet": one, "ranked": one}

        def is_unchanged() -> None:
            for name, rows in wanted.items():
                assert targets[name].tables[TABLE.name].tobytes() == rows.tobytes()

        is_unchanged()
        wait_for(lambda: admin.history("canary")[-1]["replicas"] == {"a": newest})
        wait_for(lambda: "stays, because" in admin.consumer("fleet")["follows"])
        before = set_by_operators(admin)
        versions, history = admin.kept_versions(MODEL), admin.history("canary")
        for _ in range(takeovers):  # The first owner comes back with its old checkpoints.
            owner = cluster.owner()
            owner.kill()
            admin = admin_of(cluster.owner())
            at(cluster, "canary", newest)
            at(cluster, "fleet", 1)
            at(cluster, "ranked", 1)
            is_unchanged()
            wait_for(lambda: set_by_operators(admin) == before)  # noqa: B023
            assert admin.kept_versions(MODEL) == versions
            assert admin.history("canary")[: len(history)] == history
            with pytest.raises(Contradiction, match="was rolled back to version 2"):
                trainer.publish()
            with pytest.raises(Contradiction, match="is followed by fleet, ranked"):
                admin.release_version(MODEL, "one")
            owner.start()
        for target in targets.values():
            assert [release.resync for release in target.releases].count(True) == 1, "no replica got every row"
        admin.withdraw_objection("canary")
        admin.keep_version(MODEL, "again")  # It has the rows of version 2, which was kept before.
        at(cluster, "fleet", newest)
        admin.follow_version("ranked", "two")
        at(cluster, "ranked", 2)
        wanted = dict.fromkeys(POLICIES, two)
        is_unchanged()
