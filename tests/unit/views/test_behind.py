"""For how long a version, or a release, has not been the newest: by a clock that nobody sets."""

import asyncio

import numpy as np
import pytest
from tests.support.local_model import LocalModel
from tests.unit.views.models import Models

from deltasync.base.clock import FOREVER_NS
from deltasync.core.policy import Policy
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec

SECOND = 10**9
USER = TableSpec("user", 20, 2)
TOP = Policy(top_k=3)
SLOW = Policy(top_k=3, min_interval_seconds=10)


class Clock:
    now = 1000 * SECOND

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("model.model", "views.view", "views.release_maker"):
        monkeypatch.setattr(f"deltasync.{module}.steady_ns", clock)
    return clock


def rows(number: int) -> dict[str, dict[int, Values]]:
    return {"user": {row: np.full(2, number, np.float32) for row in range(10)}}


@pytest.fixture
def local(runner: asyncio.Runner, models: Models, clock: Clock) -> LocalModel:
    return runner.run(models.published(USER, rows=rows(1)))


async def cut(local: LocalModel) -> None:
    await local.cut(rows(local.model.seals.newest_version + 1))


async def test_a_version_is_the_newest_until_the_next_one(local: LocalModel, clock: Clock) -> None:
    clock.wait(3600)
    assert local.model.behind_ns(1, Policy()) == 0
    await cut(local)
    clock.wait(2)
    await cut(local)
    clock.wait(3)
    assert [local.model.behind_ns(n, Policy()) for n in (1, 2, 3)] == [5 * SECOND, 3 * SECOND, 0]


async def test_a_version_that_cannot_be_applied_yet_is_the_newest(local: LocalModel, clock: Clock) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no")

    local.model.tables[0].before_change.append(fail)
    with pytest.raises(RuntimeError):
        await cut(local)
    local.model.tables[0].before_change.remove(fail)
    clock.wait(2)
    assert local.model.behind_ns(1, Policy()) == 2 * SECOND


async def test_after_a_restart_only_the_newest_is_known(local: LocalModel, models: Models, clock: Clock) -> None:
    for _ in range(2):
        await cut(local)
    local = await models.open()
    assert local.model.behind_ns(3, Policy()) == 0
    assert local.model.behind_ns(2, Policy()) == FOREVER_NS
    await cut(local)
    clock.wait(1)
    assert local.model.behind_ns(3, Policy()) == SECOND


async def test_a_release_is_the_newest_until_a_later_version_is_there(local: LocalModel, clock: Clock) -> None:
    """None is made while no replica is connected: who comes back after an hour holds the newest there is."""
    view = await local.prepared_view(TOP)
    first = view.position.number
    clock.wait(60)
    assert view.behind_ns(first, TOP) == 0
    await cut(local)
    clock.wait(3600)
    assert view.behind_ns(first, TOP) == 3600 * SECOND
    await view.make_release(TOP, 0)
    assert view.behind_ns(view.position.number, TOP) == 0, "what top_k has left is not due"
    assert view.behind_ns(first, TOP) == 3600 * SECOND


async def test_what_is_left_is_due_though_nothing_is_published(local: LocalModel, clock: Clock) -> None:
    """No replica is connected, or no release can be made: it was to go out at the slowest pace there is."""
    view = await local.prepared_view(TOP)
    await cut(local)
    await view.make_release(TOP, 0)
    assert view.state.backlog_rows
    before = view.position.number
    clock.wait(10)
    assert view.behind_ns(before, TOP) == 0
    clock.wait(3600)
    assert view.behind_ns(before, TOP) == 3600 * SECOND
    await view.make_release(TOP, 0)
    assert view.position.number > before, "another release of the same version"
    clock.wait(2)
    assert view.behind_ns(before, TOP) == 2 * SECOND
    while view.state.backlog_rows:
        await view.make_release(TOP, 0)
    clock.wait(3600)
    assert view.behind_ns(view.position.number, TOP) == 0


async def test_a_release_is_the_newest_while_the_interval_allows_no_other(local: LocalModel, clock: Clock) -> None:
    view = await local.prepared_view(SLOW)
    clock.wait(1)
    await cut(local)
    clock.wait(8)
    first = view.position.number
    assert view.behind_ns(first, SLOW) == 0
    clock.wait(4)
    assert view.behind_ns(first, SLOW) == 3 * SECOND
    assert view.behind_ns(first, TOP) == 12 * SECOND


async def test_a_restart_forgets_since_when_one_is_due(local: LocalModel, models: Models, clock: Clock) -> None:
    view = await local.prepared_view(SLOW)
    await cut(local)
    local = await models.open()
    view = local.view()
    clock.wait(1)
    assert view.behind_ns(view.position.number, SLOW) >= FOREVER_NS
    await view.make_release(SLOW, 0)
    assert view.behind_ns(view.position.number, SLOW) == 0
