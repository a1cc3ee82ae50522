"""Scenarios for one view of a model of two tables, in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.wire import random_rows

from deltasync.base.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.model.feed import ReleaseStatistics
from deltasync.model.releases import FrozenRelease, Head
from deltasync.views.decision import Action, ReleaseOptions, Situation, next_action
from deltasync.views.log import ViewState
from deltasync.views.table import ViewTable
from deltasync.views.view import View

# Of both, int8 is shorter.
USER = TableSpec("user", 40, 8)
ITEM = TableSpec("item", 30, 16, np.dtype("<f2"))
TABLES = [USER, ITEM]
TOP = Policy(top_k=1)
Scenario = Callable[[LocalModel], Coroutine[Any, Any, None]]


def run(folder: Path, scenario: Scenario, **settings: Any) -> None:
    """Publishes every row as version 1."""

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
    """Restart after a crash."""

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
    """The rows that a new replica gets, decoded."""
    release = await view.release(0)
    assert isinstance(release, FrozenRelease)
    held: dict[str, Values] = {}
    for slot, rows in live_rows(release).items():
        given = view.forms[slot]
        table = np.zeros((given.spec.rows, given.spec.dim), given.spec.dtype)
        table[rows.ids] = given.decode(rows.values)
        held[given.spec.name] = table
    return held


def same_as_the_model(held: dict[str, Values], local: LocalModel) -> bool:
    return all(held[each.spec.name].tobytes() == each.rows.tobytes() for each in local.model.tables)


def is_due(view: View, policy: Policy) -> bool:
    """Whether a release will be made without further publishing."""
    assert view.state.statistics
    situation = Situation(
        newest_version=view.model.position.number,
        compared_version=view.state.compared_version,
        backlog_rows=view.state.backlog_rows,
        oldest_dirty_ns=0,
        released_ns=None,
        sealed_ns=[],
        ready=True,
    )
    return next_action(policy, situation, 10**18).action is Action.ROWS


# Turns in which a release updates one row.
SINGLE_ROWS = ReleaseOptions(turn_seconds=0, updated_bytes=1)


def small_blocks(nbytes: int) -> ReleaseOptions:
    """Turns in which a release copies or compares at most these bytes, and cuts come in between."""
    return ReleaseOptions(turn_seconds=0, copied_bytes=nbytes, compared_bytes=nbytes)


class before_turns:  # noqa: N801
    """Await `act` with its number before each turn of a release; as a context, until it ends."""

    def __init__(self, local: LocalModel, act: Callable[[int], Awaitable[None]]) -> None:
        self._model = local.model
        self._model.before_turn, self._model.turns = act, count(1)

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._model.before_turn = None


def refuse(*_: object) -> None:
    raise StorageFailed("the disk is full")


@dataclass(frozen=True)
class Bits:
    """The complete state of a view, except tables that its model no longer has."""

    position: Position
    head: Head | None
    newest: ReleaseStatistics | None
    compared_version: int
    versions: list[int]
    tables: dict[str, tuple[Any, ...]]


async def bits_of(view: View) -> Bits:
    """The current state of a view."""
    state = view.state
    numbers = range(1, state.head.number + 1 if state.head else 1)
    tables = await view.model.on_thread(lambda: {each.name: _bits_of(each, state) for each in _there(state)})
    return Bits(
        view.position,
        state.head,
        state.statistics,
        state.compared_version,
        [*map(view.version_of, numbers)],
        tables,
    )


def _there(state: ViewState) -> list[ViewTable]:
    return [table for table in state.tables if not table.source.removed]


def _bits_of(table: ViewTable, state: ViewState) -> tuple[Any, ...]:
    dirty, backlog = table.dirty, state.backlog[table.name]
    # How far rows are that have changed since they were compared is found by the next look.
    same = table.source.numbers(dirty.ids) <= table.compared
    found = [
        (each.rows.tobytes(), each.stamps.tobytes(), each.digests.tobytes(), each.checksum)
        for each in table.stamped
    ]
    whole = table.form, table.born, table.stamp, table.compared, table.sent.removed_before
    lacking = [table.lacking(number) for number in range(state.head.number if state.head else 0)]
    rows = dirty.ids.tolist(), dirty.since.tolist(), dirty.norms[same].tolist(), dirty.flags[same].tolist()
    left = backlog.amount.rows, backlog.amount.bytes, backlog.oldest_version
    return found, whole, rows, lacking, left, backlog.amount.norm if same.all() else None
