"""Start an empty replica from a checkpoint. The service then sends only later changes."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.client.assembler import latest_rows
from deltasync.client.targets.target import Release
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.table_form import Mode, TableForm, form_of_record, spec_of_record
from deltasync.core.tables import TableSpec

if TYPE_CHECKING:
    from deltasync.checkpoints.chunks import CheckpointChunk
    from deltasync.checkpoints.manifest import Manifest
    from deltasync.checkpoints.store import CheckpointStore

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointStart:
    """The rows of a checkpoint, at `release.position`.

    The replica reports this position to the service. It merges the service's first release into the checkpoint's
    rows before it applies anything.
    """

    release: Release

    def completed(self, release: Release) -> Release:
        """Merge a first release into the checkpoint's rows; ServiceUnavailable if the tables are different."""
        if release.resync:
            return release
        tables = {each.name: each for each in release.tables if not release.resets(each)}
        rows = list[RowBatch]()
        for each in self.release.rows:
            if table := tables.get(each.table.name):
                # Tables may have grown since the checkpoint.
                if replace(each.table, rows=table.rows) != table or each.table.rows > table.rows:
                    text = "the checkpoint has other tables than the service: the replica starts empty"
                    raise ServiceUnavailable(text)
                rows.append(RowBatch.of_table(table, each.ids, each.values))
        return replace(release, resync=True, whole=frozenset(), rows=latest_rows([*rows, *release.rows]))

    def alone(self, tables: Sequence[TableSpec], version: int) -> Release:
        """The checkpoint's rows as a release of `version`, if no row has changed since the checkpoint."""
        return self.completed(replace(self.release, resync=False, tables=list(tables), rows=[], version=version))


def read_start(url: str, consumer: str) -> CheckpointStart | None:
    """Read the newest usable checkpoint for a consumer's replica; None if there is none."""
    try:
        for store, manifest in _manifests(url, consumer):
            try:
                start = _read(store, manifest, consumer)
            except StorageFailed as error:
                logger.warning("skipped a checkpoint: %s", error)
                continue
            if start:
                logger.info("the replica starts from checkpoint %s", manifest.name)
                return start
    except StorageFailed as error:
        logger.warning("the replica starts empty: %s", error)
        return None
    logger.warning("the replica starts empty: %s has no checkpoint for consumer %r", url, consumer)
    return None


def _manifests(url: str, consumer: str) -> "Iterator[tuple[CheckpointStore, Manifest]]":
    """The checkpoints of the consumer's model, newest first."""
    try:
        from deltasync.checkpoints.file_storage import Place
        from deltasync.checkpoints.store import CheckpointStore, models_of
    except ImportError as error:
        raise InvalidInput(f"checkpoints {url!r}: {error}: install 'deltasync[s3]'") from error
    place = Place(url)
    for model in models_of(place):
        store = CheckpointStore(model, place)
        listing = store.manifests()
        for problem in (*listing.problems, *listing.unreachable):
            logger.warning("skipped a checkpoint: %s", problem)
        yield from ((store, each) for each in listing.manifests if f"consumer/{consumer}" in each.small)


def _read(store: "CheckpointStore", manifest: "Manifest", consumer: str) -> CheckpointStart | None:
    """Read the rows of a consumer's replicas from a checkpoint; None if the consumer's mode is `ids`."""
    try:
        view = manifest.states.get(consumer, {})
        owner = consumer if view.get("head") else ""  # Without a view, replicas have the model's own tables.
        own = {each.slot: spec_of_record(each.record) for each in manifest.tables if not each.key.owner}
        forms = {slot: TableForm.unchanged(spec) for slot, spec in own.items()}
        if owner:
            forms = _of_view(manifest, consumer, view)
        if any(form.mode is Mode.IDS for form in forms.values()):
            return None
        tables = {slot: _Rows(each) for slot, each in forms.items()}
        for entry, chunk in store.rows_of(manifest, owner):
            if entry.slot in tables:
                tables[entry.slot].put(chunk)
        head = manifest.states[owner]["head"]
        release = Release(
            position=Position(manifest.histories[owner], head["number"], head["seal"]),
            step=head["step"],
            step_end_unix_ns=head["step_end_unix_ns"],
            resync=True,
            tables=[each.spec for each in tables.values()],
            rows=[batch for each in tables.values() for batch in each.batches()],
            version=head["version"],
            event_time_unix_ns=head["event_time_unix_ns"],
            model=manifest.model,
            kept=head["kept"],
        )
    except (DeltasyncError, LookupError, TypeError, ValueError) as error:
        raise StorageFailed(f"checkpoint {manifest.name} cannot be read: {error}") from error
    return CheckpointStart(release)


def _of_view(manifest: "Manifest", consumer: str, view: Mapping[str, Any]) -> dict[int, TableForm]:
    """How replicas get each table of a view, by the table's slot in the checkpoint."""
    from deltasync.checkpoints.manifest import TableKey

    keys = {each.key: each for each in manifest.tables}
    forms = {}
    for each in view["tables"]:
        source = keys[TableKey("", each["table"], each["source"])]
        own = keys[TableKey(consumer, each["table"], each["born"])]
        forms[own.slot] = form_of_record(each, spec_of_record(source.record))
    return forms


class _Rows:
    """The rows of one table while they are read. `spec` is the table in the replicas' form."""

    def __init__(self, form: TableForm) -> None:
        self.spec = form.replica_spec
        self._form, spec = form, form.encoded_spec
        self._encoded = np.zeros((spec.rows, spec.dim), spec.dtype)
        self._there = np.zeros(spec.rows, np.bool_)

    def put(self, chunk: "CheckpointChunk") -> None:
        """Set or delete rows."""
        rows = chunk.rows(self._form.encoded_spec)
        self._there[rows.ids] = not rows.deleted
        if not rows.deleted:
            self._encoded[rows.ids] = rows.values

    def batches(self) -> Iterator[RowBatch]:
        """All rows in the replicas' form."""
        size = max(1, _BLOCK_BYTES // max(1, self._encoded.itemsize * self._encoded.shape[1]))
        for start in range(0, len(self._there), size):
            ids = start + np.flatnonzero(self._there[start : start + size])
            if len(ids):
                yield RowBatch.of_table(self.spec, ids, self._form.held(self._encoded[ids]))
