"""A model that no ranks publish: something else feeds it, as a relay does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.local_service import check, join, opened, publish, sources, view_of
from tests.support.releases import live_rows
from tests.support.wire import ITEM, USER, random_rows
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Contradiction, NotFound, ServiceUnavailable, StorageFailed
from deltasync.core.policy import Policy
from deltasync.model.model_store import ModelStore
from deltasync.service.models import Models
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.overview import model_statuses, rank_statuses
from deltasync.status.process import checks, not_ready
from deltasync.views.registry import ViewRegistry

ROWS = random_rows(1, [USER, ITEM])


async def fed(models: Models, folder: Path) -> LocalModel:
    """A model whose cuts come from the test, which no coordinator takes."""
    feeder = LocalModel(folder, model=models.storage.model("clicks"))
    await feeder.add(USER, ITEM)
    await feeder.cut_all(ROWS)
    async with models.changing:
        await models.add(feeder.model)
    return feeder


@asynccontextmanager
async def replica_of(service: Service, name: str) -> AsyncIterator[None]:
    """While the block runs, a replica of a consumer is connected."""
    consumer, stream = service.registry.get(name), asyncio.Event()
    replica = service.registry.connect(consumer, "a", stream)
    try:
        yield
    finally:
        service.registry.disconnect(consumer, replica, stream, "the test is over")


@in_service()
async def test_a_model_with_another_feed_is_released_checkpointed_and_shown(
    service: Service, tmp_path: Path
) -> None:
    await service.consumers.create("plain", "clicks", Policy())
    await service.consumers.create("top", "clicks", Policy(top_k=3))
    feeder = await fed(service.models, tmp_path)
    model = service.models.model("clicks")
    assert model.position.number == 1

    # Releases: of the model, and of the view of a consumer with a policy.
    await feeder.cut({USER.name: {3: np.full(USER.dim, 9, USER.dtype)}})
    assert service.consumers.feed(service.registry.get("plain")) is model
    changed = live_rows(await model.release(1))[0]
    assert (changed.ids.tolist(), changed.values.tolist()) == ([3], [[9] * USER.dim])
    view = view_of(service, "top")
    async with replica_of(service, "top"):
        while view.position.number == 0:
            await asyncio.sleep(0.001)

    # A checkpoint, a check of all rows, and what operators see.
    manifest = await service.checkpoints.make("clicks")
    assert (manifest.version, service.checkpoints.failures) == (2, 0)
    assert not [each.problems for each in await check(service) if each.problems]
    answers = Answers(sources(service))
    lag = await answers.consumer("plain")
    assert (lag.head, lag.offset, lag.state) == (2, 0, "empty")
    assert b'deltasync_head_version{model="clicks"} 2.0' in await answers.metrics()
    (line,) = model_statuses(service.models)
    assert (line.model, line.head, line.run, line.connected, line.tables) == ("clicks", 2, "", 0, 2)
    assert rank_statuses(service.models.coordinators) == []
    assert not_ready(checks(sources(service))) == ""
    assert service.limits.number("bytes_in_all") == model.tables.nbytes
    assert service.removals.pending_deletes() == []


@in_service()
async def test_ranks_cannot_publish_it_and_cannot_be_asked_to_delete_rows(
    service: Service, tmp_path: Path
) -> None:
    await fed(service.models, tmp_path)
    with pytest.raises(Contradiction, match="model 'clicks' is not published by ranks"):
        await join(service)
    with pytest.raises(Contradiction, match="model 'clicks' is not published by ranks"):
        await service.removals.delete_rows("clicks", USER.name, [1])
    with pytest.raises(Contradiction, match="model 'clicks' is not published by ranks"):
        await service.removals.delete_table("clicks", USER.name, "anna")


@in_service()
async def test_it_is_deleted_as_another_one(service: Service, tmp_path: Path) -> None:
    await fed(service.models, tmp_path)
    await service.removals.delete_model("clicks", "anna")
    with pytest.raises(NotFound):
        service.models.model("clicks")
    assert service.limits.number("bytes_in_all") == 0


async def test_it_comes_back_from_its_checkpoint_and_the_log(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        feeder = await fed(service.models, tmp_path)
        await service.checkpoints.make("clicks")
        await feeder.cut({ITEM.name: {2: np.full(ITEM.dim, 7, ITEM.dtype)}})
        expected = [np.array(table.rows) for table in feeder.model.tables]
    async with opened(tmp_path) as service:
        model = service.models.model("clicks")
        assert model.position.number == 2
        for table, rows in zip(model.tables, expected, strict=True):
            np.testing.assert_array_equal(table.rows, rows)


@pytest.mark.parametrize("fails", [(ViewRegistry, "give_up"), (ModelStore, "retire")], ids=["views", "log"])
async def test_a_model_whose_end_fails_half_way_has_no_thread_and_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: tuple[type, str]
) -> None:
    async with opened(tmp_path) as service:
        await publish(service)
        model = service.models["clicks"]
        with monkeypatch.context() as patch:
            patch.setattr(*fails, Mock(side_effect=StorageFailed("the disk is gone")))
            with pytest.raises(StorageFailed):
                await service.models.end(model)
        assert not list(model.tables)
        with pytest.raises(ServiceUnavailable, match="is stopped"):
            await model.on_thread(int)
