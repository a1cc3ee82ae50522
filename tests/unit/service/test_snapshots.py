"""Models that go from one service to another, with all that their consumers hold, and snapshots of them."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.local_service import publish, send
from tests.support.many_logs import ManyLogs, not_owner
from tests.support.wire import part
from tests.unit.support.async_tests import as_test

from deltasync.core.errors import NotOwner, StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.ownership.alone import Alone
from deltasync.ownership.member import Member
from deltasync.service.model_files import ModelFiles
from deltasync.service.moves import Moves
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.service.snapshot_fit import Fit, LogEnd, fitness
from deltasync.service.snapshots import SnapshotLoop, SnapshotOptions
from deltasync.snapshots import place as places
from deltasync.snapshots.manifest import Manifest
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import check_snapshot, snapshots_of
from deltasync.storage.log_store import LogStore, LogUnavailable

MODEL = "clicks"
STREAMS = (f"seals/{MODEL}", f"cuts/{MODEL}")
Rows = dict[str, np.ndarray[Any, Any]]


class Process:
    """A service on logs that others take over, with snapshots."""

    def __init__(self, service: Service, logs: ManyLogs, place: SnapshotPlace) -> None:
        self.service, self.logs, self.place = service, logs, place
        self.moves = Moves(service)
        self.snapshots = SnapshotLoop(service, SnapshotOptions(url=place.url, keep=2), place)
        call = asyncio.get_running_loop().call_soon_threadsafe
        self.files = ModelFiles(place, service.models_directory, service.events, lambda do: call(do))

    async def take(self) -> None:
        log = self.logs.open(MODEL)
        log.shared = True
        await asyncio.to_thread(self.files.make, MODEL, log)
        await self.moves.take(MODEL, log)

    async def give_up(self) -> None:
        await self.moves.give_up(MODEL, not_owner, written=True)
        self.logs.give_up(MODEL)
        self.snapshots.forget(MODEL)

    @property
    def rows(self) -> Rows:
        return {table.spec.name: np.array(table.rows) for table in self.service.models[MODEL].tables}

    @property
    def version(self) -> int:
        return self.service.models[MODEL].position.number


@asynccontextmanager
async def process(folder: Path, name: str) -> AsyncIterator[Process]:
    async with asyncio.TaskGroup() as tasks:
        logs = ManyLogs(folder / "logs")
        service = Service(ServiceOptions(data_dir=folder / name), tasks, logs)
        service.owners = Alone(Member(name, "", ""))  # Whoever asks is at the right one.
        try:
            yield Process(service, logs, SnapshotPlace(str(folder / "snapshots")))
        finally:
            await service.drain()


def run(folder: Path, scenario: Callable[[Process, Process], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), process(folder, "a") as a, process(folder, "b") as b:
            await scenario(a, b)

    asyncio.run(main())


in_processes = partial(as_test, run, 2)


def same(found: Rows, wanted: Rows) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(each, wanted[name]) for name, each in found.items()
    )


async def cut(session: Any, step: int, *ids: int) -> None:
    await send(session, part(step, [(0, list(ids), np.full((len(ids), 4), step, np.float32))]))
    await session.coordinator.settled()


@in_processes()
async def test_the_next_owner_begins_with_the_snapshot_and_goes_on_with_the_log(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    await cut(session, 2, 1)
    manifest = await a.snapshots.make(MODEL)
    assert (manifest.first, manifest.version) == (2, 2)
    await cut(session, 3, 2, 3)
    await a.snapshots.make(MODEL)
    assert not list(a.logs.of(MODEL).read(f"cuts/{MODEL}", 0, 2))
    assert list(a.logs.of(MODEL).read(f"cuts/{MODEL}", 3, 3))
    await cut(session, 4, 3)
    before = a.rows
    await a.give_up()
    await b.take()
    assert same(b.rows, before)
    assert b.version == 4


@in_processes()
async def test_what_consumers_with_a_policy_hold_is_in_it(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    consumer = await a.service.create_consumer("top", MODEL, Policy(top_k=2))
    replica = a.service.registry.connect(consumer, "r", asyncio.Event())
    view = a.service.views.by_consumer()["top"]

    async def released() -> None:
        before = view.position
        while view.position == before:
            await view.changed()
        a.service.registry.acknowledge(consumer, replica, view.position)

    await released()
    await cut(session, 2, *range(4))
    await released()
    await a.snapshots.make(MODEL)
    await cut(session, 3, *range(4))
    await released()
    held = {each.delivery.spec.name: np.array(each.held.rows) for each in view.state.tables}
    history, position = view.history, view.position
    await a.give_up()
    await b.take()
    after = b.service.views.by_consumer()["top"]
    assert (after.history, after.position) == (history, position)
    assert same({each.delivery.spec.name: np.array(each.held.rows) for each in after.state.tables}, held)


@in_processes()
async def test_only_what_has_changed_is_stored_again(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    first = await a.snapshots.make(MODEL)
    await cut(session, 2, 1)
    second = await a.snapshots.make(MODEL)
    assert second.bytes > 0
    stored = {piece.object for table in second.tables for piece in table.blocks}
    assert len({piece.object for table in first.tables for piece in table.blocks} & stored) == 1
    assert second.new_bytes() < first.new_bytes() * 2


@in_processes()
async def test_old_ones_go_and_those_that_are_kept_are_whole(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.service.snapshots._YOUNG_NS", 0)
    await a.take()
    session = await publish(a.service)
    for step in range(2, 7):
        await cut(session, step, step)
        await a.snapshots.make(MODEL)
    found = snapshots_of(a.place, MODEL)
    assert [each.version for each in found.manifests] == [6, 5]
    assert [check_snapshot(a.place, each) for each in found.manifests] == [[], []]
    used = {piece.object for each in found.manifests for piece in each.pieces}
    assert {each.name for each in a.place.names(f"{MODEL}/data")} == used


def _lose(log: LogStore, version: int) -> None:
    """Have a log that has forgotten what came after a version."""
    for kind in ("cuts", "seals"):
        log.drop(f"{kind}/{MODEL}", version + 1).result()


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
@in_processes()
async def test_a_log_that_went_back_goes_on_with_the_newest_that_there_is(
    a: Process, b: Process, lost: int
) -> None:
    await a.take()
    session, rows = await publish(a.service), {1: dict[str, Any]()}
    for step in (2, 3, 4):
        await cut(session, step, step)
        rows[step] = a.rows
        if step < 4:
            await a.snapshots.make(MODEL)
    await a.give_up()
    _lose(b.logs.open(MODEL), lost)
    b.logs.give_up(MODEL)
    await b.take()
    assert b.version == max(lost, 3)
    assert same(b.rows, rows[max(lost, 3)])
    session = await publish(b.service, 5, run="later", started=2)
    assert b.version == max(lost, 3) + 1


def test_damaged_and_forked_snapshots_are_passed_over(tmp_path: Path) -> None:
    async def scenario(a: Process, b: Process) -> None:
        await a.take()
        session = await publish(a.service)
        await cut(session, 2, 2)
        await a.snapshots.make(MODEL)
        await cut(session, 3, 3)
        newest = await a.snapshots.make(MODEL)
        await cut(session, 4, 4)
        before = a.rows
        await a.give_up()
        (tmp_path / "snapshots" / newest.tables[0].blocks[0].object).write_bytes(b"damaged")
        await b.take()
        assert same(b.rows, before)

    run(tmp_path, scenario)


@in_processes()
async def test_rows_that_the_log_has_lost_are_asked_of_the_trainer(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    await a.snapshots.make(MODEL)
    await cut(session, 2, 2)
    before = a.rows
    await cut(session, 3, 3)
    await a.give_up()
    b.logs.open(MODEL).drop(f"cuts/{MODEL}", 3, 0).result()
    b.logs.give_up(MODEL)
    await b.take()
    assert (b.version, same(b.rows, before)) == (2, True)


Step = tuple[str, list[int]]


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("cut"), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)),
            st.tuples(st.sampled_from(["snapshot", "move", "kill"]), st.just([])),
        ),
        max_size=12,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_between_the_rows_are_those_that_were_published(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    async def scenario(a: Process, b: Process) -> None:
        processes, here, made = [a, b], 0, list[tuple[Manifest, dict[str, Any]]]()
        await a.take()
        session, step = await publish(a.service), 1
        wanted = a.rows
        for kind, ids in steps:
            if kind == "cut":
                step += 1
                await cut(session, step, *sorted(ids))
                wanted = processes[here].rows
            elif kind == "snapshot":
                manifest = await processes[here].snapshots.make(MODEL)
                made.append((manifest, wanted))
            else:
                await processes[here].give_up()
                here = 1 - here
                await processes[here].take()
                assert same(processes[here].rows, wanted)
                session = await publish(processes[here].service, step := step + 1, run=f"run-{step}", started=step)
                wanted = processes[here].rows
        for manifest, _ in made:
            if manifest in snapshots_of(a.place, MODEL).manifests:
                assert check_snapshot(a.place, manifest) == []

    run(tmp_path_factory.mktemp("moves"), scenario)


@pytest.mark.parametrize("broken", ["log", "place"])
@in_processes()
async def test_what_does_not_answer_while_a_model_is_taken_is_asked_again_and_nothing_is_dropped(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """At whichever read it is: neither is a snapshot passed over for it, nor a version given up."""
    await a.take()
    session = await publish(a.service)
    for step in (2, 3, 4, 5):
        await cut(session, step, step, step + 1)
        if step < 5:
            await a.snapshots.make(MODEL)
    before, version = a.rows, a.version
    await a.give_up()
    log = b.logs.open(MODEL)
    log.shared = True
    had = [[bytes(each.payload) for each in log.read(name)] for name in STREAMS]
    failures = 0
    for number in range(1000):
        with monkeypatch.context() as patch:
            calls = itertools.count()
            if broken == "log":
                patch.setattr(log, "read", failing(log.read, calls, number, LogUnavailable("away")))
            else:
                patch.setattr(b.place, "get", failing(b.place.get, calls, number, StorageFailed("away")))
            try:
                await asyncio.to_thread(b.files.make, MODEL, log)
            except StorageFailed:
                failures += 1
                found = [[bytes(each.payload) for each in log.read(name)] for name in STREAMS]
                assert found == had
                continue
        break
    assert failures > 2
    await b.moves.take(MODEL, log)
    assert (b.version, same(b.rows, before)) == (version, True)


def failing(call: Any, calls: Any, number: int, error: Exception) -> Any:
    """A function whose call of that number fails; of one that returns an iterator, as it is read."""

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*arguments, **named)

    return called


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), OSError(28, "no space left on device")], ids=str)
@in_processes()
async def test_storage_that_refuses_stops_nothing_and_is_told(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    await a.take()
    session = await publish(a.service)
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.snapshots.place._put_file", Mock(side_effect=error))
        with pytest.raises(StorageFailed, match=str(error.strerror)):
            await a.snapshots.make(MODEL)
        await cut(session, 2, 1)
        assert list(a.logs.of(MODEL).read(f"cuts/{MODEL}", 1, 1))
    assert str(error.strerror) in a.snapshots.failure(MODEL)
    assert (a.snapshots.failures, len(a.snapshots.troubles)) == (1, 1)
    assert (await a.snapshots.make(MODEL)).version == 2
    assert (a.snapshots.failure(MODEL), a.snapshots.troubles) == ("", [])


@in_processes()
async def test_storage_that_is_slow_holds_up_no_cut(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.take()
    session = await publish(a.service)
    storing, go, put = threading.Event(), threading.Event(), places._put_file

    def slow(path: Path, content: bytes) -> None:
        storing.set()
        assert go.wait(60)
        put(path, content)

    monkeypatch.setattr("deltasync.snapshots.place._put_file", slow)
    making = asyncio.create_task(a.snapshots.make(MODEL))
    await asyncio.to_thread(storing.wait, 60)
    await cut(session, 2, 1)
    assert (a.version, making.done()) == (2, False)
    go.set()
    assert not check_snapshot(a.place, await making)


@in_processes()
async def test_the_next_owner_has_the_rows_the_consumers_and_the_history(a: Process, b: Process) -> None:
    await a.take()
    consumer = await a.service.create_consumer("predictors", MODEL, Policy())
    session = await publish(a.service)
    await send(session, part(2, [(0, [1, 3], np.ones((2, 4), np.float32))]))
    await session.coordinator.settled()
    replica = a.service.registry.connect(consumer, "r", asyncio.Event())
    held = a.service.models[MODEL].position
    a.service.registry.acknowledge(consumer, replica, held)
    before = a.rows
    await a.give_up()
    await b.take()
    assert b.rows.keys() == before.keys()
    assert all(np.array_equal(each, before[name]) for name, each in b.rows.items())
    assert b.service.models[MODEL].position.is_sealed_as(held)
    assert b.service.registry.get("predictors").replicas["r"].applied == Position(held.history, held.number)
    session = await publish(b.service, 3, run="later", started=2)
    assert b.service.models[MODEL].position.number == 3


@in_processes()
async def test_who_has_given_a_model_up_has_nothing_of_it(a: Process, b: Process) -> None:
    await a.take()
    consumer = await a.service.create_consumer("predictors", MODEL, Policy(top_k=3))
    session = await publish(a.service)
    ended = asyncio.Event()
    a.service.registry.connect(consumer, "r", ended)
    await a.give_up()
    assert ended.is_set()
    assert consumer.moved
    assert (a.service.models, a.service.coordinators, a.service.registry.consumers) == ({}, {}, {})
    assert a.service.views.by_consumer() == {}
    assert not a.service.directory(MODEL).exists()
    assert a.service.limits.taken["bytes_in_all"] == 0
    with pytest.raises(NotOwner):
        await send(session, part(2, []))


@in_processes()
async def test_a_model_of_which_nothing_is_published_is_given_up_with_its_ranks(a: Process, b: Process) -> None:
    await a.take()
    coordinator = await a.service.open_model(MODEL)
    await a.give_up()
    with pytest.raises(NotOwner):
        coordinator.cut_of(None, 1)  # type: ignore[arg-type]  # Refused before it is looked at.
    await b.take()
    await publish(b.service)


@in_processes()
async def test_a_cut_that_its_log_does_not_take_any_more_holds_nobody_up(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    a.logs.of(MODEL).close()  # As a fenced one: it takes nothing any more.
    await a.moves.give_up(MODEL, not_owner, written=False)
    with pytest.raises(NotOwner):
        await send(session, part(2, []))


def fitting(first: int, version: int, seal: int) -> Manifest:
    return Manifest(
        head={}, model="m", history="h", first=first, version=version, seal=seal, made_unix_ns=1, id="i", tables=[]
    )


PAST = {1: 11, 2: 12, 3: 13, 4: 14}


@pytest.mark.parametrize(
    ("version", "seals", "cut", "fit"),
    [
        (3, PAST, 0, Fit.FITS),
        (3, PAST, 3, Fit.FITS),
        (4, PAST, 2, Fit.FITS),
        (2, PAST, 3, Fit.GAP),
        (4, {1: 11, 2: 12}, 0, Fit.AHEAD),
        (4, {}, 0, Fit.AHEAD),
        (4, {1: 11, 2: 99}, 0, Fit.FORKED),
        (3, {1: 11, 2: 12, 3: 99, 4: 98}, 0, Fit.FORKED),
        (2, {4: 14, 5: 15}, 2, Fit.FITS),
    ],
)
def test_it_fits_is_ahead_forked_or_leaves_a_gap(version: int, seals: dict[int, int], cut: int, fit: Fit) -> None:
    found = fitness(fitting(1, version, PAST[version]), PAST, LogEnd(seals, cut))
    assert found.fit is fit
    assert f"version {version}" in found.reason
