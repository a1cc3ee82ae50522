"""Rolls a model back: its next version has the rows of an earlier one that was kept."""

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.kept_version import KeptVersion, find_kept
from deltasync.checkpoints.manifest import TableKey
from deltasync.consumers.follow import check_past
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.cuts.admission import MAX_AHEAD_NS, Opening, Run
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.cuts.cut import PartEnd
from deltasync.cuts.session import open_session
from deltasync.model.applied_tables import key_of
from deltasync.model.model import Model
from deltasync.service.kept_versions import kept_of
from deltasync.service.models import Models, ranks_of
from deltasync.wire.row_messages import MAX_CHUNK_BYTES

# Values in one record of the log; ids and digests come on top.
_CHUNK_BYTES = MAX_CHUNK_BYTES // 2


async def roll_back(
    models: Models, name: str, version: str, events: Events, by: str, *, accept_any: bool = False
) -> Position:
    """Publish the rows of a kept version again, as the newest version of its model.

    The service does this like a trainer with one rank: it takes the model over from the running one, and publishes
    the rows that differ in one cut, except those that operators have deleted since. Replicas of consumers that
    follow the newest version get all of them in one release. It needs memory for one more copy of the tables until
    the cut is sealed. If it fails, the model is as before, and the trainer may go on. Once the tables are loaded,
    it continues even if the caller is cancelled. Rollbacks of a model run one by one.
    """
    model, coordinator = models.model(name), ranks_of(models, name)
    kept = find_kept(await kept_of(model), name, version)
    check_past(kept, model.seals)
    tables = await in_own_thread(model.load_kept, kept.id, Policy())
    rolling_back = _roll_back(model, coordinator, kept, tables, events, by, accept_any=accept_any)
    # A cut that is being sealed cannot be cancelled, and only its end shows which run may publish.
    return await asyncio.shield(asyncio.create_task(rolling_back))


async def _roll_back(
    model: Model,
    coordinator: CutCoordinator,
    kept: KeptVersion,
    tables: Mapping[TableKey, StampedTable],
    events: Events,
    by: str,
    *,
    accept_any: bool,
) -> Position:
    async with coordinator.rolling_back:
        position, rows = await _publish(model, coordinator, kept, tables, by, accept_any=accept_any)
    text = f"to {kept.description}: {counted(rows, 'row')} changed"
    events.emit(EventKind.MODEL_ROLLED_BACK, text, model=model.name, version=position.number, by=by)
    return position


async def _publish(
    model: Model,
    coordinator: CutCoordinator,
    kept: KeptVersion,
    tables: Mapping[TableKey, StampedTable],
    by: str,
    *,
    accept_any: bool,
) -> tuple[Position, int]:
    """Publish the rows of a kept version's tables that differ from the model's. Returns the number of rows."""
    step, before = kept.seal.step, coordinator.run
    specs = [table.spec for table in model.tables]
    # Its run began after the present one, by whatever clock. But no run may begin far ahead of this clock.
    now = time.time_ns()
    started = max(now, min(before.started_unix_ns + 1, now + MAX_AHEAD_NS) if before else 0)
    run = Run(
        f"rollback-to-{kept.version}-{uuid.uuid4().hex[:8]}",
        started,
        1,
        f"rollback by {by}",
        rollback_of=kept.version,
        accepts_any=accept_any,
    )
    opening = Opening(model.name, run, 0, specs, [Shard.whole(each) for each in specs], model.position)
    session, rows = None, 0
    try:
        session = await open_session(coordinator, opening)
        await coordinator.settled()  # From now on, only this run publishes.
        if model.position != opening.claim:
            session = await open_session(coordinator, replace(opening, claim=model.position))
        pairs = [(table, tables.get(key_of(table))) for table in model.tables]
        if [table.spec for table, _ in pairs] != specs or any(
            each and each.spec != own.spec for own, each in pairs
        ):
            raise ServiceUnavailable(f"tables of model {model.name!r} have changed meanwhile; try again")
        deletes = coordinator.deletes.done.after(kept.version)
        for slot, (table, earlier) in enumerate(pairs):
            gone = [each.ids for each in deletes if each.table == _rows_of(table.spec)]
            differing = await model.on_thread(_differing, table, earlier, gone)
            for ids, deleted in zip(differing, (False, True), strict=True):
                rows += len(ids)
                batches = _batches(table, earlier, ids, deleted=deleted)
                # In a thread, because the tables may be in scratch files.
                while (batch := await in_own_thread(next, batches, None)) is not None:
                    session.add(step, slot, batch)
                    await session.wait_for_room()
        event_time = kept.seal.event_time_unix_ns
        end = PartEnd(step, rows, step_end_unix_ns=time.time_ns(), event_time_unix_ns=event_time)
        position = await session.close(end)
        session.finish()
    except BaseException:
        coordinator.give_back(run)
        raise
    finally:
        if session:
            session.end("the rollback has ended")
    return position, rows


def _rows_of(table: TableSpec) -> str:
    """The embedding table whose rows a table has: itself, or that of a map of raw ids."""
    return table.of if table.kind is TableKind.ID_MAP else table.name


def _differing(table: StampedTable, earlier: StampedTable | None, gone: Sequence[Ids]) -> tuple[Ids, Ids]:
    """The rows of a table that differ in its earlier state, and those that were not there yet, by ascending ids.

    Rows that operators have deleted since (`gone`) do not come back. On the model's thread.
    """
    has = table.stamps > 0
    if earlier is None:  # The table is newer. A dense tensor stays, because no part of it can be deleted.
        every = table.ids_of(np.flatnonzero(has))
        return every[:0], every[:0] if table.spec.kind.complete else every
    had = earlier.stamps > 0
    for ids in gone:
        had[table.locate(ids)] = False
    changed = np.flatnonzero(had & (~has | (table.digests != earlier.digests)))
    return table.ids_of(changed), table.ids_of(np.flatnonzero(has & ~had))


def _batches(table: StampedTable, earlier: StampedTable | None, ids: Ids, *, deleted: bool) -> Iterator[RowBatch]:
    """The rows `ids` in their earlier state, or their deletes, in batches that fit into a record of the log."""
    size = max(1, _CHUNK_BYTES // table.spec.row_bytes)
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        if deleted or earlier is None:
            yield RowBatch.deletes(Shard.whole(table.spec), some)
        else:
            yield RowBatch.of_table(table.spec, some, earlier.rows_of(some))
