"""Assemble releases from the chunks of one stream."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from deltasync.base.errors import InvalidInput
from deltasync.client.targets.target import Release
from deltasync.core.position import Position
from deltasync.core.rows import Mask, RowBatch, disjoint, first_id
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import (
    event_time_from_message,
    form_from_message,
    mode_from_message,
    position_from_message,
)
from deltasync.wire.row_messages import CHUNK_BYTES, Columns

logger = logging.getLogger(__name__)


def latest_rows(batches: list[RowBatch]) -> list[RowBatch]:
    """Rows in order of arrival, each row only as it arrived last. Empties `batches`."""
    by_table = dict[str, list[RowBatch]]()
    for batch in filter(len, batches):
        by_table.setdefault(batch.table.name, []).append(batch)
    overlapping = {name for name, some in by_table.items() if not disjoint(sorted(some, key=first_id))}
    del by_table  # It would keep the batches in memory.
    seen = dict[str, Mask]()
    latest = list[RowBatch]()
    while batches:  # From the end. This frees each batch as soon as its rows are copied.
        batch = batches.pop()
        if (name := batch.table.name) in overlapping:
            if name not in seen:
                seen[name] = np.zeros(batch.table.rows, np.bool_)
            new = ~seen[name][batch.ids]
            seen[name][batch.ids] = True
            if batch.deleted and not new.all():
                batch = RowBatch.deletes(batch.shard, batch.ids[new])
            elif not new.all():
                norms = None if batch.norms is None else batch.norms[new]
                batch = replace(batch, ids=batch.ids[new], values=batch.values[new], norms=norms, digests=None)
        if len(batch):
            latest.append(batch)
    return latest[::-1]


class ReleaseAssembler:
    """Assembles releases from their chunks.

    Attributes:
        received_bytes: bytes of ids and values so far.
        model_history: the history of the model's versions.
        tables: the tables of this stream in the target's form, by slot.
        has_values: whether rows have values. Only then can a target prove its content with checksums.
    """

    def __init__(self, max_outstanding_bytes: int, part_bytes: int | None = None) -> None:
        self.received_bytes = 0
        self.model_history = ""
        self.tables: list[TableSpec] = []
        self.has_values = True
        self._model = ""
        self._acked_bytes = self._ended_bytes = 0
        # Parts of this size cost next to nothing, and most models arrive in one piece.
        self._part_bytes = part_bytes or 4 * max_outstanding_bytes
        # Unacknowledged bytes must leave room for a chunk, or the service and this replica wait for each other.
        self._ack_bytes = min(max_outstanding_bytes // 4, max_outstanding_bytes - CHUNK_BYTES)
        self._resync = self._in_parts = False
        self._waiting_bytes = 0  # Bytes for the next part.
        # For the current release: rows that have arrived, and whether `part` has returned a part of it.
        self._arrived_rows, self._continues = 0, False
        self._forms: list[TableForm] = []
        self._shards: list[Shard] = []
        self._rows: list[RowBatch] = []
        self._slots: dict[str, int] = {}
        self._checksums: dict[str, int] = {}

    def begin(self, opened: subscribe_pb2.SubscribeOpened, *, in_parts: bool = False) -> None:
        """Start a stream. With `in_parts`, `part` may return parts of a first copy."""
        logger.info("subscribed to model %s: %s", opened.model, opened.reason)
        self._model, self.model_history = opened.model, opened.model_history
        mode = mode_from_message(opened.mode)
        self._forms = [form_from_message(table, mode) for table in opened.tables]
        self._shards = [Shard.whole(form.wire_spec) for form in self._forms]
        self._slots = {form.spec.name: slot for slot, form in enumerate(self._forms)}
        self.tables = [form.replica_spec for form in self._forms]
        self.has_values = mode is Mode.EMBEDDINGS
        self._resync, self._in_parts = opened.resync, opened.resync and in_parts

    def add(self, slot: int, columns: Columns) -> bool:
        """Check and add rows of the table `slot`; return whether it is time to return credit."""
        batch = columns.rows_of(slot, self._shards)
        batch.check_digests()
        rows = _decoded(batch, self._forms[slot])
        self._rows.append(rows)
        self._arrived_rows += len(batch)
        if self._in_parts and _goes_ahead(rows):
            self._waiting_bytes += rows.nbytes
        self.received_bytes += batch.nbytes
        due = self.received_bytes - self._acked_bytes >= self._ack_bytes
        if due:
            self._acked_bytes = self.received_bytes
        return due

    def part(self) -> Release | None:
        """The next part of a first copy, or None until enough has arrived. Later parts may repeat rows."""
        if not self._in_parts or self._waiting_bytes < self._part_bytes:
            return None
        part = Release(
            Position(),
            step=0,
            step_end_unix_ns=0,
            resync=True,
            tables=self.tables,
            rows=latest_rows([each for each in self._rows if _goes_ahead(each)]),
            model=self._model,
            more=True,
            continues=self._continues,
        )
        self._rows = [each for each in self._rows if not _goes_ahead(each)]
        self._waiting_bytes, self._continues = 0, True
        return part

    def end(self, end: subscribe_pb2.ReleaseEnd, before: Sequence[TableSpec] = ()) -> Release:
        """The whole release, or the last part of a first copy. `before` has the tables of the last release."""
        if self._arrived_rows != end.rows:
            arrived = f"{self._arrived_rows} of {end.rows} rows arrived"
            raise InvalidInput(f"release of version {end.position.version}: {arrived}")
        rows, self._rows = self._rows, []
        # The tables to reset: those that the service names, and those that are new on this stream.
        whole = {self.tables[slot].name for slot in end.whole}
        if before:
            whole |= self._slots.keys() - {each.name for each in before}
        release = Release(
            position=position_from_message(end.position),
            step=end.step,
            step_end_unix_ns=end.step_end_unix_ns,
            resync=self._resync,
            tables=self.tables,
            rows=latest_rows(rows),
            whole=frozenset(whole),
            version=end.version,
            bytes=self.received_bytes - self._ended_bytes,
            event_time_unix_ns=event_time_from_message(end),
            model=self._model,
            kept=end.kept,
            continues=self._continues,
        )
        self._resync = self._in_parts = self._continues = False
        self._waiting_bytes = self._arrived_rows = 0
        self._ended_bytes = self.received_bytes
        self._checksums = {self.tables[each.slot].name: each.sum for each in end.sums}
        return release

    def by_slot(self, checksums: Mapping[str, int]) -> dict[int, int]:
        """Checksums of tables by slot instead of by name."""
        return {self._slots[name]: checksum for name, checksum in checksums.items()}

    def unbound(self, bound: frozenset[str]) -> list[int]:
        """Slots of the tables that are not in `bound`."""
        return [slot for name, slot in self._slots.items() if name not in bound]

    def wrong(self, checksums: Mapping[str, int]) -> list[str]:
        """Names of the tables whose checksum differs from the service's for this stream's last release."""
        expected = self._checksums
        return [name for name, checksum in checksums.items() if expected.get(name, checksum) != checksum]


def _goes_ahead(rows: RowBatch) -> bool:
    """Whether a part may contain these rows. A map, for example, is only valid as a whole."""
    return rows.table.kind is TableKind.EMBEDDING


def _decoded(rows: RowBatch, form: TableForm) -> RowBatch:
    """Convert rows from the form on the wire to the target's form."""
    spec = form.replica_spec
    if form.mode is Mode.IDS:
        norms = rows.values[:, 0].astype(np.float32, copy=False)
        return rows.with_values(spec, np.empty((len(rows), 0), spec.dtype), norms)
    if rows.deleted:
        return RowBatch.deletes(Shard.whole(spec), rows.ids)
    values = form.held(rows.values)
    # A view of the ids would keep the whole message in memory until the release is applied.
    ids = rows.ids if np.may_share_memory(values, rows.values) else rows.ids.copy()
    decoded = replace(rows, ids=ids).with_values(spec, values)
    return replace(decoded, digests=rows.digests) if form.held_as_encoded else decoded
