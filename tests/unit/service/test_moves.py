"""A model that goes from one service to another, with all that its consumers hold."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import publish, send
from tests.support.many_logs import ManyLogs, not_owner
from tests.support.wire import part
from tests.unit.support.async_tests import as_test

from deltasync.core.errors import NotOwner
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.ownership.alone import Alone
from deltasync.ownership.member import Member
from deltasync.service.moves import Moves
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.storage.anew import make_anew


class Process:
    """A service on logs that others take over, and where it has its files."""

    def __init__(self, service: Service, logs: ManyLogs) -> None:
        self.service, self.logs, self.moves = service, logs, Moves(service)

    async def take(self, model: str = "clicks") -> None:
        log = self.logs.open(model)
        await asyncio.to_thread(make_anew, log, model, self.service.directory(model))
        await self.moves.take(model, log)

    async def give_up(self, model: str = "clicks") -> None:
        await self.moves.give_up(model, not_owner, written=True)
        self.logs.give_up(model)


@asynccontextmanager
async def process(folder: Path, name: str) -> AsyncIterator[Process]:
    async with asyncio.TaskGroup() as tasks:
        logs = ManyLogs(folder / "logs")
        service = Service(ServiceOptions(data_dir=folder / name), tasks, logs)
        service.owners = Alone(Member(name, "", ""))  # Whoever asks is at the right one.
        try:
            yield Process(service, logs)
        finally:
            await service.drain()


def rows(service: Service) -> dict[str, np.ndarray[Any, Any]]:
    return {table.spec.name: np.array(table.rows) for table in service.models["clicks"].tables}


def run(folder: Path, scenario: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), process(folder, "a") as a, process(folder, "b") as b:
            await scenario(a, b)

    asyncio.run(main())


in_processes = partial(as_test, run, 2)


@in_processes()
async def test_the_next_owner_has_the_rows_the_consumers_and_the_history(a: Process, b: Process) -> None:
    await a.take()
    consumer = await a.service.create_consumer("predictors", "clicks", Policy())
    session = await publish(a.service)
    await send(session, part(2, [(0, [1, 3], np.ones((2, 4), np.float32))]))
    await session.coordinator.settled()
    replica = a.service.registry.connect(consumer, "r", asyncio.Event())
    held = a.service.models["clicks"].position
    a.service.registry.acknowledge(consumer, replica, held)
    before = rows(a.service)
    await a.give_up()
    await b.take()
    assert rows(b.service).keys() == before.keys()
    assert all(np.array_equal(each, before[name]) for name, each in rows(b.service).items())
    assert b.service.models["clicks"].position.is_sealed_as(held)
    assert b.service.registry.get("predictors").replicas["r"].applied == Position(held.history, held.number)
    session = await publish(b.service, 3, run="later", started=2)
    assert b.service.models["clicks"].position.number == 3


@in_processes()
async def test_who_has_given_a_model_up_has_nothing_of_it(a: Process, b: Process) -> None:
    await a.take()
    consumer = await a.service.create_consumer("predictors", "clicks", Policy(top_k=3))
    session = await publish(a.service)
    ended = asyncio.Event()
    a.service.registry.connect(consumer, "r", ended)
    await a.give_up()
    assert ended.is_set()
    assert consumer.moved
    assert (a.service.models, a.service.coordinators, a.service.registry.consumers) == ({}, {}, {})
    assert a.service.views.by_consumer() == {}
    assert not a.service.directory("clicks").exists()
    assert a.service.limits.taken["bytes_in_all"] == 0
    with pytest.raises(NotOwner):
        await send(session, part(2, []))


@in_processes()
async def test_a_model_goes_to_and_fro(a: Process, b: Process) -> None:
    before = None
    for turn in range(4):
        here = (a, b)[turn % 2]
        await here.take()
        if before is not None:
            assert all(np.array_equal(each, before[name]) for name, each in rows(here.service).items())
        await publish(here.service, turn + 1, run=f"run-{turn}", started=turn + 1)
        before = rows(here.service)
        await here.give_up()


@in_processes()
async def test_a_model_of_which_nothing_is_published_is_given_up_with_its_ranks(a: Process, b: Process) -> None:
    await a.take()
    coordinator = await a.service.open_model("clicks")
    await a.give_up()
    with pytest.raises(NotOwner):
        coordinator.cut_of(None, 1)  # type: ignore[arg-type]  # Refused before it is looked at.
    await b.take()
    await publish(b.service)


@in_processes()
async def test_a_cut_that_its_log_does_not_take_any_more_holds_nobody_up(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    a.logs.of("clicks").close()  # As a fenced one: it takes nothing any more.
    await a.moves.give_up("clicks", not_owner, written=False)
    with pytest.raises(NotOwner):
        await send(session, part(2, []))
