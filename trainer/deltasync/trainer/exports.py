"""Puts a version that `deltasync export` wrote into a trainer's model, under any sharding plan."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deltasync.base.arguments import check_type
from deltasync.base.errors import InvalidInput
from deltasync.base.words import listed
from deltasync.core.export_metadata import ExportMetadata
from deltasync.core.rows import BLOCK_ROWS
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.distributed.ranks import begun_together
from deltasync.trainer.run import CONSUMER, SyncState
from deltasync.trainer.tracking import tracker_state
from deltasync.trainer.tracking.shards import TrackedTable, drop_caches, flush_caches
from deltasync.trainer.tracking.tracked_model import TrackerOptions, published_tables, tracked_model

logger = logging.getLogger(__name__)


def load_export(
    model: nn.Module, file: str | Path, *, dense: bool = True, fqns_to_skip: Collection[str] = ()
) -> dict[str, Any]:
    """Load a version that `deltasync export` wrote, to restart a trainer from it.

        state = load_export(model, "clicks.safetensors")
        sync = DeltaSync(model, options)
        sync.load_state_dict([state])

    All ranks call it together, between steps, each with the same version. A rank reads and writes only its own
    rows and columns. The number of ranks and the plan may differ from those of the trainer that published the
    version. For a table with managed collision, the raw ids of each shard must belong to it as before, as with the
    same number of shards.

    Optimizer states are not part of an export, nor are counts and times of managed collision: they stay as in
    `model`, or start anew. For the optimizer, use a checkpoint of the trainer near that version, or begin with a
    lower learning rate.

    Args:
        model: the model, with or without `DistributedModelParallel`.
        file: the file.
        dense: also load parameters and buffers outside embedding tables; as in `SyncOptions`.
        fqns_to_skip: tables to leave as they are; as in `SyncOptions`.

    Returns:
        This rank's state for `DeltaSync.load_state_dict`. The service then continues from that version: it tells
        the trainer which rows were published later, and the trainer publishes them as they are in the version.
        `history`, `version` and `seal` are its position.

    Raises:
        InvalidInput: on some rank, the file cannot be read or is no export, lacks tables of the model or has them
            with another shape or type, or a map of raw ids does not fit the plan. Nothing was written on any rank.
    """
    check_type("load_export(model, file)", "model", model, nn.Module)
    path = str(file)
    with begun_together("load_export"), _reading(path):
        opened: Any = safe_open(path, "pt")
        exported = ExportMetadata.of_metadata(path, opened.metadata())
    position = exported.position
    with begun_together("load_export", {"version": position.number, "seal": position.seal}), _reading(path):
        _check(published_tables(model, dense=dense, fqns_to_skip=fqns_to_skip), exported, path)
        # Every rank holds copies of dense tables, and writes its own.
        options = TrackerOptions(dense=dense, id_maps=True, replicas=True, fqns_to_skip=fqns_to_skip)
        tracked = tracked_model(model, options)
        tables = [(each, _Stored(opened, each.table)) for each in tracked.tables]
        maps = {each.tables[0].name: each for each in tracked.id_maps}
        writes = [maps[table.name].staged(stored.share(table)) for table, stored in tables if table.name in maps]
    flush_caches(tracked.tables)
    for table, stored in tables:
        if not table.table.of:
            stored.copy_to(table)
    for write in writes:
        write()
    drop_caches(tracked.tables)
    # The rows for unknown raw ids depend on the plan.
    moved = {
        table.name: stored.share(table).any(dim=1)
        for table, stored in tables
        if table.table.kind is TableKind.ID_RANGES
    }
    tracker = tracker_state.published(CONSUMER, tracked.tables, moved, exported.step)
    return SyncState.of_version(position, exported.event_time_unix_ns).save(tracker)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn errors of the file into one that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error


def _check(tables: Sequence[TableSpec], exported: ExportMetadata, path: str) -> None:
    """Check that the file has all tables of the model."""
    there = {each.name: each for each in exported.tables}
    lacking = [each.name for each in tables if each.name not in there]
    problems = [f"it lacks {listed(lacking)}"] if lacking else []
    for table in tables:
        found = there.get(table.name)
        forms = [(each.kind, each.rows, each.dim, each.dtype) for each in (found, table) if each]
        if found and (forms[0] != forms[1] or found.sizes not in (None, table.sizes)):
            problems.append(f"table {table.name!r} is {_words(found)} there, and {_words(table)} in the model")
    if problems:
        where = f"version {exported.position.number} of model {exported.model!r} in {path}"
        raise InvalidInput(f"{where} does not fit this model: {'; '.join(problems)}; nothing was loaded")
    if others := there.keys() - {each.name for each in tables}:
        logger.info("%s has more tables, which are not loaded: %s", path, listed(others))


def _words(table: TableSpec) -> str:
    shape = (table.rows, table.dim) if table.shape is None else table.shape
    return f"{table.kind.value} {list(shape)} of {table.dtype}"


class _Stored:
    """A table in the file, read in blocks."""

    def __init__(self, opened: Any, table: TableSpec) -> None:
        self._opened, self._table = opened, table

    def copy_to(self, table: TrackedTable) -> None:
        """Write this rank's share into the model, on a CPU or GPU."""
        for tracked in table.shards:
            for rows, values in self._blocks(tracked.shard):
                # Autograd does not notice writes to `data`; see the resets in `tracking/shards.py`.
                tracked.weight.data[rows].copy_(values)

    def share(self, table: TrackedTable) -> torch.Tensor:
        """This rank's rows: [rows, dim]."""
        blocks = [values for _, values in self._blocks(table.shards[0].shard)]
        return torch.cat([torch.empty(0, self._table.dim, dtype=torch.int64), *blocks])

    def _blocks(self, shard: Shard) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows of a shard, local, and their values in its columns."""
        spec, columns = self._table, slice(shard.col_offset, shard.col_offset + shard.cols)
        if spec.kind.complete:  # These have their shape in the trainer's model.
            matrix = self._opened.get_tensor(spec.name).reshape(spec.rows, spec.dim)
        else:
            matrix = self._opened.get_slice(spec.name)
        for start in range(0, shard.rows, BLOCK_ROWS):
            end = min(shard.rows, start + BLOCK_ROWS)
            yield slice(start, end), matrix[shard.row_offset + start : shard.row_offset + end, columns]
