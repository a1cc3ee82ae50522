"""While a release is on its way to the disk, cuts are applied and replicas fed; what fails is tried again."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from unittest import mock

import numpy as np
import pytest
from tests.support.local_model import LocalModel, commit
from tests.support.releases import live_rows
from tests.support.seals import sealed
from tests.support.view_scenarios import (
    ITEM,
    SINGLE_ROWS,
    TOP,
    USER,
    before_turns,
    bits_of,
    changed,
    held_by_a_replica,
    same_as_the_model,
    small_blocks,
)
from tests.unit.views.models import Models

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.events import Event, EventKind, Events
from deltasync.consumers.consumer import Consumer, Pause, Replica
from deltasync.core.policy import Policy
from deltasync.core.rows import DamagedRows
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType
from deltasync.model.releases import FrozenRelease
from deltasync.views.view import ReleaseLoop, View


class Disk:
    """Holds back the records of a release, until it is let go."""

    def __init__(self) -> None:
        self.begun, self._go, self._loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
        self.threads: list[str] = []

    def __call__(self, _stream: str) -> None:
        self.threads.append(threading.current_thread().name)
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go.wait(20)

    def let_go(self) -> None:
        self._go.set()


def broken(*_: object, **_what: object) -> None:
    raise ZeroDivisionError("a mistake of ours")


def consumer_of(replica: Replica) -> Consumer:
    return Consumer("top", "clicks", 0, TOP, {replica.name: replica})


def loop_of(view: View, consumer: Consumer, told: list[Event], pause: float) -> ReleaseLoop:
    """The loop of a view, which pauses for as many seconds after each failure."""
    return ReleaseLoop(consumer, view, Events(told.append), lambda: repeat(pause))


def acknowledge(consumer: Consumer, view: View) -> None:
    """Move the replicas to the newest release and wake the loop, as acks do."""
    for replica in consumer.replicas.values():
        if replica.applied != view.position:
            replica.applied = view.position
            consumer.signal.wake()


async def _becomes(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not wanted():
            await asyncio.sleep(0.001)


async def test_cuts_go_on_while_a_release_waits_for_the_disk(local: LocalModel) -> None:
    """It is shown once it is on disk, as of the version that it was made of."""
    view = await local.prepared_view(TOP)
    before = view.position
    await local.cut(changed(1, USER, 3, 4))
    wanted = local.model.tables[0].rows.copy()
    disk = Disk()
    with local.log_that(disk):
        making = asyncio.create_task(view.make_release(Policy(), 0))
        await disk.begun.wait()
        await local.cut(changed(2, USER, 4, 5))  # Would wait for ever if the model's thread did.
        assert local.model.position.number == 3
        assert (view.position, view.version_of(before.number)) == (before, 1)
        given = view.release(before.number)
        disk.let_go()
        await making
    release = await given
    assert isinstance(release, FrozenRelease)
    rows = live_rows(release)[0]
    assert release.head == view.state.head
    assert rows.ids.tolist() == [3, 4]
    assert rows.values.tobytes() == wanted[[3, 4]].tobytes()
    assert [view.version_of(before.number + each) for each in (0, 1)] == [1, 2]
    assert view.state.compared_version == 2
    assert not any(name.startswith("model-") for name in disk.threads)
    await view.make_release(Policy(), 0)
    assert same_as_the_model(await held_by_a_replica(view), local)


async def test_a_run_that_begins_between_turns_is_released_whole(local: LocalModel) -> None:
    """Its rows do not fit those of the run before."""
    local.options = small_blocks(2 * USER.row_bytes)
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 1, 2, 3))
    other_run = local.batches(changed(2, USER, *range(USER.rows)))

    async def cut_meanwhile(turn: int) -> None:
        if turn == 2:
            await local.cut_batches(other_run, resync=True)
            await local.cut(changed(3, USER, 4, 5))

    before_turns(local, cut_meanwhile)
    await view.make_release(TOP, 0)
    assert view.state.compared_version == 4
    assert same_as_the_model(await held_by_a_replica(view), local)


async def test_a_run_whose_seal_the_loop_has_not_seen_is_released_whole(local: LocalModel) -> None:
    """As soon as its seal is on disk, it is."""
    model, view = local.model, await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 1, 2, 3))
    other_run = local.batches(changed(2, USER, *range(USER.rows)))
    seal = replace(sealed(3), sealed_unix_ns=3, resync=True)

    committing = list[asyncio.Task[None]]()

    async def cut_before(_turn: int) -> None:
        if not committing:
            committing.append(asyncio.create_task(commit(model, seal, other_run)))
            await asyncio.sleep(0)  # It waits for the log.
            while model.submit(lambda: model.tables.seal).result(20) != seal:
                pass  # This loop does not know yet that the cut is durable.

    before_turns(local, cut_before)
    await view.make_release(TOP, 0)
    assert view.state.compared_version == 3
    assert same_as_the_model(await held_by_a_replica(view), local)


@pytest.mark.parametrize("prepared", [False, True])
async def test_an_unexpected_error_is_reported_and_retried(local: LocalModel, prepared: bool) -> None:
    """It neither ends the service nor keeps other consumers from anything."""
    told: list[Event] = []
    view = local.view()
    consumer = consumer_of(Replica("a", stream=asyncio.Event()))
    loop = loop_of(view, consumer, told, 0.001)

    def went_on() -> bool:
        acknowledge(consumer, view)
        return view.state.compared_version == 2 and not view.failure

    async with asyncio.TaskGroup() as tasks:
        if prepared:
            await view.prepare(TOP)
        with local.log_that(broken):
            loop.begin(tasks)
            await local.cut(changed(1, USER, 3))
            acknowledge(consumer, view)
            await _becomes(lambda: len(told) > 2)
            assert view.failure.endswith("the service retries: ZeroDivisionError: a mistake of ours")
        # The first release to succeed may be an earlier one that the log refused.
        await _becomes(went_on)
        await loop.end()
    assert {each.kind for each in told} <= {EventKind.FAILED, EventKind.RELEASE_MADE}
    assert isinstance(told[0].error, ZeroDivisionError)
    assert told[0].subject == {"consumer": "top"}
    assert same_as_the_model(await held_by_a_replica(view), local)


async def test_an_error_at_every_version_is_reported_once(local: LocalModel) -> None:
    told: list[Event] = []
    view = await local.prepared_view(TOP)
    loop = loop_of(view, consumer_of(Replica("a", view.position, stream=asyncio.Event())), told, 3600.0)
    async with asyncio.TaskGroup() as tasks:
        with local.log_that(broken):
            loop.begin(tasks)
            for seed in range(5):
                await local.cut(changed(seed, USER, 3))
            await _becomes(lambda: bool(told))
            await local.cut(changed(5, USER, 3))
            await loop.end()
    assert len(told) == 1


def test_a_partly_applied_version_is_released_to_nobody(runner: asyncio.Runner, local: LocalModel) -> None:
    """One that could be applied only in part so far."""

    async def scenario() -> None:
        view, model = await local.prepared_view(TOP), local.model
        number, seal = view.position.number, replace(sealed(2), sealed_unix_ns=2)
        rows = local.batches(changed(2, USER, 3) | changed(2, ITEM, 4))
        failed = asyncio.Event()
        mistake = mock.patch.object(model.tables[1], "apply", side_effect=ZeroDivisionError("a mistake of ours"))
        mistake.start()
        committed = asyncio.create_task(commit(model, seal, rows, failed=lambda *_: failed.set()))
        await failed.wait()
        for given in (
            model.release(0),
            view.make_release(TOP, 0),
            view.prepare(Policy(top_k=1, value_type=ValueType.INT8)),
        ):
            with pytest.raises(ServiceUnavailable, match="model 'clicks' is applying a version again"):
                await given
        assert view.position.number == number
        mistake.stop()
        await committed
        assert model.position.number == 2
        await view.make_release(Policy(), 0)
        assert same_as_the_model(await held_by_a_replica(view), local)

    runner.run(scenario())


@pytest.mark.parametrize("policy", [Policy(top_k=1000), Policy(value_type=ValueType.INT8), Policy(mode=Mode.IDS)])
async def test_rows_that_change_during_an_update_keep_their_version(
    local: LocalModel, models: Models, policy: Policy
) -> None:
    local.options = SINGLE_ROWS
    other = await local.prepared_view(policy, "other")
    view, consumer = await local.prepared_view(policy), Consumer("top", "clicks", 1, policy)
    await local.cut(changed(1, USER, *range(9)) | changed(1, ITEM, 1, 2))
    await other.make_release(policy, 0)  # Nothing changes while it is made.
    cuts = 0

    async def with_cuts(turn: int) -> None:
        nonlocal cuts
        if local.model.tables[0].before_change:  # It has begun to update rows.
            cuts += 1
            consumer.pause = Pause.now("it has begun, so it is made")
            await local.cut(changed(1 + cuts, USER, *range(cuts % 3, 9, 3)))

    with before_turns(local, with_cuts):
        await view.make_release(policy, 0, lambda: consumer.pause is None)
    assert cuts > 3
    assert view.state.head
    assert view.state.head.version == 2
    expected, found = await bits_of(other), await bits_of(view)
    assert {name: table[0] for name, table in found.tables.items()} == {
        name: table[0] for name, table in expected.tables.items()
    }
    local = await models.open()
    assert await bits_of(local.view()) == found
    await local.view().make_release(policy, 0)
    await local.view("other").make_release(policy, 0)
    for each in (local.view(), local.view("other")):
        assert each.state.head
        assert each.state.head.version == 2 + cuts
    assert (await bits_of(local.view())).tables == (await bits_of(local.view("other"))).tables


async def test_a_damaged_row_overwritten_during_an_update_fails_the_release(local: LocalModel) -> None:
    """The cut is none the worse: it brings the row whole."""
    local.options = SINGLE_ROWS
    view = await local.prepared_view(Policy())
    await local.cut(changed(1, USER, *range(9)))
    on_thread = local.model.on_thread

    def harm() -> None:
        local.model.tables[0].rows[8, 0] += 1

    async def with_a_cut(turn: int) -> None:
        if local.model.tables[0].before_change and local.model.seals.newest_version == 2:
            await on_thread(harm)
            await local.cut(changed(2, USER, 8))

    with before_turns(local, with_a_cut), pytest.raises(DamagedRows, match="user"):
        await view.make_release(Policy(), 0)
    assert local.model.position.number == 3


async def test_a_pause_stops_a_release_that_is_comparing_rows(local: LocalModel) -> None:
    """To look at what has changed may take long: by then the newest version may be one in quarantine."""
    policy = Policy(top_k=1000)
    view = await local.prepared_view(policy)
    consumer = Consumer("top", "clicks", 1, policy)
    consumer.replicas["a"] = Replica("a", view.position, stream=asyncio.Event())
    loop, before = ReleaseLoop(consumer, view, Events()), view.position
    await local.cut({USER.name: {7: np.ones(USER.dim, "<f4")}})

    async def poisoned_meanwhile(turn: int) -> None:
        if turn == 1:
            consumer.pause = Pause.now("the service itself")
            await local.cut({USER.name: {7: np.full(USER.dim, 1e6, "<f4")}})

    with before_turns(local, poisoned_meanwhile):
        await loop._advance()
    assert (consumer.pause is None, view.position) == (False, before)
    await local.model.tables.remove(ITEM.name)
    await loop._advance()
    assert view.position == before, "nor is any other release made"
    assert [each.spec.name for each in view.forms] == [USER.name], "and the table takes no memory"
    consumer.pause = None
    await local.cut({USER.name: {7: np.full(USER.dim, 2, "<f4")}})
    await loop._advance()
    release = await view.release(before.number)
    assert isinstance(release, FrozenRelease)
    assert live_rows(release)[0].values.tolist() == [[2] * USER.dim]
