"""What "in sync" promises: every replica holds every table that the consumer follows, as it was sent,
and has shown so by checksums. Each way in which it could be false:

1.  a table has no place in a torch module: an error at first, and `partial` where the table came or grew later;
2.  tables are left out because the user says so, or a target keeps only some: `partial`, with their names;
3.  a target says nothing of what it makes of a release (a callback, a store, ids without values): `delivered`;
4.  a target cannot be read, or stops showing what it holds: `delivered`;
5.  a replica comes back and claims what it held, though its memory is new: asked to show it, and repaired
    (test_readiness.py);
6.  an older client comes back, which acknowledges only releases: it is sent one without rows;
7.  a replica that is asked shows nothing, or the wrong checksums: never `in sync`;
8.  rows change while nothing is published, and so nothing is acknowledged: they are read again now and
    then (test_readiness.py);
9.  a service starts anew and knows only offsets: nobody is taken for checked;
10. one replica of several is none of all that: the state is that of the worst;
11. the model does not exist, or nothing of it is published: `empty`; no table of it fits: `waiting`;
12. a consumer follows more than before: what was shown before counts no more;
13. a table is bound to memory that the module no longer uses: see tests/unit/client/test_torch_binding.py;
14. buffers and maps of raw ids do not travel: they are tables like others, see there and test_torch_collision.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fleet import (
    AT_ONCE,
    ITEM,
    TABLES,
    USER,
    WAIT,
    Recorder,
    Trainer,
    admin_of,
    checked_ack,
    follow,
    lost,
    wait_for_lag,
    wait_until_delivered,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream, ack
from torch import nn

from deltasync.client import CallbackTarget, NotFound, NumpyTarget, Policy, Position, Release, TableSpec
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.rows import Ids, Values

POLICIES = {"top": Policy(top_k=0.5)}
# Idle streams look for changes often.
OPTIONS: dict[str, Any] = {"progress_seconds": 0.02, "releases": AT_ONCE}
CONSUMERS = ["top", "predictors"]
SHOP = TableSpec("shop", 20, 4)


def until(service: RunningService, consumer: str, state: str, head: Position) -> dict[str, Any]:
    """The lag once it has a state, on the way to which it was never in sync."""
    states = set[str]()

    def reached(lag: dict[str, Any]) -> bool:
        states.add(lag["state"])
        everything = lag["lag"]["versions"] == lag["lag"]["rows"] == 0
        return bool(lag["head"] >= head.number and lag["state"] == state and everything)

    lag = wait_for_lag(service, consumer, reached)
    assert "in sync" not in states - {state}
    return lag


def bags(*tables: TableSpec) -> nn.Module:
    kinds = {"<f4": torch.float32, "<f2": torch.float16}
    return nn.ModuleDict(
        {each.name: nn.EmbeddingBag(each.rows, each.dim, dtype=kinds[each.dtype.str]) for each in tables}
    )


class Part(NumpyTarget):
    """Keeps one table, and says so."""

    def bound(self) -> frozenset[str]:
        return frozenset({"user"})

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        return super().read(table, ids) if table.name == "user" else None


class SilentPart(Part):
    """Keeps one table, as targets do that were made before they could say so."""

    bound = None  # type: ignore[assignment]


class UnreadablePart:
    """Keeps one table, says so, and cannot be read."""

    def apply(self, release: Release) -> None:
        pass

    def bound(self) -> frozenset[str]:
        return frozenset({"user"})


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_table_without_a_place_stops_the_replica(service: RunningService, consumer: str) -> None:
    with (
        Trainer(service.grpc) as trainer,
        follow(service, consumer, "a", TorchTarget(bags(USER))) as replica,
        pytest.raises(NotFound, match="table 'item': the module has no parameter or buffer of that name"),
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
    assert service.get_json(f"/consumers/{consumer}")["state"] != "in sync"


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(
    "make",
    [lambda: TorchTarget(bags(USER), leave_out=["it*"]), Part, SilentPart, UnreadablePart],
    ids=["left out", "part", "silent", "unreadable"],
)
def test_who_follows_only_a_part_is_never_in_sync(
    service: RunningService, consumer: str, make: Callable[[], Any]
) -> None:
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", make()):
        for head in (trainer.publish_all(), trainer.change(5)):
            lag = until(service, consumer, "partial", head)
            assert lag["replicas"][0]["unbound"] == ["item"]
            assert "a lacks item" in lag["reason"]


@pytest.mark.parametrize(
    ("consumer", "later"),
    [("top", [*TABLES, SHOP]), ("predictors", [USER, TableSpec("item", 70, 16, ITEM.dtype)])],
)
def test_a_table_that_comes_or_grows_later_makes_a_predictor_partial(
    service: RunningService, consumer: str, later: list[TableSpec]
) -> None:
    target, lacking = TorchTarget(bags(*TABLES)), later[-1].name
    with follow(service, consumer, "a", target) as replica:
        with Trainer(service.grpc) as trainer:
            wait_until_in_sync(service, consumer, trainer.publish_all())
        with Trainer(service.grpc, later, run="r2", started=2, seed=7) as trainer:
            for head in (trainer.publish_all(), trainer.change(5)):
                lag = wait_for_lag(
                    service, consumer, lambda lag: lag["state"] == "partial" and not lag["lag"]["rows"]
                )
                replica.wait_for(head, WAIT)
            assert lag["replicas"][0]["unbound"] == [lacking]
            assert target.tables()["user"].numpy().tobytes() == trainer.rows["user"].tobytes()
    with (
        Trainer(service.grpc, later, run="r3", started=3, seed=8) as trainer,
        follow(service, consumer, "a", TorchTarget(bags(*later))),
    ):
        wait_until_in_sync(service, consumer, trainer.publish_all())


def test_a_consumer_that_follows_more_makes_its_replicas_partial(service: RunningService) -> None:
    target = TorchTarget(bags(USER))
    admin_of(service).create_consumer("users", "clicks", Policy(tables=("us*",)))
    with Trainer(service.grpc) as trainer, follow(service, "users", "a", target):
        head = trainer.publish_all()
        assert wait_until_in_sync(service, "users", head)["replicas"][0]["unbound"] == []
        admin_of(service).update_consumer("users", Policy())
        lag = wait_for_lag(service, "users", lambda lag: lag["state"] == "partial")
        assert lag["replicas"][0]["unbound"] == ["item"]
        admin_of(service).update_consumer("users", Policy(tables=("user",)))
        wait_until_in_sync(service, "users", head)


def right(end: Any) -> dict[int, int]:
    return {each.slot: each.sum for each in end.sums}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_claim_is_no_proof(service: RunningService, trainer: Trainer, consumer: str) -> None:
    """Nothing is published meanwhile. What it says is judged, also before it has read what it was asked."""
    head = trainer.publish_all()
    with ReplicaStream(service.grpc, consumer=consumer, replica="raw") as stream:
        rows, end = stream.release()
        held = Position(end.position.history, end.position.version)
        stream.send(checked_ack(sum(len(each.ids) + len(each.values) for each in rows), held, right(end)))
        wait_until_in_sync(service, consumer, head)
    with ReplicaStream(service.grpc, consumer=consumer, replica="raw", held=held) as stream:
        rows, end = stream.release()
        assert (rows, end.position.version) == ([], held.number)
        assert until(service, consumer, "delivered", head)["replicas"][0]["offset"] == held.number
        stream.send(ack(0, held))
        until(service, consumer, "delivered", head)
        stream.send(checked_ack(0, held, right(end)))
        wait_until_in_sync(service, consumer, head)
        stream.send(checked_ack(0, held, {**right(end), 1: 7}))
        wait_for_lag(service, consumer, lambda lag: lag["state"] == "damaged")
    with ReplicaStream(service.grpc, consumer=consumer, replica="raw", held=held) as stream:
        stream.until("opened")
        stream.send(checked_ack(0, held, {0: 1, 1: 2}))
        stream.release()
        stream.send(checked_ack(0, held, {0: 1, 1: 2}))
        until(service, consumer, "damaged", head)


def test_a_service_that_starts_anew_takes_nobody_for_checked(tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data", **OPTIONS) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "a", Recorder()) as first,
        lost(follow(service, "predictors", "b", Recorder())),
    ):
        head = trainer.publish_all()
        wait_for_lag(service, "predictors", lambda lag: len(lag["replicas"]) == 2)
        wait_until_in_sync(service, "predictors", head)
    target = Recorder()
    target.tables = {table.name: trainer.rows[table.name].copy() for table in TABLES}
    with (
        RunningService(tmp_path / "data", **OPTIONS) as service,
        follow(service, "predictors", "a", target, held=first.held),
    ):
        lag = wait_for_lag(service, "predictors", lambda lag: lag["replicas"][0]["checked"])
        assert lag["state"] == "delivered"
        assert lag["reason"].endswith("checksums yet: b; away: b")


def test_the_state_is_that_of_the_worst_replica(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", Recorder()):
        head = trainer.publish_all()
        wait_until_in_sync(service, "predictors", head)
        with follow(service, "predictors", "b", CallbackTarget(lambda _: None)):
            wait_until_delivered(service, "predictors", head)
            with follow(service, "predictors", "c", Part()):
                lag = wait_for_lag(service, "predictors", lambda lag: lag["state"] == "partial")
                assert "c lacks item" in lag["reason"]
                _, metrics = service.get("/metrics")
                assert 'deltasync_consumer_unbound_tables{consumer="predictors"} 1.0' in metrics


@pytest.mark.parametrize("policy", [Policy(), Policy(top_k=3)], ids=["plain", "ranked"])
def test_a_misspelt_model_is_empty_and_the_others_are_named(service: RunningService, policy: Policy) -> None:
    admin_of(service).create_consumer("typo", "clikcs", policy)
    with follow(service, "typo", "a", NumpyTarget()):
        lag = wait_for_lag(service, "typo", lambda lag: len(lag["replicas"]) == 1)
        said = "model 'clikcs' is not published yet; published models: "
        assert (lag["state"], lag["reason"]) == ("empty", said + "none")
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
        lag = service.get_json("/consumers/typo")
        assert (lag["state"], lag["reason"]) == ("empty", said + "clicks")
