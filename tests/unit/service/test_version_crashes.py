"""kill -9 while versions are kept, released, followed and rolled back: each is done or not, never half."""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.support.crashes import Crashes
from tests.support.faults import Faults
from tests.support.local_service import join, opened, publish, run, send, view_of
from tests.support.wire import USER, part

from deltasync.base.events import Event, EventKind
from deltasync.consumers.follow import BACK, LIVE, RolloutDelay
from deltasync.core.policy import Policy
from deltasync.service.rollback import roll_back
from deltasync.service.service import Service

MODEL = "clicks"
POLICIES = {"canary": Policy(), "fleet": Policy(), "ranked": Policy(top_k=3)}
Rows = dict[str, bytes]


class State(NamedTuple):
    """What an operator finds in a service."""

    kept: list[tuple[str, int]]
    follows: dict[str, tuple[int, int] | None]  # The version, and the one to go back to.
    objects: str
    seals: list[tuple[int, int | None]]


async def state_of(service: Service) -> State:
    follows = dict[str, tuple[int, int] | None]()
    for name in POLICIES:
        each = service.registry.get(name)
        before = each.distance.before.version if each.distance and each.distance.before else 0
        follows[name] = (each.follows.kept.version, before) if each.follows else None
    objection = service.registry.get("canary").objection
    return State(
        [(each.name, each.version) for each, _ in await service.versions.kept(MODEL)],
        follows,
        objection.reason if objection and objection.in_force else "",
        [(seal.version, seal.rollback_of) for seal in service.models[MODEL].seals],
    )


def rows_of(service: Service) -> Rows:
    return {table.spec.name: table.rows.tobytes() for table in service.models[MODEL].tables}


async def arrive(service: Service, name: str) -> None:
    """Wait until replicas of a consumer would hold what it follows."""
    consumer = service.registry.get(name)
    if not consumer.replicas:
        service.registry.connect(consumer, "a", asyncio.Event())
    if consumer.follows:
        while not view_of(service, name).arrived(consumer.policy):
            await asyncio.sleep(0.001)


class Play:
    """Does one thing after another, and notes what each copy of the data directory may be.

    Attributes:
        actions: how many it has done.
        may_be: the action during which each copy was made, and the states before and after it.
        rows: the model's rows, by version.
    """

    def __init__(self, service: Service, crashes: Crashes) -> None:
        self.actions = 0
        self.may_be = list[tuple[int, State, State]]()
        self.rows = dict[int, Rows]()
        self._service, self._crashes = service, crashes

    async def do(self, action: Callable[[], Awaitable[object]]) -> None:
        before = await state_of(self._service)
        self._note_rows()
        await action()
        await self._service.models.coordinators[MODEL].settled()
        for name in POLICIES:
            await arrive(self._service, name)
        after = await state_of(self._service)
        assert after != before
        self._note_rows()
        self.actions += 1
        self.may_be += [(self.actions, before, after)] * (len(self._crashes.copies) - len(self.may_be))

    def _note_rows(self) -> None:
        self.rows[self._service.models[MODEL].position.number] = rows_of(self._service)


@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_action_is_done_or_not_whenever_it_ends(tmp_path: Path, remote: bool) -> None:
    def options(disks: Path) -> dict[str, Any]:
        return {"keep_checkpoints": 2} | ({"checkpoints": str(disks / "url")} if remote else {})

    plays, faults, ended = list[Play](), Faults(), ExitStack()
    crashes = Crashes(tmp_path / "disks", tmp_path, appends=True)

    async def live(service: Service) -> None:
        session = await publish(service)
        for name, policy in POLICIES.items():
            await service.consumers.create(name, MODEL, policy)
            await arrive(service, name)
        ended.enter_context(crashes.of(faults))
        play, follow, versions = Play(service, crashes), service.following, service.versions
        plays.append(play)

        def change(step: int) -> Awaitable[object]:
            return send(session, part(step, [(0, [step, 9], np.full((2, USER.dim), step, "<f4"))]))

        def roll_back_to(version: str) -> Awaitable[object]:
            return roll_back(service.models, MODEL, version, service.events, "me")

        await play.do(lambda: versions.keep(MODEL, "one"))
        await play.do(lambda: change(2))
        await play.do(lambda: versions.keep(MODEL, "two"))
        await play.do(lambda: change(3))
        await play.do(lambda: follow.follow("fleet", "two"))
        await play.do(lambda: follow.follow("ranked", "one"))
        await play.do(lambda: follow.follow("fleet", "one"))
        await play.do(lambda: follow.object("canary", "its AUC fell"))
        await play.do(lambda: follow.follow("fleet", LIVE))
        distance = RolloutDelay("canary", 60.0, BACK)
        await play.do(lambda: follow.follow_consumer("fleet", distance, "two"))
        await play.do(lambda: follow.withdraw("canary"))
        await play.do(lambda: versions.keep(MODEL))
        await play.do(lambda: roll_back_to("one"))
        await play.do(lambda: follow.follow("ranked", LIVE))
        await play.do(lambda: versions.release(MODEL, "one"))
        await service.checkpoints.make(MODEL)

    with ended:
        run(tmp_path / "disks" / "data", live, faults=faults, **options(tmp_path / "disks"))
    (play,) = plays

    async def goes_on(copy: Path, before: State, after: State) -> bool:
        failed = list[Event]()

        def listen(event: Event) -> None:
            if event.kind is EventKind.FAILED:
                failed.append(event)

        async with asyncio.timeout(20), opened(copy / "data", listen, **options(copy)) as service:
            state, model = await state_of(service), service.models[MODEL]
            assert state in (before, after)
            assert rows_of(service) == play.rows[model.position.number]
            versions = await service.versions.kept(MODEL)
            for kept, _ in versions:
                loaded = await asyncio.to_thread(model.load_kept, kept.id, Policy())
                assert {key.name: table.rows.tobytes() for key, table in loaded.items()} == play.rows[kept.version]
            for name in POLICIES:
                await arrive(service, name)
                if follows := state.follows[name]:
                    tables = view_of(service, name).tables
                    assert {table.spec.name: table.rows.tobytes() for table in tables} == play.rows[follows[0]]
            session = await join(service, run="next", started=time.time_ns(), continues=model.position)
            await send(session, part(9, [(0, [1], np.zeros((1, USER.dim), "<f4"))]))
            await session.coordinator.settled()
            await service.checkpoints.make(MODEL)
        kept_here = {each.name for each in (copy / "data").rglob("kept/*")}
        assert kept_here <= {f"{each.id}.json" for each, _ in versions}, "nothing is left that nobody releases"
        assert failed == []
        return state == after

    done = dict[int, list[bool]]()  # By action.
    for copy, (action, before, after) in zip(crashes.copies, play.may_be, strict=False):
        done.setdefault(action, []).append(asyncio.run(goes_on(copy, before, after)))
        shutil.rmtree(copy)
    assert len(done) == play.actions == 15
    for each in done.values():
        assert (each[0], each[-1]) == (False, True)
        assert each == sorted(each), "what was done is not undone"
