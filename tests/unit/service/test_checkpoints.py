"""Checkpoints that a service writes and copies, and models that go from one service to another by them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import local_service
from tests.support.faults import Held, HeldWrites, Hook, described, failing
from tests.support.local_service import faults_of, join, publish, send, view_of
from tests.support.log import log_of
from tests.support.many_logs import ManyLogs
from tests.support.wire import WHOLE, full_part, part, random_rows
from tests.unit.support.async_tests import as_test, in_service

from deltasync.base.errors import NotFound, NotOwner, Owner, ServiceUnavailable, StorageFailed
from deltasync.base.events import Event, EventKind
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest
from deltasync.checkpoints.store import CheckpointStore, NotCopied
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import Owners
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service

MODEL = "clicks"
STREAMS = (f"seals/{MODEL}", f"cuts/{MODEL}")
OWNER = Owner("other", "other:7000", "http://other:8080")
Rows = dict[str, np.ndarray[Any, Any]]


class Process:
    """A service on logs that others take over, whose checkpoints are copied to a folder that all share."""

    def __init__(self, service: Service, logs: ManyLogs, url: str, name: str) -> None:
        self.service, self.logs, self.place = service, logs, Place(url)
        self.hosting = service.hosting(logs)
        service.join(Owners(Member(name, "", "")))  # Whoever asks is at the right one.
        self.stored = CheckpointStore(MODEL, self.place)

    async def take(self) -> None:
        await self.hosting.take(MODEL, OWNER)

    async def give_up(self) -> None:
        await self.hosting.give_up(MODEL, "it is another's")

    async def checkpoint(self) -> Manifest:
        return await self.service.checkpoints.make(MODEL)

    @property
    def rows(self) -> Rows:
        return {table.spec.name: np.array(table.rows) for table in self.service.models[MODEL].tables}

    @property
    def version(self) -> int:
        return self.service.models[MODEL].position.number


@asynccontextmanager
async def process(folder: Path, name: str, url: str) -> AsyncIterator[Process]:
    async with asyncio.TaskGroup() as tasks:
        logs = ManyLogs(folder / "logs")
        options = ServiceOptions(data_dir=folder / name, checkpoints=url, keep_checkpoints=2, look_seconds=0.001)
        service = Service(options, tasks, logs, open_place=logs.faults.open_place)
        try:
            yield Process(service, logs, url, name)
        finally:
            await service.drain()


def run(folder: Path, scenario: Callable[[Process, Process], Any], url: str = "") -> None:
    url = url or str(folder / "checkpoints")

    async def main() -> None:
        async with asyncio.timeout(60), process(folder, "a", url) as a, process(folder, "b", url) as b:
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


def versions_in(log: LogStore) -> set[int]:
    return {each.number for each in log.read(f"cuts/{MODEL}")}


# When they are written.


@contextmanager
def written(service: Service) -> Iterator[list[Any]]:
    """The versions of checkpoints that the loop writes meanwhile; it looks all the time."""
    versions = list[Any]()

    def note(event: Event) -> None:
        if event.kind is EventKind.CHECKPOINTED:
            versions.append(event.subject["version"])

    service.events.listen(note)
    running = asyncio.create_task(service.checkpoints.run())
    try:
        yield versions
    finally:
        running.cancel()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.001)


@in_service(checkpoint_bytes=500)
async def test_one_is_written_once_the_log_has_enough_newer_bytes(service: Service) -> None:
    session = await publish(service)  # Every row: enough.
    with written(service) as versions:
        await until(lambda: versions == [1])
        await cut(session, 2, 1)
        await asyncio.sleep(0.01)
        assert versions == [1]
        for step in range(3, 10):
            await cut(session, step, *range(8))
        await until(lambda: len(versions) > 1)
        await until(lambda: min(versions_in(log_of(service))) == versions[-2] + 1)


@in_service(checkpoint_seconds=0.05)
async def test_one_is_written_now_and_then_while_something_changes(service: Service) -> None:
    session = await publish(service)
    with written(service) as versions:
        await until(lambda: versions == [1])
        await cut(session, 2, 1)
        await until(lambda: versions == [1, 2])


@in_service(checkpoint_versions=3)
async def test_many_versions_are_enough_too(service: Service) -> None:
    """Their bytes may never add up, but a seal that is no longer kept cannot be applied again."""
    session = await publish(service)
    with written(service) as versions:
        for step in (2, 3):
            await cut(session, step, 1)
        await until(lambda: versions == [3])


@in_service()
async def test_a_log_that_is_full_has_one_written_at_once(service: Service) -> None:
    session = await publish(service)
    await cut(session, 2, 1)
    log = log_of(service)
    log.refusing = True
    with written(service) as versions:
        await until(lambda: versions == [2])
    assert not log.refusing
    assert versions_in(log) == set()  # Also the rows after the checkpoint before.


@in_service()
async def test_bytes_since_the_newest_checkpoint_are_those_of_later_versions(service: Service) -> None:
    session, steps = await publish(service), itertools.count(2)
    model = service.models[MODEL]
    for writes in (False, False, True, False, False, True):
        if writes:
            await service.checkpoints.make(MODEL)
        else:
            await cut(session, next(steps), 1)
        written = model.checkpointed.version if model.checkpointed else 0
        later = [seal.log_bytes for seal in model.seals if seal.version > written]
        assert model.bytes_since_checkpoint == sum(later)
        assert writes or sum(later) > 0


@in_service()
async def test_a_clean_stop_writes_none(service: Service) -> None:
    await publish(service)
    await service.drain()
    assert not CheckpointStore(MODEL, Place(str(service.options.data_dir / "checkpoints"))).manifests().manifests


@in_service()
async def test_a_model_without_a_version_has_none(service: Service) -> None:
    with pytest.raises(NotFound, match="no model 'clicks'"):
        await service.checkpoints.make(MODEL)


# What fails.


NO_SPACE = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "denied"), OSError(28, "no space"), OSError(30, "read-only")]
)
@in_service()
async def test_a_folder_that_refuses_writes_stops_no_cut_and_is_told(service: Service, error: OSError) -> None:
    session = await publish(service)
    with faults_of(service).place.replaced(put=failing(error)):
        for step in (2, 3):
            with pytest.raises(StorageFailed, match=str(error.strerror)):
                await service.checkpoints.make(MODEL)
            await cut(session, step, 1)
    assert versions_in(log_of(service)) == {1, 2, 3}
    assert str(error.strerror) in service.checkpoints.failure(MODEL)
    (said,) = service.checkpoints.troubles
    assert said.startswith("checkpoints of model 'clicks': ")
    assert service.checkpoints.failures == 2
    assert (await service.checkpoints.make(MODEL)).version == 3
    assert (service.checkpoints.failure(MODEL), service.checkpoints.troubles) == ("", [])


@in_service(checkpoint_bytes=1, checkpoint_retry_seconds=0.02)
async def test_what_fails_is_tried_again_after_pauses_that_grow(service: Service) -> None:
    session = await publish(service)
    with written(service) as versions:
        with faults_of(service).place.replaced(put=failing(NO_SPACE)):
            await until(lambda: service.checkpoints.failures == 3)
        await cut(session, 2, 1)
        await until(lambda: versions == [2])
    assert service.checkpoints.failures < 10


@in_service(checkpoints="file:///nonexistent/at", checkpoint_bytes=1)
async def test_checkpoints_go_on_without_their_copies(service: Service) -> None:
    """The log is cut by those in the data directory, since no other process goes on with it."""
    session = await publish(service)
    no_copies = faults_of(service).place.replaced(put=failing(NO_SPACE, "file:///nonexistent/at"))
    with no_copies, written(service) as versions:
        for step in (2, 3, 4):
            await cut(session, step, 1)
            await until(lambda: bool(versions) and versions[-1] == step)  # noqa: B023
        assert min(versions_in(log_of(service)), default=9) > 2
        assert "at has no copy of it" in service.checkpoints.failure(MODEL)
        with pytest.raises(NotCopied):
            await service.checkpoints.make(MODEL)


@in_processes()
async def test_a_shared_log_keeps_what_is_not_at_the_url(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    with a.logs.faults.place.replaced(put=failing(NO_SPACE, a.place.url)):
        for step in (2, 3, 4):
            with pytest.raises(NotCopied, match="has no copy of it"):
                await a.checkpoint()
            await cut(session, step, step)
    assert versions_in(a.logs.of(MODEL)) == {1, 2, 3, 4}
    await a.checkpoint()
    assert versions_in(a.logs.of(MODEL)) == {1, 2, 3, 4}
    await cut(session, 5, 5)
    await a.checkpoint()
    assert versions_in(a.logs.of(MODEL)) == {5}


@in_service(checkpoints="file:///nonexistent/at")
async def test_storage_that_is_slow_holds_up_neither_cuts_nor_checkpoints(service: Service) -> None:
    session, slow = await publish(service), Held("nonexistent")
    slow.error = NO_SPACE
    with faults_of(service).place.replaced(put=slow):
        copying = asyncio.create_task(service.checkpoints.make(MODEL))
        await asyncio.to_thread(slow.begun.wait, 20)
        model = service.models[MODEL]
        for step in (2, 3):
            await cut(session, step, 1)
            making = asyncio.create_task(service.checkpoints.make(MODEL))
            await until(lambda: model.checkpointed is not None and model.checkpointed.version == step)  # noqa: B023
            making.cancel()
        assert not copying.done()
        slow.let_go()
        await asyncio.wait({copying})


@in_processes()
async def test_no_failure_of_one_ends_the_service(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    with a.logs.faults.place.replaced(put=failing(RuntimeError("a defect"))), written(a.service):
        a.logs.of(MODEL).refusing = True
        await until(lambda: a.service.checkpoints.failures > 0)
        assert a.service.checkpoints.troubles == ["checkpoints of model 'clicks': a defect"]
        a.logs.of(MODEL).refusing = False
        await cut(session, 2, 1)


# What is kept, and what is removed.


@in_processes()
async def test_old_ones_go_and_those_that_are_kept_are_whole(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    for step in range(2, 7):
        await cut(session, step, step)
        await a.checkpoint()
    for place in (a.place, Place(str(a.service.options.data_dir / "checkpoints"))):
        store = CheckpointStore(MODEL, place)
        assert [each.version for each in store.manifests().manifests] == [6, 5]
        assert store.verify() == []


def test_a_model_that_is_deleted_has_none_left(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        session = await publish(service)
        await service.checkpoints.make(MODEL)
        assert (tmp_path / "at" / MODEL).exists()
        session.end("done")
        await until(lambda: not service.models.coordinators[MODEL].connected)
        await service.removals.delete_model(MODEL, "test")
        for folder in (tmp_path / "data" / "checkpoints", tmp_path / "at"):
            assert [each for each in folder.rglob("*") if each.is_file()] == []

    local_service.run(tmp_path / "data", scenario, checkpoints=str(tmp_path / "at"))


@in_processes()
async def test_a_process_keeps_no_checkpoints_of_models_that_others_have(a: Process, b: Process) -> None:
    await a.take()
    await publish(a.service)
    await a.checkpoint()
    own = a.service.options.data_dir / "checkpoints" / MODEL
    assert own.exists()
    await a.give_up()
    await a.hosting.look_after()
    assert not own.exists()


# Taking a model over.


@in_processes()
async def test_the_next_owner_loads_the_checkpoint_and_applies_the_log(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    await cut(session, 2, 1)
    assert (await a.checkpoint()).version == 2
    await cut(session, 3, 2, 3)
    await a.checkpoint()
    assert versions_in(a.logs.of(MODEL)) == {3}
    await cut(session, 4, 3)
    before = a.rows
    await a.give_up()
    await b.take()
    assert same(b.rows, before)
    assert b.version == 4
    session = await publish(b.service, 5, run="later", started=2)
    await b.checkpoint()  # It builds on the one that was loaded.
    assert [each.version for each in b.stored.manifests().manifests] == [5, 3]
    assert b.stored.verify() == []


@pytest.mark.parametrize("later", [Policy(top_k=2), Policy(top_k=3), Policy(tables=("*item",))], ids=str)
@in_processes()
async def test_replicas_of_a_consumer_with_a_policy_go_on_from_what_they_hold(
    a: Process, b: Process, later: Policy
) -> None:
    """Also where the policy has changed since the checkpoint."""
    await a.take()
    session = await publish(a.service)
    consumer = await a.service.consumers.create("top", MODEL, Policy(top_k=2))
    replica = a.service.registry.connect(consumer, "r", asyncio.Event())
    view = view_of(a.service, "top")

    async def released(before: Position) -> None:
        # Rows that were left may have been released meanwhile: the next release waits until a replica holds these.
        a.service.registry.acknowledge(consumer, replica, view.position)
        while view.position == before:
            await view.changed()

    await released(Position(view.history))
    before = view.position
    await cut(session, 2, *range(4))
    await released(before)
    await a.checkpoint()
    before = view.position
    await a.service.consumers.update("top", later)
    await cut(session, 3, *range(4))
    await released(before)
    held = {each.name: np.array(each.held.rows) for each in view.state.tables}
    history, position = view.history, view.position
    await a.give_up()
    await b.take()
    after = view_of(b.service, "top")
    assert (after.history, after.position) == (history, position)
    assert same({each.name: np.array(each.held.rows) for each in after.state.tables}, held)


def _lose(log: LogStore, version: int) -> None:
    """Have a log that has forgotten what came after a version."""
    for stream in STREAMS:
        log.drop(stream, version + 1).result()


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4])
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
            await a.checkpoint()
    await a.give_up()
    _lose(b.logs.open(MODEL), lost)
    b.logs.give_up(MODEL)
    await b.take()
    assert b.version == max(lost, 3)
    assert same(b.rows, rows[max(lost, 3)])
    session = await publish(b.service, 5, run="later", started=2)
    assert b.version == max(lost, 3) + 1


@in_processes()
async def test_a_log_without_versions_goes_on_with_its_only_checkpoint(a: Process, b: Process) -> None:
    """It is not taken for one of a model of which nothing was ever published."""
    await a.take()
    session = await publish(a.service)
    await cut(session, 2, 2)
    await a.checkpoint()
    before = a.rows
    await a.give_up()
    _lose(b.logs.open(MODEL), 0)
    b.logs.give_up(MODEL)
    await b.take()
    assert (b.version, same(b.rows, before)) == (2, True)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    async def scenario(a: Process, b: Process) -> None:
        await a.take()
        session = await publish(a.service)
        await cut(session, 2, 2)
        await a.checkpoint()
        await cut(session, 3, 3)
        newest = await a.checkpoint()
        await cut(session, 4, 4)
        before = a.rows
        await a.give_up()
        (tmp_path / "checkpoints" / newest.layers[-1].files[0].name).write_bytes(b"damaged")
        await b.take()
        assert same(b.rows, before)
        said = [each.text for each in b.service.recent_events.newest(20)]
        assert any(newest.layers[-1].files[0].name in each for each in said)

    run(tmp_path, scenario)


def test_without_checkpoints_the_trainer_sends_every_row_after_a_give_up(tmp_path: Path) -> None:
    async def scenario(a: Process, b: Process) -> None:
        await a.take()
        session = await publish(a.service)
        await a.checkpoint()
        await cut(session, 2, 2)
        await a.checkpoint()
        await a.give_up()
        for each in (tmp_path / "checkpoints").rglob("*"):
            if each.is_file():
                each.write_bytes(b"damaged")
        await b.take()
        assert MODEL not in b.service.models
        with pytest.raises(ServiceUnavailable, match=f"no checkpoint is usable.*give-up {MODEL}"):
            await publish(b.service, 3, run="later", started=2)
        await b.service.removals.give_up_model(MODEL, "an operator")
        await publish(b.service, 3, run="later", started=2)
        assert b.version == 1

    run(tmp_path, scenario)


@in_processes()
async def test_rows_that_the_log_has_lost_are_asked_of_the_trainer(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    await a.checkpoint()
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
            st.tuples(st.sampled_from(["checkpoint", "move"]), st.just([])),
        ),
        max_size=12,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_between_the_rows_are_those_that_were_published(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    async def scenario(a: Process, b: Process) -> None:
        processes, here = [a, b], 0
        await a.take()
        session, step = await publish(a.service), 1
        wanted = a.rows
        for kind, ids in steps:
            if kind == "cut":
                step += 1
                await cut(session, step, *sorted(ids))
                wanted = processes[here].rows
            elif kind == "checkpoint":
                await processes[here].checkpoint()
            else:
                await processes[here].give_up()
                here = 1 - here
                await processes[here].take()
                assert same(processes[here].rows, wanted)
                session = await publish(processes[here].service, step := step + 1, run=f"run-{step}", started=step)
                wanted = processes[here].rows
        assert a.stored.verify() == []

    run(tmp_path_factory.mktemp("moves"), scenario)


@pytest.mark.parametrize("broken", ["log", "place"])
@in_processes()
async def test_taking_a_model_over_drops_nothing_that_cannot_be_read_now(
    a: Process, b: Process, broken: str
) -> None:
    """At whichever read it is: neither is a checkpoint passed over for it, nor a version given up."""
    await a.take()
    session = await publish(a.service)
    for step in (2, 3, 4, 5):
        await cut(session, step, step, step + 1)
        if step < 5:
            await a.checkpoint()
    before, version = a.rows, a.version
    await a.give_up()

    def had() -> list[list[bytes]]:
        log = b.logs.open(MODEL)
        found = [[bytes(each.payload) for each in log.read(name)] for name in STREAMS]
        b.logs.give_up(MODEL)
        return found

    wanted, failures, faults = had(), 0, b.logs.faults
    for number in range(1000):
        if broken == "log":
            replaced = faults.log.replaced(read=failing_once(number, LogUnavailable("away")))
        else:
            replaced = faults.place.replaced(get=failing_once(number, PermissionError(13, "away"), b.place.url))
        try:
            with replaced:
                await b.take()
        except StorageFailed:
            failures += 1
        else:
            break
        await b.give_up()
        assert had() == wanted
    assert failures > 2
    assert (b.version, same(b.rows, before)) == (version, True)


def failing_once(number: int, error: Exception, word: str = "") -> Hook:
    """A hook whose call of that number fails, of those with this word."""
    calls = itertools.count()

    def called(call: Hook, *arguments: Any, **named: Any) -> Any:
        if word in described(arguments) and next(calls) == number:
            raise error
        return call(*arguments, **named)

    return called


@in_processes()
async def test_the_next_owner_has_the_rows_the_consumers_and_the_history(a: Process, b: Process) -> None:
    await a.take()
    consumer = await a.service.consumers.create("predictors", MODEL, Policy())
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
    consumer = await a.service.consumers.create("predictors", MODEL, Policy(top_k=3))
    session = await publish(a.service)
    model, ended = a.service.models[MODEL], asyncio.Event()
    a.service.registry.connect(consumer, "r", ended)
    await a.give_up()
    assert ended.is_set()
    assert consumer.moved
    assert not [*a.service.models, *a.service.models.coordinators, *a.service.registry.consumers]
    assert a.service.views.get(consumer) is None
    assert a.service.limits.number("bytes_in_all") == 0
    with pytest.raises(NotOwner):
        await send(session, part(2, []))
    with pytest.raises(ServiceUnavailable, match="model 'clicks' is stopped in this process"):
        await model.on_thread(lambda: None)


@in_processes()
async def test_a_model_of_which_nothing_is_published_is_given_up_with_its_ranks(a: Process, b: Process) -> None:
    await a.take()
    coordinator = await a.service.publishing.open(MODEL)
    await a.give_up()
    with pytest.raises(NotOwner):
        coordinator.receive(None, 1)  # type: ignore[arg-type]  # Refused before it is looked at.
    await b.take()
    await publish(b.service)


@in_processes()
async def test_a_first_cut_is_sealed_while_its_model_is_given_up(
    a: Process, b: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To add its model, the cut waits for the lock of that operation, and so does who gives the model up."""
    await a.take()
    rows, session = random_rows(1), await join(a.service)
    sealing, giving_up, give_up = HeldWrites(f"seals/{MODEL}"), asyncio.Event(), a.service.reloading.give_up

    async def noted(model: str) -> None:
        await give_up(model)
        giving_up.set()

    monkeypatch.setattr(a.service.reloading, "give_up", noted)
    a.logs.faults.log.hooks["append"] = sealing
    async with a.service.models.changing:
        cut = asyncio.create_task(send(session, full_part(1, rows, WHOLE)))
        await sealing.has_begun()
        given_up = asyncio.create_task(a.give_up())
        await giving_up.wait()
        sealing.let_go()
        await until(lambda: session.coordinator.model.seals.newest is not None)
    await asyncio.wait_for(asyncio.wait([cut, given_up]), 10)
    assert cut.result()
    given_up.result()
    assert not [*a.service.models, *a.service.models.opened]
    await b.take()
    assert all(np.array_equal(*each) for each in zip(b.rows.values(), rows, strict=True))


@in_processes()
async def test_a_cut_that_its_log_does_not_take_any_more_holds_nobody_up(a: Process, b: Process) -> None:
    await a.take()
    session = await publish(a.service)
    a.logs.of(MODEL).close()  # As a fenced one: it takes nothing any more.
    a.logs.fenced = StorageFailed("fenced")
    await a.give_up()
    with pytest.raises(NotOwner):
        await send(session, part(2, []))
