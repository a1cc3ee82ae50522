"""From a part to a replica's row, with a real service process and real sockets."""

import json
import time

import numpy as np
import pytest
from tests.support.fleet import lost
from tests.support.process import ServiceProcess

from deltasync.client import (
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)

USER = TableSpec("sparse.embedding_bags.user", 1000, 8)
ITEM = TableSpec("sparse.embedding_bags.item", 300, 4, np.dtype("<f2"))
TABLES = [USER, ITEM]


def publisher(service: ServiceProcess, run_id: tuple[str, int], rank: int = 0, world_size: int = 1) -> Publisher:
    options = PublisherOptions(
        service=service.grpc,
        model="clicks",
        run=run_id[0],
        run_started_unix_ns=run_id[1],
        rank=rank,
        world_size=world_size,
    )
    return Publisher(options, TABLES, [Shard.whole(table) for table in TABLES])


def subscriber(service: ServiceProcess, target: NumpyTarget, replica: str = "p0") -> Subscriber:
    return Subscriber(
        SubscriberOptions(
            service=service.grpc, consumer="predictors", replica=replica, max_outstanding_bytes=4096
        ),
        target,
    )


def part(step: int, rows: list[np.ndarray], *ids: np.ndarray, full: bool = False) -> Part:
    changed = [RowBatch(Shard.whole(TABLES[slot]), i, rows[slot][i]) for slot, i in enumerate(ids)]
    return Part(step=step, step_end_unix_ns=time.time_ns(), rows=changed, full=full)


def random_rows(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(table.rows, table.dim)).astype(table.dtype) for table in TABLES]


def everything() -> list[np.ndarray]:
    return [np.arange(table.rows) for table in TABLES]


def test_rows_reach_a_replica_and_survive_kill_9(service: ServiceProcess, run_id: tuple[str, int]) -> None:
    rows, target = random_rows(0), NumpyTarget()
    with publisher(service, run_id) as trainer, subscriber(service, target) as replica:
        first = trainer.publish(part(1, rows, *everything(), full=True)).result(30)
        assert first.number == 1
        replica.wait_for(1, 30)
        for slot, table in enumerate(TABLES):
            np.testing.assert_array_equal(target.tables[table.name], rows[slot])

        service.kill()
        service.start()
        rows[0][[3, 700]] += 1
        second = trainer.publish(part(2, rows, np.array([3, 700]), np.array([], np.int64))).result(30)
        assert second == type(second)(first.history, 2)
        replica.wait_for(2, 30)
        np.testing.assert_array_equal(target.tables[USER.name], rows[0])

        late = NumpyTarget()
        with subscriber(service, late, "p1") as joining:
            joining.wait_for(2, 30)
        for slot, table in enumerate(TABLES):
            np.testing.assert_array_equal(late.tables[table.name], rows[slot])


def test_lag_is_reported_over_http(service: ServiceProcess, run_id: tuple[str, int]) -> None:
    rows, target = random_rows(0), NumpyTarget()
    with publisher(service, run_id) as trainer:
        with lost(subscriber(service, target)) as replica:
            trainer.publish(part(1, rows, *everything(), full=True)).result(30)
            replica.wait_for(1, 30)
        trainer.publish(part(5, rows, np.array([3, 4]), np.array([7]))).result(30)
        # A version is there once it is sealed; its rows are counted once they are applied, a moment later.
        deadline = time.monotonic() + 30
        while (lag := service.get_json("/consumers/predictors/lag"))["lag"]["rows"] < 3:
            assert time.monotonic() < deadline, lag
    assert lag["head"] == 2
    assert lag["head_step"] == 5
    assert lag["offset"] == 1
    assert lag["lag"]["versions"] == 1
    assert lag["lag"]["rows"] == 3
    assert lag["lag"]["bytes"] == 2 * (8 + 32) + 8 + 8
    assert lag["lag"]["seconds"] > 0
    assert lag["state"] == "away"
    assert [line["replica"] for line in lag["replicas"]] == ["p0"]
    assert {line["table"]: line["rows"] for line in lag["tables"]} == {USER.name: 2, ITEM.name: 1}


def test_unknown_consumer_names_those_that_exist(service: ServiceProcess) -> None:
    status, body = service.get("/consumers/nobody/lag")
    assert status == 404
    assert "predictors" in json.loads(body)["message"]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/tables", "/consumers"])
def test_status_routes_answer(service: ServiceProcess, path: str) -> None:
    assert service.get(path)[0] == 200


def test_sigterm_ends_with_status_0(service: ServiceProcess, run_id: tuple[str, int]) -> None:
    rows, target = random_rows(0), NumpyTarget()
    with publisher(service, run_id) as trainer, subscriber(service, target) as replica:
        trainer.publish(part(1, rows, *everything(), full=True)).result(30)
        replica.wait_for(1, 30)
        assert service.terminate() == 0
        service.start()
        trainer.publish(part(2, rows, np.array([1]), np.array([1]))).result(30)
        replica.wait_for(2, 30)
