"""Faults of connections, done to a service and a trainer in this process."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.soak.faults.choice import NotDone
from tests.soak.faults.network import dead_proxy, hang_storage
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE
from tests.support.fleet import Trainer
from tests.support.proxy import Proxy
from tests.support.server import RunningService
from tests.support.waiting import wait_for

FAULT = Fault(0.0, "", 0.0, 0.1)


def world_of(**facts: Any) -> Any:
    fleet = SimpleNamespace(followers=[], storage=True)
    crew = SimpleNamespace(starts=Counter())
    return SimpleNamespace(fleet=fleet, crew=crew, storage=None, await_there=wait_for, **facts)


def test_a_dead_connection_behind_a_proxy_is_replaced_by_a_direct_one(tmp_path: Path) -> None:
    with (
        RunningService(tmp_path, silence_seconds=1.0) as service,
        Proxy(service.grpc) as link,
        Trainer(link.address) as trainer,
    ):
        trainer.publish_all()
        assert link.connections == 1
        world = world_of(grpc=service.grpc, links={"clicks": link}, plain={"clicks": trainer})
        with ThreadPoolExecutor() as pool:
            fault = pool.submit(dead_proxy, world, FAULT)
            while not fault.done():  # An idle publisher opens no connection.
                head = trainer.change(1)
        assert fault.result() == ["clicks"]
        assert "has sent nothing for 1 s" in trainer.publisher.connection.last_error
        assert link.connections == 3
        assert service.get_json("/consumers/probes")["head"] == head.number


def test_storage_hangs_until_a_version_is_sealed_and_readyz_answers() -> None:
    heads = iter([{}, {"a": 1}, {}, {"a": 1, "b": 1}, {"a": 0}, {"b": 2}, {"b": 2}])
    answers, done = iter([False, True]), list[str]()
    world = world_of(plain={"a": None}, heads=lambda: next(heads), answers=lambda: next(answers))
    world.fleet.clicks = 0
    world.storage = SimpleNamespace(stall=lambda: done.append("stalls"), go_on=lambda: done.append("goes on"))
    assert hang_storage(world, FAULT) == ["a"]
    assert done == ["stalls", "goes on"]
    assert not list(heads)
    assert not list(answers)


def test_storage_hangs_no_longer_once_the_service_was_started_again() -> None:
    world = world_of(plain={"a": None}, heads=lambda: {"a": 1})
    world.fleet.clicks = 0
    world.storage = SimpleNamespace(stall=lambda: world.crew.starts.update([SERVICE]), go_on=lambda: None)
    assert hang_storage(world, FAULT) == ["a"]


def test_storage_that_is_not_there_cannot_hang() -> None:
    with pytest.raises(NotDone, match="no object storage"):
        hang_storage(world_of(), FAULT)
