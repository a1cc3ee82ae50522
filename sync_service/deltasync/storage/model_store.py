"""What the log has of one model: rows of cuts, the seals that make versions visible, and which tables there are.

Its streams: `cuts/MODEL` has rows, by version, rank and index; `seals/MODEL` has what makes a version visible;
`layouts/MODEL` has what ranks hold. Rows of a version without a seal are of a cut that was never finished. A seal
says how many ranks its run had: what an abandoned cut of a larger run has left is passed over.

Its small records: `model/MODEL` has the history's id and the tables; `cut/MODEL` the version up to which rows were
dropped, since checkpoints have them.
"""

import contextlib
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from deltasync.core.errors import Damaged, StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.table_records import spec_of_record, spec_record
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.words import counted
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.layouts import Layouts, LayoutUse
from deltasync.storage.log_store import LogFull, LogStore, LogUnavailable
from deltasync.storage.records import (
    name_of,
    pack_json,
    pack_rows,
    reading,
    seal_of_record,
    seal_record,
    unpack_json,
    unpack_rows,
)
from deltasync.storage.volume import VolumeFailed

# Seals are kept this long after their rows, so that lag in seconds is known for old offsets too; fewer of them in
# a log that is full although it has no rows that could be dropped.
KEPT_SEALS = 100_000
_GROWN = "grown_from"
_NONE: Mapping[str, int] = MappingProxyType({})


def recorded_models(log: LogStore) -> dict[str, Mapping[str, Any]]:
    """What is written down of each model, by its name.

    Raises:
        StorageFailed: a record is damaged.
    """
    models = {}
    for name, record in log.items("model/").items():
        with reading(f"record model/{name}"):
            models[name] = unpack_json(record)
    return models


def follows(before: Seal, seal: Seal) -> bool:
    """Whether a seal comes right after another one, as its checksum says."""
    return seal.version == before.version + 1 and seal.after(before).checksum == seal.checksum


