"""A tracker's state in a checkpoint, which any number of ranks can load, with any sharding.

Every rank saves its own rows by table and global row id. When loading, a rank collects its rows from the states of
all ranks. The clocks of ranks differ, so it shifts stamps as if all clocks had shown the same time when the
checkpoint was saved. If ranks disagree, the tracker offers more rows rather than fewer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import Shard, TableKind
from deltasync.trainer.checks import check_format
from deltasync.trainer.tracking.delta import ConsumerCursor
from deltasync.trainer.tracking.shards import TrackedTable
from deltasync.trainer.tracking.stamps import NOTHING, RowStamps
from deltasync.trainer.tracking.tracked_model import TrackingMode

_Saved = Mapping[str, Any]
_KEYS = {"format", "clock", "tables", "consumers", "steps"}
_FORMAT = 1
# The cursor of a consumer that has a published version; see `published`.
PUBLISHED = 1
_NOT_SAVED = torch.iinfo(torch.int32).min


def save(tables: Sequence[TrackedTable], stamps: RowStamps, cursors: Sequence[ConsumerCursor]) -> dict[str, Any]:
    """Save the stamps of all rows, all cursors, and the first values of rows that are due to their consumers."""
    return {
        "format": _FORMAT,
        "clock": stamps.clock,
        "tables": {
            table.name: {
                "row_offset": table.row_offset,
                "columns": table.columns,
                "stamps": stamps.of(number).cpu().clone(),
            }
            for number, table in enumerate(tables)
        },
        "consumers": {cursor.name: _save_cursor(cursor, tables, stamps) for cursor in cursors},
    }


def published(
    consumer: str, tables: Sequence[TrackedTable], changed: Mapping[str, torch.Tensor], steps: int
) -> dict[str, Any]:
    """The state of a tracker whose consumer has this rank's rows of a version, without those in `changed`."""
    stamps = {table.name: torch.zeros(table.rows, dtype=torch.int32) for table in tables}
    for name, rows in changed.items():
        stamps[name][rows] = PUBLISHED + 1
    mode = TrackingMode.EMBEDDING_LAST.value
    return {
        "format": _FORMAT,
        "clock": PUBLISHED + 1,
        "tables": {
            table.name: {"row_offset": table.row_offset, "columns": table.columns, "stamps": stamps[table.name]}
            for table in tables
        },
        "consumers": {consumer: {"mode": mode, "cursor": PUBLISHED, "first": {}}},
        "steps": steps,
    }


def load(tables: Sequence[TrackedTable], stamps: RowStamps, states: Sequence[_Saved]) -> dict[str, ConsumerCursor]:
    """Set the stamps of `tables` from the states of all saving ranks; returns the saved cursors by consumer."""
    _check_states(states)
    try:
        return _load(tables, stamps, states)
    except InvalidInput:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"this is not the state of a tracker, or it is damaged: {error!r}") from error


def _check_states(states: Sequence[_Saved]) -> None:
    mappings = [one for one in states if isinstance(one, Mapping)]
    for one in mappings:  # Check the format first, because other keys may differ in a newer format.
        if "format" in one:
            check_format("a tracker's state", one["format"], _FORMAT)
    if not states or len(mappings) < len(states) or any(_KEYS - set(one) for one in mappings):
        raise InvalidInput(f"expected states of trackers, with {', '.join(sorted(_KEYS))}")


def _load(
    tables: Sequence[TrackedTable], stamps: RowStamps, states: Sequence[_Saved]
) -> dict[str, ConsumerCursor]:
    clock = max(int(one["clock"]) for one in states)
    saved_stamps = [_stamps_of(table, states, clock) for table in tables]
    names = dict.fromkeys(name for one in states for name in one["consumers"])
    cursors = {name: _load_cursor(name, tables, states, clock) for name in names}
    for cursor in cursors.values():
        for table, its in zip(tables, saved_stamps, strict=True):
            cursor.forget([tracked.shard for tracked in table.shards], its == _NOT_SAVED)
    # Rows that are in no state count as changed now.
    stamps.restore(clock, [its.masked_fill(its == _NOT_SAVED, clock) for its in saved_stamps])
    return cursors


