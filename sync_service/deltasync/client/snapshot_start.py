"""A replica that holds nothing begins with a snapshot: the service sends it only what has changed since."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from deltasync.client.targets import Release
from deltasync.core.delivery import Delivery
from deltasync.core.errors import Contradiction, DeltasyncError, InvalidInput, NotFound, StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.table_records import delivery_of_record, spec_of_record
from deltasync.core.tables import TableSpec

if TYPE_CHECKING:
    from deltasync.snapshots.manifest import Manifest, SnapshotTable
    from deltasync.snapshots.place import SnapshotPlace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SnapshotStart:
    """Rows of a snapshot, as of `release.position` or later: those that have changed after it come from the
    service, which is told that the replica holds that position, and go on top before any is applied.

    Attributes:
        release: all that the snapshot has.
    """

    release: Release

    @property
    def position(self) -> Position:
        """The one that the service is told."""
        return self.release.position

    def completed(self, release: Release) -> Release | None:
        """A first release, with the rows that it builds on; None if these are of other tables than it has."""
        if release.resync:
            return release
        tables = {each.name: each for each in release.tables if not release.resets(each)}
        rows = [each for each in self.release.rows if each.table.name in tables]
        if any(not _fits(each.table, tables[each.table.name]) for each in rows):
            return None
        changed = {name: _mask(spec, release.rows) for name, spec in tables.items()}
        return replace(
            release, resync=True, whole=frozenset(), rows=[*_unchanged(rows, tables, changed), *release.rows]
        )

    def alone(self, tables: Sequence[TableSpec], version: int) -> Release | None:
        """The same where nothing has changed since, as of the same version or a later one."""
        return self.completed(replace(self.release, resync=False, tables=list(tables), rows=[], version=version))


def read_start(url: str, consumer: str) -> SnapshotStart | None:
    """What a consumer's replica begins with; None, of which the log says why, where there is nothing.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
    """
    place = _place(url)
    try:
        for manifest in _manifests(place, consumer):
            if start := _start(place, manifest, consumer):
                return start
    except StorageFailed as error:
        logger.warning("the replica begins with nothing: %s", error)
        return None
    logger.warning("the replica begins with nothing: %s has no snapshot for consumer %r", url, consumer)
    return None


def newest_start(url: str, consumer: str) -> tuple[str, SnapshotStart]:
    """The newest snapshot that has a consumer: its name, and what it has for its replicas.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
        NotFound: there is none.
        StorageFailed: it cannot be read, or is damaged.
        Contradiction: the consumer's replicas are sent ids alone.
    """
    place = _place(url)
    manifest = next(_manifests(place, consumer), None)
    if manifest is None:
        raise NotFound(f"{url} has no snapshot for consumer {consumer!r}")
    if start := _read(place, manifest, consumer):
        return manifest.name, start
    raise Contradiction(f"consumer {consumer!r} streams ids only: there is nothing to compare")


def _place(url: str) -> "SnapshotPlace":
    try:
        from deltasync.snapshots.place import SnapshotPlace
    except ImportError as error:
        raise InvalidInput(f"snapshots {url!r}: {error}: install 'deltasync[s3]'") from error
    return SnapshotPlace(url)


def _manifests(place: "SnapshotPlace", consumer: str) -> "Iterator[Manifest]":
    """Those of the consumer's model, newest first."""
    from deltasync.snapshots.reading import models_of, snapshots_of

    for model in models_of(place):
        yield from (each for each in snapshots_of(place, model).manifests if consumer in each.consumers)


def _start(place: "SnapshotPlace", manifest: "Manifest", consumer: str) -> SnapshotStart | None:
    """What a replica begins with, if it can."""
    try:
        start = _read(place, manifest, consumer)
    except StorageFailed as error:
        logger.warning("passed over: %s", error)
        return None
    if start:
        logger.info("the replica begins with snapshot %s", manifest.name)
    return start


def _read(place: "SnapshotPlace", manifest: "Manifest", consumer: str) -> SnapshotStart | None:
    """What a snapshot has for a consumer's replicas; None if they hold nothing that one could begin with.

    Raises:
        StorageFailed: it cannot be read.
    """
    try:
        view = manifest.views.get(consumer)
        specs = {each.record["name"]: spec_of_record(each.record) for each in manifest.tables}
        if view:
            found = [(delivery_of_record(each.record, specs[each.record["table"]]), each) for each in view.tables]
            history, head = view.record["history"], view.head
        else:
            found = [(Delivery.unchanged(specs[each.record["name"]]), each) for each in manifest.tables]
            history, head = manifest.history, manifest.head
        if any(delivery.mode is Mode.IDS for delivery, _ in found):
            return None
        rows = [batch for each in found for batch in _rows(place, *each)]
    except (DeltasyncError, LookupError, TypeError, ValueError) as error:
        raise StorageFailed(f"snapshot {manifest.name} cannot be read: {error}") from error
    return SnapshotStart(
        _release(manifest.model, history, head, [delivery.held_spec for delivery, _ in found], rows)
    )


def _release(
    model: str, history: str, head: Mapping[str, int], tables: list[TableSpec], rows: list[RowBatch]
) -> Release:
    return Release(
        position=Position(history, head["number"], head["seal"]),
        step=head["step"],
        step_end_unix_ns=head["step_end_unix_ns"],
        resync=True,
        tables=tables,
        rows=rows,
        version=head["version"],
        event_time_unix_ns=head.get("event_time_unix_ns"),
        model=model,
    )


def _rows(place: "SnapshotPlace", delivery: Delivery, table: "SnapshotTable") -> Iterator[RowBatch]:
    from deltasync.snapshots.packing import table_blocks

    for first, (encoded, stamps, *_) in table_blocks(place, table):
        some = np.flatnonzero(stamps > 0)  # Others never were, or are deleted.
        if len(some):
            yield RowBatch.of_table(delivery.held_spec, first + some, delivery.held(encoded[some]))


def _fits(of_snapshot: TableSpec, now: TableSpec) -> bool:
    """Whether a table is the same, or has only grown since."""
    return replace(of_snapshot, rows=now.rows) == now and of_snapshot.rows <= now.rows


def _mask(table: TableSpec, rows: Sequence[RowBatch]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    mask = np.zeros(table.rows, np.bool_)
    for batch in rows:
        if batch.table.name == table.name:
            mask[batch.ids] = True
    return mask


def _unchanged(
    rows: Sequence[RowBatch],
    tables: Mapping[str, TableSpec],
    changed: "Mapping[str, np.ndarray[tuple[int], np.dtype[np.bool_]]]",
) -> Iterator[RowBatch]:
    for batch in rows:
        name = batch.table.name
        some = np.flatnonzero(~changed[name][batch.ids])
        if len(some):
            yield RowBatch.of_table(tables[name], batch.ids[some], batch.values[some])
