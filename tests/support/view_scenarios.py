"""Scenarios of one view of a model of two tables, in this process."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.wire import random_rows

from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.views.pacing import Situation, due
from deltasync.views.view import View

# Of both, int8 is shorter.
USER = TableSpec("user", 40, 8)
ITEM = TableSpec("item", 30, 16, np.dtype("<f2"))
TABLES = [USER, ITEM]
TOP = Policy(top_k=1)
Scenario = Callable[[LocalModel], Coroutine[Any, Any, None]]


def run(folder: Path, scenario: Scenario, **settings: Any) -> None:
    """Every row is published as version 1."""

    async def main() -> None:
        local = await LocalModel.opened(folder, **settings)
        await local.add(*TABLES)
        await local.cut_all(random_rows(0, TABLES))
        try:
            await scenario(local)
        finally:
            await local.close()

    asyncio.run(main())


def run_again(folder: Path, scenario: Scenario) -> None:
    """After a crash: nothing of the view was flushed at the end."""

    async def main() -> None:
        local = await LocalModel.opened(folder)
        try:
            await scenario(local)
        finally:
            await local.close()

    asyncio.run(main())


def changed(seed: int, table: TableSpec, *ids: int) -> dict[str, dict[int, Values]]:
    rows = random_rows(seed, [table])[0]
    return {table.name: {row: rows[row] for row in ids}}


async def held_by_a_replica(view: View) -> dict[str, Values]:
    """What who held nothing before is given, as it stands for."""
    release = await view.release(0)
    held: dict[str, Values] = {}
    for slot, rows in live_rows(release).items():
        given = view.deliveries[slot]
        table = np.zeros((given.spec.rows, given.spec.dim), given.spec.dtype)
        table[rows.ids] = given.decode(rows.values)
        held[given.spec.name] = table
    return held


def same_as_the_model(held: dict[str, Values], local: LocalModel) -> bool:
    return all(held[each.spec.name].tobytes() == each.rows.tobytes() for each in local.model.tables)


def is_due(view: View, policy: Policy) -> bool:
    """Whether a release will be made, though nothing more is published."""
    assert view.state.newest
    situation = Situation(
        newest_version=view.model.position.number,
        compared_version=view.state.compared_version,
        backlog_rows=view.state.backlog_rows,
        oldest_dirty_ns=0,
        released_ns=None,
        sealed_ns=[],
        ready=True,
    )
    return due(policy, situation, 10**18).seconds is not None


def refuse(*_: object) -> None:
    raise StorageFailed("the disk is full")
