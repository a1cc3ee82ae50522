"""Views of consumers that come and go, in a service without sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from tests.support.damage import change_value
from tests.support.faults import Held, refusing
from tests.support.local_service import faults_of, publish
from tests.support.local_service import opened as opened_service
from tests.support.log import log_of

from deltasync.base.errors import StorageFailed
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import key_of
from deltasync.service.service import Service
from deltasync.views.view import View

TOP = Policy(top_k=3)
FULL = StorageFailed("the disk is full")


@asynccontextmanager
async def opened(data_dir: Path) -> AsyncIterator[Service]:
    async with asyncio.timeout(20), opened_service(data_dir) as service:
        await publish(service)
        yield service


async def test_a_consumer_has_a_view_from_its_first_policy_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        consumer = await service.consumers.create("top", "clicks", Policy())
        assert not isinstance(service.consumers.feed(consumer), View)
        await service.consumers.update("top", TOP)
        view = service.consumers.feed(consumer)
        assert isinstance(view, View)
        await service.consumers.update("top", Policy())
        assert service.consumers.feed(consumer) is view


async def test_a_view_may_go_while_all_of_them_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for name in ("first", "second"):
            await service.consumers.create(name, "clicks", TOP)
        await asyncio.gather(service.views.drain(), service.views.forget("second"))


@pytest.mark.parametrize("policy", [TOP, Policy()])
async def test_a_consumer_created_during_a_delete_has_a_new_view(tmp_path: Path, policy: Policy) -> None:
    async with opened(tmp_path) as service:
        consumer = await service.consumers.create("top", "clicks", TOP)
        old = service.consumers.feed(consumer)
        forgetting = Held("releases/top")
        with faults_of(service).log.replaced(truncate=forgetting, drop=forgetting):
            deleting = asyncio.create_task(service.consumers.delete("top"))
            await forgetting.has_begun()
            creating = asyncio.create_task(service.consumers.create("top", "clicks", policy))
            await asyncio.wait([creating], timeout=0.05)  # It may well wait until the other is forgotten.
            forgetting.let_go()
            await deleting
            feed = service.consumers.feed(await creating)
        assert feed is not old
        assert isinstance(feed, View) != policy.sends_everything
        await service.consumers.delete("top")
        assert log_of(service).items("view/") == {}


async def test_a_consumer_deleted_during_its_creation_leaves_no_view(
    tmp_path: Path,
) -> None:
    """Else the next of its name would be given releases by the policy of one that is gone."""
    async with opened(tmp_path) as service:
        following = Held("releases/top")
        with faults_of(service).log.replaced(truncate=following, drop=following):
            creating = asyncio.create_task(service.consumers.create("top", "clicks", TOP))
            await following.has_begun()
            deleting = asyncio.create_task(service.consumers.delete("top"))
            await asyncio.wait([deleting], timeout=0.05)  # It may well wait until the view is made.
            following.let_go()
            await asyncio.gather(creating, deleting)
        created = await service.consumers.create("top", "clicks", Policy())
        assert not isinstance(service.consumers.feed(created), View)


async def test_a_deleted_consumer_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await service.consumers.create("top", "clicks", TOP)
        await service.consumers.delete("top")
        assert log_of(service).items("view/") == {}
        assert not [each for each in log_of(service).streams() if each.endswith("/top")]
        created = await service.consumers.create("top", "clicks", Policy())
        assert not isinstance(service.consumers.feed(created), View)


async def test_a_view_that_could_not_be_made_is_made_later(tmp_path: Path) -> None:
    """Else replicas would be sent the model's own tables, whatever their policy says."""
    async with opened(tmp_path) as service:
        consumer = await service.consumers.create("top", "other", TOP)
        with faults_of(service).log.replaced(truncate=refusing(FULL, "releases/top")):
            assert (await publish(service, model="other")).sealed.number == 1
            assert service.consumers.feed(consumer) is None
        await service.publishing.look_after()
        assert isinstance(service.consumers.feed(consumer), View)


async def test_a_consumer_created_after_a_failed_delete_has_a_new_view(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        old = service.consumers.feed(await service.consumers.create("top", "clicks", TOP))
        with faults_of(service).log.replaced(put=refusing(FULL)), pytest.raises(StorageFailed):
            await service.consumers.delete("top")
        created = await service.consumers.create("top", "clicks", TOP)
        assert service.consumers.feed(created) is not old


async def test_the_last_of_two_concurrent_ensures_wins(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for each in range(10):
            wanted = [ConsumerOptions(f"c{each}", "clicks", Policy(top_k=top_k)) for top_k in (3, 4)]
            await asyncio.gather(*map(service.consumers.ensure, wanted))
            consumer = service.registry.get(f"c{each}")
            assert consumer.policy == Policy(top_k=4)
            assert isinstance(service.consumers.feed(consumer), View)


@pytest.mark.parametrize("damaged", ["its record", "a head"])
async def test_a_view_that_cannot_come_back_begins_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    async with opened(tmp_path) as service:
        view = service.consumers.feed(await service.consumers.create("top", "clicks", TOP))
        assert isinstance(view, View)
        await view.prepare(TOP)
        history, number = view.history, view.position.number
    if damaged == "a head":
        change_value(tmp_path / "log", "records", key_of("heads/top", number, 0, 0), bit=-1)
    else:
        with closing(LmdbStore(LogOptions(directory=tmp_path / "log"))) as log:
            log.put("view/top", b"{}").result()
    async with opened(tmp_path) as service:
        again = service.consumers.feed(service.registry.get("top"))
        assert isinstance(again, View)
        assert again.history != history
        assert not again.tables
    assert [each for each in log_kinds(tmp_path) if each.endswith("/top")] == []
    said = [each for each in caplog.messages if "its view cannot be rebuilt; its replicas get every row" in each]
    assert len(said) == 1
    assert ("is damaged" if damaged == "a head" else "is invalid") in said[0]


def log_kinds(data_dir: Path) -> list[str]:
    with closing(LmdbStore(LogOptions(directory=data_dir / "log"))) as log:
        return log.streams()