class ModelStore:
    """The log's records of one model. What returns no future blocks; any thread.

    Attributes:
        history: the id made when the model's log was created.
        specs: the tables that are written down, in the order they were added.
        grown_from: how many rows a table had before it last grew, by its name.
        removed: a version by name: a table of that name was removed then or before. The one that there is now, if
            there is one, has rows of later versions only.
        dropped: the version up to which the log has no rows any more.
        written: whether anything was written.
        queue: what all have submitted to the log that is not on disk yet.
    """

    def __init__(self, log: LogStore, model: str) -> None:
        self._log, self.queue = log, log.queue
        self._model = model
        self._cuts, self._seals = f"cuts/{model}", f"seals/{model}"
        self._layouts = Layouts(log, model)
        self._cutting, self._retired = threading.Lock(), False
        self.history = uuid.uuid4().hex
        self.specs: dict[str, TableSpec] = {}
        self.grown_from: Mapping[str, int] = {}
        self.removed: Mapping[str, int] = {}
        self.dropped, self.written = 0, False
        self._kept_seals = KEPT_SEALS

    def recover(self, record: Mapping[str, Any]) -> None:
        """Read what is written down.

        Raises:
            StorageFailed: a record is damaged.
        """
        with reading(f"record model/{self._model}"):
            self.history, self.removed = record["history"], record["removed"]
            self.specs = {each["name"]: spec_of_record(each) for each in record["tables"]}
            self.grown_from = {each["name"]: each[_GROWN] for each in record["tables"] if _GROWN in each}
        with reading(f"record cut/{self._model}"):
            dropped = self._log.items(f"cut/{self._model}").get("")
            self.dropped = int(dropped) if dropped else 0
        self._layouts.recover()

    def describe(
        self,
        specs: Mapping[str, TableSpec],
        grown_from: Mapping[str, int] = _NONE,
        removed: Mapping[str, int] = _NONE,
    ) -> None:
        """Write down which tables there are, what those had that grew, and which were removed.

        Raises:
            StorageFailed: the log could not be written; nothing was changed.
        """
        grown = {name: rows for name, rows in {**self.grown_from, **grown_from}.items() if name in specs}
        removed = {**self.removed, **removed}
        tables = [
            spec_record(spec) | ({_GROWN: grown[name]} if name in grown else {}) for name, spec in specs.items()
        ]
        record = {"history": self.history, "tables": tables, "removed": removed}
        self._log.put(f"model/{self._model}", pack_json(record)).result()
        self.specs, self.grown_from, self.removed = dict(specs), grown, removed
        self.written = True

    def seals(self, first: int = 0) -> tuple[list[Seal], str]:
        """The seals that are kept from version `first` on, oldest first, as far as each follows the one before.

        With them what is wrong with the next one; empty if nothing is.

        Raises:
            LogUnavailable, VolumeFailed: the log cannot be read now.
        """
        seals = list[Seal]()
        try:
            for record in self._log.read(self._seals, first):
                with reading(name_of(self._seals, record.number)):
                    seal = seal_of_record(unpack_json(record.payload))
                if seals and not follows(seals[-1], seal):
                    return seals, f"the seal of version {seal.version} does not follow that of {seals[-1].version}"
                seals.append(seal)
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:
            return seals, str(error)
        return seals, ""

    def drop_unsealed(self, sealed: int) -> None:
        """Forget the rows of cuts after version `sealed`, which were never finished. Where there is no room for
        that, as the log tells, they do no harm: a part drops its own as it begins, and `rows` passes over others.
        """
        self._layouts.note_newest(sealed)
        with contextlib.suppress(VolumeFailed, LogFull):
            self._log.drop(self._cuts, sealed + 1).result()

    def go_back(self, version: int) -> None:
        """Forget everything after a version, of which something is lost: trainers publish it again.

        Raises:
            StorageFailed: the log could not be written.
        """
        self._log.drop(self._seals, version + 1).result()
        self._log.drop(self._cuts, version + 1).result()
        if self.dropped > version:
            self._log.put(f"cut/{self._model}", b"%d" % version).result()
            self.dropped = version

    def add_seals(self, seals: Sequence[Seal]) -> None:
        """Have seals that the log has lost, of versions that a checkpoint has.

        Raises:
            StorageFailed: the log could not be written.
        """
        written = [
            self._log.append(self._seals, seal.version, 0, 0, pack_json(seal_record(seal))) for seal in seals
        ]
        for each in written:
            each.result()

    # Dropping what checkpoints have.

    def cut(self, version: int) -> None:
        """Drop rows up to a version that checkpoints have.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._cutting:
            if version <= self.dropped or self._retired:
                return
            self._log.put(f"cut/{self._model}", b"%d" % version).result()
            self.dropped = version
            self._log.truncate(self._cuts, version).result()
            for forgotten in self._layouts.forget(version):
                forgotten.result()
            self._log.truncate(self._seals, max(0, version - self._kept_seals)).result()

    def keep_fewer_seals(self, version: int) -> None:
        """Drop half of the seals that are kept, up to `version`: the log is full, and has no rows to drop."""
        with self._cutting:
            self._kept_seals = max(1, self._kept_seals // 2)
            self._log.truncate(self._seals, max(0, version - self._kept_seals)).result()

    def retire(self) -> None:
        """Drop nothing any more; waits for what is under way."""
        with self._cutting:
            self._retired = True

    # Cuts, from their first part to their seal.

    @property
    def capacity(self) -> int:
        """Bytes of rows that the log takes, at most."""
        return self._log.capacity

    def drop_cut(self, version: int) -> Future[None]:
        """Forget what was appended of a cut that is given up, which is not sealed."""
        return self._log.drop(self._cuts, version)

    def drop_part(self, version: int, rank: int) -> Future[None]:
        """Forget what was appended of a rank's part of a cut that is not sealed; on disk with the seal."""
        return self._log.drop(self._cuts, version, rank, patient=True)

    def use_layout(self, layout: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Have a layout, packed, with these shards in it, for rows of a version that is not sealed yet."""
        self.written = True
        return self._layouts.use(layout, shards, version)

    def append(self, version: int, rank: int, index: int, slot: int, rows: RowBatch, layout: int) -> Future[None]:
        """Append record `index` of a rank's part: rows of the shard in `slot` of its layout. It is on disk
        with the seal, at the latest.
        """
        return self._log.append(self._cuts, version, rank, index, *pack_rows(slot, rows, layout), patient=True)

    def seal(self, seal: Seal, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Make a cut visible, unless one of the writes `after` which it comes was refused.

        Once this is done it is on disk with them, and part of the history.
        """
        return self._log.append(self._seals, seal.version, 0, 0, pack_json(seal_record(seal)), after=after)

    def rows(self, seal: Seal) -> Iterator[RowBatch]:
        """The rows of a sealed cut as the log has them.

        Raises:
            StorageFailed: a record is damaged, or missing.
        """
        count = 0
        for record in self._log.read(self._cuts, seal.version, seal.version):
            if record.part < seal.world_size:
                name = name_of(self._cuts, record.number, record.part, record.index)
                with reading(name):
                    rows = unpack_rows(record.payload, self._layouts.shards)
                try:
                    rows.check_digests()
                except Damaged as error:  # They have changed in memory before the log had them.
                    raise StorageFailed(f"the log's {name} is damaged: {error}: {RESTORE}") from error
                count += len(rows)
                yield rows
        if count != seal.rows:
            raise StorageFailed(
                f"the log has {counted(count, 'row')} of version {seal.version} of model {self._model!r}, "
                f"expected {seal.rows}: {RESTORE}"
            )
