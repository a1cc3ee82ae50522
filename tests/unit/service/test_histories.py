"""What the replicas of a consumer served, and what followers are given, as a service counts time."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_service import SetClock, join, publish, run, send
from tests.support.wire import part

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.follow import RolloutDelay
from deltasync.core.policy import Policy
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service

MODEL = "clicks"
DAY = 86_400.0


async def cut(session: PublishSession, step: int) -> None:
    await send(session, part(step, [(0, [step], np.full((1, 4), step, np.float32))]))
    await session.coordinator.settled()


def prove(service: Service, consumer: Consumer, name: str, process: str = "p") -> Replica:
    """A replica connects with the newest version and proves it."""
    replica = service.registry.connect(consumer, name, asyncio.Event(), process)
    service.registry.acknowledge(consumer, replica, service.models[MODEL].position)
    replica.checked = True
    return replica


async def watch(service: Service, clock: SetClock, seconds: int) -> None:
    """The service looks at its consumers each second."""
    for _ in range(seconds):
        clock.wait(1.0)
        await service.histories.look()
        await service.versions.look()
        await service.following.go_on()


async def rollout(service: Service, behind: float) -> tuple[Consumer, Consumer]:
    """A canary, and a fleet that follows it from version 1 on; version 2 is published and kept."""
    canary = await service.consumers.create("canary", MODEL, Policy())
    fleet = await service.consumers.create("fleet", MODEL, Policy())
    session = await publish(service)
    await service.versions.keep(MODEL, "one")
    await service.following.follow_consumer("fleet", RolloutDelay("canary", behind), "one")
    await cut(session, 2)
    await service.versions.keep(MODEL, "two")
    return canary, fleet


def followed(consumer: Consumer) -> int:
    assert consumer.follows
    return consumer.follows.kept.version


def test_the_time_that_the_service_is_away_does_not_count(tmp_path: Path) -> None:
    """That before does, up to the last line of its history: there is one each minute."""
    clock = SetClock()

    async def before(service: Service) -> None:
        canary, fleet = await rollout(service, 100.0)
        prove(service, canary, "a")
        await watch(service, clock, 64)
        assert followed(fleet) == 1

    async def after(service: Service) -> None:
        clock.wait(3600.0)
        fleet, canary = service.registry.get("fleet"), service.registry.get("canary")
        await watch(service, clock, 1)
        assert fleet.waits == "consumer 'canary' has no connected replica"
        prove(service, canary, "a")
        await watch(service, clock, 39)
        assert followed(fleet) == 1
        await watch(service, clock, 4)
        assert followed(fleet) == 2

    run(tmp_path, before, clock=clock)
    run(tmp_path, after, clock=clock)


@pytest.mark.parametrize("ahead", [100.0, -100.0, 2 * DAY])
def test_a_clock_that_is_set_moves_no_follower_and_drops_no_history(tmp_path: Path, ahead: float) -> None:
    clock = SetClock()

    async def scenario(service: Service) -> None:
        canary, fleet = await rollout(service, 60.0)
        prove(service, canary, "a")
        await watch(service, clock, 2)
        clock.set_ahead(ahead)
        await watch(service, clock, 2)
        clock.set_ahead(0.0)
        await watch(service, clock, 55)
        assert followed(fleet) == 1
        await watch(service, clock, 5)
        assert followed(fleet) == 2
        clock.set_ahead(ahead)
        await watch(service, clock, 61)
        lines = (await service.histories.of("canary", 3600.0, 9)).lines
        assert lines[0].replicas == {"a": 2}
        assert [line.watched_ns for line in lines] == sorted({line.watched_ns for line in lines})
        assert lines[-1].watched_ns - lines[0].watched_ns <= 124 * 10**9

    run(tmp_path, scenario, clock=clock)


def test_an_objection_withdrawn_under_a_wrong_clock_delays_nothing(tmp_path: Path) -> None:
    clock = SetClock()

    async def scenario(service: Service) -> None:
        canary, fleet = await rollout(service, 5.0)
        prove(service, canary, "a")
        clock.set_ahead(DAY)
        await service.following.object("canary", "its AUC fell")
        await service.following.withdraw("canary")
        clock.set_ahead(0.0)
        await watch(service, clock, 9)
        assert fleet.waits == "no version has been kept since consumer 'canary' withdrew its objection"
        await service.versions.keep(MODEL, "again")
        await watch(service, clock, 1)
        assert followed(fleet) == 2

    run(tmp_path, scenario, clock=clock)


def test_a_service_that_was_suspended_has_seen_nothing(tmp_path: Path) -> None:
    clock = SetClock()

    async def scenario(service: Service) -> None:
        canary, fleet = await rollout(service, 40.0)
        prove(service, canary, "a")
        await watch(service, clock, 2)
        clock.wait(300.0)
        await watch(service, clock, 1)
        assert followed(fleet) == 1

    run(tmp_path, scenario, clock=clock)


def test_a_replica_that_was_lost_begins_the_time_anew(tmp_path: Path) -> None:
    clock = SetClock()

    async def scenario(service: Service) -> None:
        canary, fleet = await rollout(service, 5.0)
        replicas = [prove(service, canary, name) for name in "ab"]
        await watch(service, clock, 4)
        assert replicas[1].stream
        service.registry.disconnect(canary, replicas[1], replicas[1].stream, "it died", expected=True)
        await watch(service, clock, 1)
        prove(service, canary, "b", "another process")
        await watch(service, clock, 5)
        assert followed(fleet) == 1
        await watch(service, clock, 1)
        assert followed(fleet) == 2, "both hold it, and go on"

    run(tmp_path, scenario, clock=clock)


def test_what_was_held_before_a_replica_was_lost_counts_no_more(tmp_path: Path) -> None:
    """Perhaps it died of it. The other one holds the next version already."""
    clock = SetClock()

    async def scenario(service: Service) -> None:
        canary, fleet = await rollout(service, 2.0)
        replicas = [prove(service, canary, name) for name in "ab"]
        await watch(service, clock, 1)
        session = await join(service)
        await cut(session, 3)
        for each in replicas:
            service.registry.acknowledge(canary, each, service.models[MODEL].position)
        assert replicas[1].stream
        service.registry.disconnect(canary, replicas[1], replicas[1].stream, "it died", expected=True)
        await watch(service, clock, 9)
        assert followed(fleet) == 1
        assert fleet.waits == "not all replicas of consumer 'canary' have held a later kept version"

    run(tmp_path, scenario, clock=clock)