def _save_cursor(cursor: ConsumerCursor, tables: Sequence[TrackedTable], stamps: RowStamps) -> dict[str, Any]:
    first = {}
    with cursor.lock:
        for number, table in enumerate(tables if cursor.first_values else ()):
            changed, deleted = (read(number, cursor.cursor) for read in (stamps.later, stamps.deleted_later))
            ids = torch.cat([changed.cpu(), deleted.cpu()])
            values = [cursor.first_values[tracked.shard][ids] for tracked in table.shards]
            first[table.name] = {"ids": ids + table.row_offset, "values": torch.cat(values, dim=1)}
        return {"mode": cursor.mode.value, "cursor": cursor.cursor, "first": first}


def _stamps_of(table: TrackedTable, states: Sequence[_Saved], clock: int) -> torch.Tensor:
    """The saved stamps of a table's rows, on a clock that showed `clock` when they were saved."""
    saved_stamps = torch.full((table.rows,), _NOT_SAVED, dtype=torch.int32)
    for one in states:
        if saved := one["tables"].get(table.name):
            ours, theirs = _overlap(table, saved["row_offset"], len(saved["stamps"]))
            stamps = saved["stamps"][theirs]
            aligned = stamps + (clock - int(one["clock"])) * stamps.sign()
            saved_stamps[ours] = _later(saved_stamps[ours], aligned)
    every = [one["tables"][table.name] for one in states if table.name in one["tables"]]
    ranges = [(its["row_offset"], len(its["stamps"])) for its in every]
    if table.table.kind is TableKind.ID_RANGES:  # Only the last rows of shards, now and then, can have changed.
        ends = {table.rows - 1, *(offset + rows - 1 - table.row_offset for offset, rows in ranges)}
        saved_stamps[[end for end in ends if 0 <= end < table.rows]] = clock
    if table.table.kind is TableKind.ID_MAP and (table.row_offset, table.rows) not in ranges:
        saved_stamps.fill_(clock)  # A shard with other rows may look up other raw ids.
    return saved_stamps


def _later(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The later of two stamps of each row. If they only differ in that one is a delete, the change wins."""
    is_theirs = (ours == _NOT_SAVED) | (theirs.abs() > ours.abs()) | ((theirs == -ours) & (theirs > 0))
    return torch.where(is_theirs, theirs, ours)


def _overlap(table: TrackedTable, row_offset: int, rows: int) -> tuple[slice, slice]:
    """The overlap of two ranges of rows, as a slice of each."""
    low = max(table.row_offset, row_offset)
    high = max(low, min(table.row_offset + table.rows, row_offset + rows))
    return slice(low - table.row_offset, high - table.row_offset), slice(low - row_offset, high - row_offset)


def _load_cursor(
    name: str, tables: Sequence[TrackedTable], states: Sequence[_Saved], clock: int
) -> ConsumerCursor:
    saved = [(one, one["consumers"][name]) for one in states if name in one["consumers"]]
    positions = [int(its["cursor"]) + clock - int(one["clock"]) for one, its in saved if its["cursor"] != NOTHING]
    position = min(positions) if len(positions) == len(saved) else NOTHING
    cursor = ConsumerCursor.at(position, name, TrackingMode(saved[0][1]["mode"]), tables)
    for table in tables if cursor.first_values else ():
        for one, its in saved:
            if rows := its["first"].get(table.name):
                _restore_first(table, cursor.first_values, one["tables"][table.name]["columns"], **rows)
    return cursor


def _restore_first(
    table: TrackedTable,
    first_values: Mapping[Shard, torch.Tensor],
    columns: Sequence[tuple[int, int]],
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Restore the first values of rows, saved side by side for some `columns`, in the columns of this rank."""
    local = (ids >= table.row_offset) & (ids < table.row_offset + table.rows)
    rows = ids[local] - table.row_offset
    parts = torch.split(values[local], [width for _, width in columns], dim=1)
    for shard in (tracked.shard for tracked in table.shards):
        for (offset, width), part in zip(columns, parts, strict=True):
            low, high = max(shard.col_offset, offset), min(shard.col_offset + shard.cols, offset + width)
            if low < high:
                ours = slice(low - shard.col_offset, high - shard.col_offset)
                first_values[shard][rows, ours] = part[:, low - offset : high - offset]
