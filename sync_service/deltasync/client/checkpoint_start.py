"""A replica that holds nothing begins with a checkpoint: the service sends it only what has changed since."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound, StorageFailed
from deltasync.client.assembler import latest_rows
from deltasync.client.targets.target import Release
from deltasync.core.delivery import Delivery, Mode, delivery_of_record, spec_of_record
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.tables import TableSpec

if TYPE_CHECKING:
    from deltasync.checkpoints.manifest import Manifest
    from deltasync.checkpoints.store import CheckpointStore

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointStart:
    """Rows of a checkpoint, at `release.position`.

    The replica tells the service that it holds this position. The rows of the service's first release then replace
    those of the checkpoint, before anything is applied.

    Attributes:
        release: all rows of the checkpoint for the replica.
    """

    release: Release

    @property
    def position(self) -> Position:
        """The position that the replica tells the service."""
        return self.release.position

    def completed(self, release: Release) -> Release | None:
        """A first release together with the checkpoint's rows; None if its tables are others."""
        if release.resync:
            return release
        tables = {each.name: each for each in release.tables if not release.resets(each)}
        rows = [each for each in self.release.rows if each.table.name in tables]
        if any(not _fits(each.table, tables[each.table.name]) for each in rows):
            return None
        # The tables may have grown.
        rows = [RowBatch.of_table(tables[each.table.name], each.ids, each.values) for each in rows]
        return replace(release, resync=True, whole=frozenset(), rows=latest_rows([*rows, *release.rows]))

    def alone(self, tables: Sequence[TableSpec], version: int) -> Release | None:
        """The checkpoint's rows as a release of the same version or a later one, if nothing has changed since."""
        return self.completed(replace(self.release, resync=False, tables=list(tables), rows=[], version=version))


def read_start(url: str, consumer: str) -> CheckpointStart | None:
    """Read the newest usable checkpoint for a consumer's replica; None if there is none. The log says why.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
    """
    try:
        for store, manifest in _manifests(url, consumer):
            try:
                start = _read(store, manifest, consumer)
            except StorageFailed as error:
                logger.warning("passed over: %s", error)
                continue
            if start:
                logger.info("the replica begins with checkpoint %s", manifest.name)
                return start
    except StorageFailed as error:
        logger.warning("the replica begins with nothing: %s", error)
        return None
    logger.warning("the replica begins with nothing: %s has no checkpoint for consumer %r", url, consumer)
    return None


def newest_start(url: str, consumer: str) -> tuple[str, CheckpointStart]:
    """Read the newest checkpoint with a consumer: its name, and the rows of the consumer's replicas.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
        NotFound: there is none.
        StorageFailed: it cannot be read, or is damaged.
        Contradiction: the consumer's replicas are sent ids alone.
    """
    for store, manifest in _manifests(url, consumer):
        if start := _read(store, manifest, consumer):
            return manifest.name, start
        raise Contradiction(f"consumer {consumer!r} streams ids only: there is nothing to compare")
    raise NotFound(f"{url} has no checkpoint for consumer {consumer!r}")


def _manifests(url: str, consumer: str) -> "Iterator[tuple[CheckpointStore, Manifest]]":
    """The checkpoints of the consumer's model, newest first."""
    try:
        from deltasync.checkpoints.place import Place
        from deltasync.checkpoints.store import CheckpointStore, models_of
    except ImportError as error:
        raise InvalidInput(f"checkpoints {url!r}: {error}: install 'deltasync[s3]'") from error
    place = Place(url)
    for model in models_of(place):
        store = CheckpointStore(model, place)
        listing = store.manifests()
        for problem in (*listing.problems, *listing.unreachable):
            logger.warning("passed over: %s", problem)
        yield from ((store, each) for each in listing.manifests if f"consumer/{consumer}" in each.small)


def _read(store: "CheckpointStore", manifest: "Manifest", consumer: str) -> CheckpointStart | None:
    """Read the rows of a consumer's replicas from a checkpoint; None if replicas hold ids only.

    Raises:
        StorageFailed: it cannot be read.
    """
    try:
        view = manifest.states.get(consumer, {})
        owner = consumer if view.get("head") else ""  # Without a view, replicas hold the model's tables.
        deliveries = _of_view(manifest, consumer, view) if owner else _of_model(manifest)
        if any(delivery.mode is Mode.IDS for delivery in deliveries.values()):
            return None
        tables = {slot: _Rows(each) for slot, each in deliveries.items()}
        for entry, ids, _, values in store.rows_of(manifest, owner):
            if entry.slot in tables:
                tables[entry.slot].put(ids, values)
        history = manifest.histories[owner]
        release = _release(manifest.model, history, manifest.states[owner]["head"], list(tables.values()))
    except (DeltasyncError, LookupError, TypeError, ValueError) as error:
        raise StorageFailed(f"checkpoint {manifest.name} cannot be read: {error}") from error
    return CheckpointStart(release)


def _of_model(manifest: "Manifest") -> dict[int, Delivery]:
    """The form in which replicas hold each table of a model, by the table's slot in the checkpoint."""
    entries = (each for each in manifest.tables if not each.key.owner)
    return {each.slot: Delivery.unchanged(spec_of_record(each.record)) for each in entries}


def _of_view(manifest: "Manifest", consumer: str, view: Mapping[str, Any]) -> dict[int, Delivery]:
    """The same for the tables of a view."""
    from deltasync.checkpoints.manifest import TableKey

    keys = {each.key: each for each in manifest.tables}
    deliveries = {}
    for each in view["tables"]:
        source = keys[TableKey("", each["table"], each["source"])]
        own = keys[TableKey(consumer, each["table"], each["born"])]
        deliveries[own.slot] = delivery_of_record(each, spec_of_record(source.record))
    return deliveries


class _Rows:
    """The rows of one table during reading."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery, spec = delivery, delivery.encoded_spec
        self._encoded = np.zeros((spec.rows, spec.dim), spec.dtype)
        self._there = np.zeros(spec.rows, np.bool_)

    @property
    def held(self) -> TableSpec:
        """The table as replicas hold it."""
        return self._delivery.held_spec

    def put(self, ids: Ids, values: "NDArray[np.uint8] | None") -> None:
        """Set some rows, or delete them."""
        self._there[ids] = values is not None
        if values is not None:
            self._encoded[ids] = values.view(self._encoded.dtype)

    def batches(self) -> Iterator[RowBatch]:
        """All rows, as replicas hold them."""
        size = max(1, _BLOCK_BYTES // max(1, self._encoded.itemsize * self._encoded.shape[1]))
        for start in range(0, len(self._there), size):
            ids = start + np.flatnonzero(self._there[start : start + size])
            if len(ids):
                yield RowBatch.of_table(self.held, ids, self._delivery.held(self._encoded[ids]))


def _release(model: str, history: str, head: Mapping[str, Any], tables: Sequence[_Rows]) -> Release:
    return Release(
        position=Position(history, head["number"], head["seal"]),
        step=head["step"],
        step_end_unix_ns=head["step_end_unix_ns"],
        resync=True,
        tables=[each.held for each in tables],
        rows=[batch for each in tables for batch in each.batches()],
        version=head["version"],
        event_time_unix_ns=head.get("event_time_unix_ns"),
        model=model,
    )


def _fits(of_checkpoint: TableSpec, now: TableSpec) -> bool:
    """Whether a table is the same or has only grown."""
    return replace(of_checkpoint, rows=now.rows) == now and of_checkpoint.rows <= now.rows
