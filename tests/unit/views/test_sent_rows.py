"""What replicas that follow are sent of a release: its rows as they were drawn, which are those of the tables."""

import asyncio
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import frozen_at
from tests.support.wire import USER
from tests.unit.views.models import Models

from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard
from deltasync.core.value_types import ValueType
from deltasync.feeds.frozen_release import FrozenRelease

POLICIES = [
    Policy(top_k=0.5),
    Policy(value_type=ValueType.INT8),
    Policy(value_type=ValueType.INT8_TBE),
    Policy(mode=Mode.IDS, top_k=0.5),
]


@pytest.fixture
def local(runner: asyncio.Runner, models: Models) -> LocalModel:
    rows = {row: np.full(USER.dim, row + 1, np.float32) for row in range(USER.rows)}
    return runner.run(models.published(USER, rows={USER.name: rows}))


async def changed(local: LocalModel, step: int) -> None:
    """Rows change, and one is deleted."""
    some = range(step, USER.rows, 2)
    await local.cut({USER.name: {row: np.arange(USER.dim, dtype=np.float32) * row + step for row in some}})
    await local.cut_batches([RowBatch.deletes(Shard.whole(USER), np.array([step]))])


def messages(release: FrozenRelease) -> list[tuple[bytes, int]]:
    return [chunk.sent() for chunk in release.chunks]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
async def test_they_are_sent_what_the_tables_hold(policy: Policy, local: LocalModel, tmp_path: Path) -> None:
    view = await local.prepared_view(policy)
    for step in range(1, 5):
        before = view.position.number
        view._releases.followed = True
        await changed(local, step)
        await view.make_release(policy, 0)
        release = await view.release(before)
        assert view.position.number == before + 1
        assert release.head == view.state.head
        expected = frozen_at(view.tables, before, view.state.head, tmp_path, 1 << 30)
        assert messages(release) == messages(expected)
        assert release.checksums == expected.checksums
        assert release.rows > 1
        assert await view.release(before) is release, "shared while it is used"


async def test_they_are_kept_until_a_replica_has_them_and_only_where_some_follow(local: LocalModel) -> None:
    view = await local.prepared_view(POLICIES[0])
    await changed(local, 1)
    await view.make_release(POLICIES[0], 0)
    assert not view._releases._found, "nobody follows"
    first = await view.release(view.position.number - 1)
    await changed(local, 2)
    await view.make_release(POLICIES[0], 0)
    await view.release(0)  # One that is far behind is no reason to drop them.
    gc.collect()
    newest = weakref.ref(await view.release(view.position.number - 1))
    await asyncio.sleep(0)  # What looks for damage in it has a turn.
    gc.collect()
    assert newest() is None
    assert first.head != view.state.head
