"""Views: what fails takes nothing else with it, in one process."""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import release_at_once
from tests.support.local_model import LocalModel
from tests.support.local_service import publish
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    TOP,
    USER,
    changed,
    held_by_a_replica,
    refuse,
    run,
    run_again,
    same_as_the_model,
)

from deltasync.consumers.consumer import Consumer, ConsumerOptions, Replica
from deltasync.core.damage import DamagedRows
from deltasync.core.errors import StorageFailed
from deltasync.core.events import Events
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.feeds.frozen_release import Head
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.views.release_loop import ReleaseLoop
from deltasync.views.store import ViewStore
from deltasync.views.view import View

INT8 = Policy(top_k=1, value_type=ValueType.INT8)


def no_space(path: Path, *_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left goes out at once; a policy is tried again at once."""
    release_at_once(monkeypatch)
    monkeypatch.setattr("deltasync.views.release_loop._PREPARE_AGAIN_SECONDS", 0.01)


async def becomes(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not wanted():
            await asyncio.sleep(0.001)


def test_a_folder_that_cannot_be_made_is_a_failure_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        before = view.deliveries
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", no_space)
            with pytest.raises(StorageFailed, match="No space left on device"):
                await view.prepare(INT8)
        assert view.deliveries == before
        assert same_as_the_model(await held_by_a_replica(view), local)

    run(tmp_path, scenario)


@pytest.mark.usefixtures("impatient")
def test_releases_go_on_in_the_tables_there_are_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        replica = Replica("a", view.position, stream=asyncio.Event())
        loop = ReleaseLoop(Consumer("top", "clicks", 0, INT8, {"a": replica}), view, Events())

        def released() -> bool:
            replica.applied = view.position
            return view.state.compared_version == local.model.position.number and not view.state.backlog_rows

        async with asyncio.TaskGroup() as tasks:
            with monkeypatch.context() as patch:
                patch.setattr(Path, "mkdir", no_space)
                tasks.create_task(loop.run())
                await becomes(lambda: "No space left" in view.trouble)
                await local.cut(changed(1, USER, 3, 4, 5))
                await becomes(released)
                assert same_as_the_model(await held_by_a_replica(view), local)
                assert view.trouble
            await becomes(lambda: not view.trouble)
            assert view.fits(INT8)
            loop.stop()

    run(tmp_path, scenario)


def test_nothing_of_a_release_that_is_not_written_down_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas at the release before would hold different bits."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        before = view.position
        first = await held_by_a_replica(view)
        await local.cut(changed(1, USER, 3))
        with monkeypatch.context() as patch:
            patch.setattr(ViewStore, "write_release", refuse)
            with pytest.raises(StorageFailed):
                await view.make_release(TOP, 0)
            assert not (await view.release(before.number)).chunks
        assert view.position == before
        assert (await held_by_a_replica(view))["user"].tobytes() == first["user"].tobytes()
        await view.make_release(TOP, 0)
        release = await view.release(0)
        assert release.head
        assert release.head.number == view.position.number == before.number + 1
        second = await held_by_a_replica(view)
        assert second["user"].tobytes() != first["user"].tobytes()
        assert same_as_the_model(second, local)

    run(tmp_path, scenario)


@pytest.mark.parametrize("policy", [TOP, INT8])
def test_a_damaged_row_is_not_released_but_told_and_goes_out_once_it_is_mended(
    tmp_path: Path, policy: Policy
) -> None:
    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(policy)
        number, bits = view.position.number, local.model.tables[0].rows.view(np.uint8)
        await local.cut(changed(1, USER, 3, 4))
        bits[3, 5] ^= 1
        await view.make_release(replace(policy, top_k=None), 0)
        assert {name: ids.tolist() for name, ids in local.model.damage.rows.items()} == {"user": [3]}
        assert live_rows(await view.release(number))[0].ids.tolist() == [4]
        assert view.state.newest
        assert view.state.newest.statistics.backlog.rows == 1
        assert view.state.newest.statistics.reason == "took all 1 dirty row; and not 1 that are damaged"
        bits[3, 5] ^= 1
        await local.model.damage.mend()
        await view.make_release(replace(policy, top_k=None), 0)
        assert live_rows(await view.release(number + 1))[0].ids.tolist() == [3]

    run(tmp_path, scenario)


def test_a_new_view_takes_no_damaged_rows_over(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        bits = local.model.tables[0].rows.view(np.uint8)
        bits[3, 5] ^= 1
        with pytest.raises(DamagedRows):
            await local.prepared_view(INT8)
        assert {name: ids.tolist() for name, ids in local.model.damage.rows.items()} == {"user": [3]}
        bits[3, 5] ^= 1
        view = await local.prepared_view(INT8)
        assert view.position.number

    run(tmp_path, scenario)


def test_a_release_that_could_not_be_frozen_is_frozen_anew_for_the_next_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(local: LocalModel) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("deltasync.feeds.releases.freeze", refuse)
            failed = local.model.release(0)
            with pytest.raises(StorageFailed):
                await failed
        assert len(live_rows(await local.model.release(0))) == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("kind", ["user*.since", "user*.rows", "user*.stamps", "*", "shared"])
def test_of_a_view_whose_files_are_missing_nothing_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "shared":
        monkeypatch.setattr("deltasync.storage.table_files.SMALL_BYTES", 0)

    async def scenario(local: LocalModel) -> None:
        await local.prepared_view(TOP)

    async def again(local: LocalModel) -> None:
        with pytest.raises(StorageFailed):
            local.view()

    run(tmp_path, scenario)
    files = [each for each in (tmp_path / "view").rglob(kind) if each.is_file()]
    assert files
    for each in files:
        each.unlink()
    run_again(tmp_path, again)


def in_a_service(data_dir: Path, scenario: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            service = Service(ServiceOptions(data_dir=data_dir), tasks)
            await service.recover()
            await publish(service)
            await scenario(service)
            await service.drain()

    asyncio.run(main())


def test_of_two_who_ensure_a_new_consumer_at_once_both_succeed_and_the_last_wins(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        for each in range(10):
            wanted = [ConsumerOptions(f"c{each}", "clicks", Policy(top_k=top_k)) for top_k in (3, 4)]
            await asyncio.gather(*map(service.ensure_consumer, wanted))
            consumer = service.registry.get(f"c{each}")
            assert consumer.policy == Policy(top_k=4)
            assert isinstance(service.feed(consumer), View)

    in_a_service(tmp_path, scenario)


def test_versions_of_releases_are_found_while_others_are_made(tmp_path: Path) -> None:
    """Releases are made on the model's thread, versions are asked for on another."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        history, later = view._store.history, count(13)

        @dataclass(frozen=True)
        class Meanwhile(Head):
            def __getattribute__(self, name: str) -> Any:
                if name == "number":
                    history.add(Head(next(later), 9, 0, 0), 0)
                return super().__getattribute__(name)

        history._heads = deque([Head(10, 2, 0, 0), Meanwhile(11, 3, 0, 0), Meanwhile(12, 4, 0, 0)])
        assert [view.version_of(number) for number in (12, 11, 10)] == [4, 3, 2]

    run(tmp_path, scenario)
