"""Loads a damaged checkpoint without its damaged chunks, and finds the rows that these had.

A damaged chunk proves nothing, but it claims rows. Its claims are true if they fill the gap in the checksum of
their table, which the manifest has. Otherwise every row counts as lost that may have been there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.base.errors import InvalidInput
from deltasync.checkpoints.chunks import CheckpointChunk, CheckpointDamaged
from deltasync.checkpoints.manifest import File, Manifest, TableEntry, TableKey
from deltasync.checkpoints.store import CheckpointStore, load_chunk
from deltasync.core.digests import checksum
from deltasync.core.rows import Ids
from deltasync.core.stamped_table import Slots, StampedTable
from deltasync.wire.row_messages import NotAsWritten


def salvage(
    store: CheckpointStore, manifest: Manifest, tables: Sequence[StampedTable | None], problems: list[str]
) -> dict[TableKey, Ids]:
    """Set new tables to the sound part of a checkpoint, see `CheckpointStore.load`. Damage is added to `problems`.

    Return the ids ([n], ascending) of rows that are in no place any more, by table; others may be among them.
    Afterwards these rows are as if they had never changed.
    """
    pairs = zip(manifest.tables, tables, strict=True)
    parts = {entry.slot: _Salvaged(entry, table) for entry, table in pairs if table is not None}
    gaps = list[_Gap]()
    for number, files in enumerate(manifest.rounds):
        gaps += _load_round(store, files, number, parts, problems)
    for part in parts.values():
        part.leave_out_claims()
    for gap in gaps:
        if gap.claims is None or not parts[gap.claims].proven:
            for slot, part in parts.items():
                if gap.within in (None, slot):
                    part.doubt(gap.round)
    for part in parts.values():
        if not part.proven:
            if not gaps:
                raise CheckpointDamaged(f"{manifest.name}: table {part.key.name!r} has another checksum")
            part.doubt(max(gap.round for gap in gaps))
    return {part.key: ids for part in parts.values() if len(ids := part.leave_out_doubted())}


@dataclass(frozen=True)
class _Gap:
    """A damaged chunk.

    Attributes:
        round: its round in the checkpoint.
        claims: the slot of the table of which it claims to have live rows; None if it makes no such claim.
        within: the slot of the table of which all its rows are; None if they may be of any table.
    """

    round: int
    claims: int | None
    within: int | None


def _load_round(
    store: CheckpointStore,
    files: Sequence[File],
    number: int,
    parts: Mapping[int, "_Salvaged"],
    problems: list[str],
) -> list[_Gap]:
    """Load the sound chunks of a round; return the others."""
    gaps, before, between = list[_Gap](), -1, list[int | None]()
    for file in files:
        for each in store.chunks_and_damage(file, problems):
            chunk = each if isinstance(each, CheckpointChunk) else each.claimed()
            part = parts.get(chunk.slot) if chunk else None
            if isinstance(each, CheckpointChunk) and (part is None or part.load(file.name, each, number)):
                # The chunks of a table are together within a round.
                within = before if before == each.slot else None
                gaps += [_Gap(number, claims, within) for claims in between]
                before, between = each.slot, []
            else:
                between.append(chunk.slot if chunk and part and part.claim(chunk, number) else None)
    return gaps + [_Gap(number, claims, None) for claims in between]


class _Salvaged:
    """A table, and what its chunks had of each row.

    Attributes:
        key: the table's key.
        proven: whether the sound and the claimed rows together have the checksum in the manifest.
    """

    def __init__(self, entry: TableEntry, table: StampedTable) -> None:
        self.key, self.proven = entry.key, False
        self._table, self._checksum, self._rows = table, entry.checksum, int(entry.record["rows"])
        # For each row the last round, counted from 1, in which a sound or a damaged chunk has it; 0 = none.
        self._loaded, self._claimed = np.zeros(table.slots, np.int32), np.zeros(table.slots, np.int32)
        self._digests = np.zeros(table.slots, np.uint64)
        self._doubted = 0  # Rows that were last loaded in an earlier round may be of an older version.

    def load(self, path: str, chunk: CheckpointChunk, number: int) -> bool:
        """Load a sound chunk; return whether its rows were right before it was written."""
        try:
            load_chunk(path, chunk, self._table)
        except CheckpointDamaged:
            return False
        self._loaded[self._table.locate(chunk.ids)] = number + 1
        return True

    def claim(self, chunk: CheckpointChunk, number: int) -> bool:
        """Note what a damaged chunk claims; return whether it claims live rows."""
        try:
            rows = chunk.rows(self._table.spec)
        except (InvalidInput, NotAsWritten):
            return False
        ids = rows.ids
        if rows.digests is None or not len(ids) or (ids[1:] <= ids[:-1]).any():
            return False
        if ids[0] < 0 or ids[-1] >= self._rows:
            return False
        slots = self._table.locate(ids)
        self._claimed[slots], self._digests[slots] = number + 1, rows.digests
        return True

    def leave_out_claims(self) -> None:
        """Leave out rows whose newest chunk is damaged, and compare the checksum."""
        slots = np.flatnonzero(self._claimed > self._loaded)
        self._leave_out(slots)
        self._table.recount()
        claimed = checksum(self._table.ids_of(slots), self._digests[slots])
        self.proven = (self._table.checksum + claimed) % 2**64 == self._checksum

    def doubt(self, number: int) -> None:
        """Note that a damaged chunk of a round may have had any rows of the table."""
        self._doubted = max(self._doubted, number + 1)

    def leave_out_doubted(self) -> Ids:
        """Leave out all rows that may be lost, and return their ids."""
        lost = (self._claimed > self._loaded) | (self._loaded < self._doubted)
        slots = np.flatnonzero(lost[: self._rows])
        self._leave_out(slots)
        self._table.recount()
        return self._table.ids_of(slots)

    def _leave_out(self, slots: Slots) -> None:
        table = self._table
        table.rows[slots], table.stamps[slots], table.digests[slots] = 0, 0, 0
