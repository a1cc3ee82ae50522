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
    """Rows of a checkpoint, as of `release.position`.

    The replica tells the service that it holds this position. What the service sends then goes on top of these
    rows before any of it is applied.

    Attributes:
        release: all that the checkpoint has for the replica.
    """

    release: Release

    @property
    def position(self) -> Position:
        """The position that the replica tells the service."""
        return self.release.position

    def completed(self, release: Release) -> Release | None:
        """A first release, with the rows that it builds on; None if these are of other tables than it has."""
        if release.resync:
            return release
        tables = {each.name: each for each in release.tables if not release.resets(each)}
        rows = [each for each in self.release.rows if each.table.name in tables]
        if any(not _fits(each.table, tables[each.table.name]) for each in rows):
            return None
        # Of the tables as they are now: they may have grown.
        rows = [RowBatch.of_table(tables[each.table.name], each.ids, each.values) for each in rows]
        return replace(release, resync=True, whole=frozenset(), rows=latest_rows([*rows, *release.rows]))

    def alone(self, tables: Sequence[TableSpec], version: int) -> Release | None:
        """The same where nothing has changed since, as of the same version or a later one."""
        return self.completed(replace(self.release, resync=False, tables=list(tables), rows=[], version=version))


def read_start(url: str, consumer: str) -> CheckpointStart | None:
    """Read what a consumer's replica begins with; None where there is nothing. The log says why.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
    """
    try:
        for store, manifest in _found(url, consumer):
            if start := _start(store, manifest, consumer):
                return start
    except StorageFailed as error:
        logger.warning("the replica begins with nothing: %s", error)
        return None
    logger.warning("the replica begins with nothing: %s has no checkpoint for consumer %r", url, consumer)
    return None


def newest_start(url: str, consumer: str) -> tuple[str, CheckpointStart]:
    """Read the newest checkpoint that has a consumer: its name, and what it has for the consumer's replicas.

    Raises:
        InvalidInput: there is no file system for such a URL, or what it needs is not installed.
        NotFound: there is none.
        StorageFailed: it cannot be read, or is damaged.
        Contradiction: the consumer's replicas are sent ids alone.
    """
    found = next(_found(url, consumer), None)
    if found is None:
        raise NotFound(f"{url} has no checkpoint for consumer {consumer!r}")
    if start := _read(*found, consumer):
        return found[1].name, start
    raise Contradiction(f"consumer {consumer!r} streams ids only: there is nothing to compare")


def _found(url: str, consumer: str) -> "Iterator[tuple[CheckpointStore, Manifest]]":
    """The checkpoints of the consumer's model, newest first."""
    try:
        from deltasync.checkpoints.place import Place
        from deltasync.checkpoints.store import CheckpointStore, models_of
    except ImportError as error:
        raise InvalidInput(f"checkpoints {url!r}: {error}: install 'deltasync[s3]'") from error
    place = Place(url)
    for model in models_of(place):
        store = CheckpointStore(model, place)
        found = store.manifests()
        for problem in (*found.problems, *found.unreachable):
            logger.warning("passed over: %s", problem)
        yield from ((store, each) for each in found.manifests if f"consumer/{consumer}" in each.small)


def _start(store: "CheckpointStore", manifest: "Manifest", consumer: str) -> CheckpointStart | None:
    """Read a checkpoint; None if the replica cannot begin with it."""
    try:
        start = _read(store, manifest, consumer)
    except StorageFailed as error:
        logger.warning("passed over: %s", error)
        return None
    if start:
        logger.info("the replica begins with checkpoint %s", manifest.name)
    return start


def _read(store: "CheckpointStore", manifest: "Manifest", consumer: str) -> CheckpointStart | None:
    """Read what a checkpoint has for a consumer's replicas; None if they hold nothing that one could begin with.

    Raises:
        StorageFailed: it cannot be read.
    """
    try:
        view = manifest.states.get(consumer, {})
        owner = (
            consumer if view.get("head") else ""
        )  # Replicas of a consumer without a view hold the model's tables.
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
    """What replicas hold of each of a model's tables, by the table's slot in the checkpoint."""
    entries = (each for each in manifest.tables if not each.key.owner)
    return {each.slot: Delivery.unchanged(spec_of_record(each.record)) for each in entries}


def _of_view(manifest: "Manifest", consumer: str, view: Mapping[str, Any]) -> dict[int, Delivery]:
    """The same of the tables of a view."""
    from deltasync.checkpoints.manifest import TableKey

    keys = {each.key: each for each in manifest.tables}
    found = {}
    for each in view["tables"]:
        source = keys[TableKey("", each["table"], each["source"])]
        held = keys[TableKey(consumer, each["table"], each["born"])]
        found[held.slot] = delivery_of_record(each, spec_of_record(source.record))
    return found


class _Rows:
    """The rows of one table, as they are read."""

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
        """The rows there are, as replicas hold them."""
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
    """Whether a table is the same, or has only grown since."""
    return replace(of_checkpoint, rows=now.rows) == now and of_checkpoint.rows <= now.rows
