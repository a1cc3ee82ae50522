"""Making a snapshot, while cuts and releases go on: arrays as they are read, and the log's records after them.

A row that is read as it changes may be torn. Its change is of a version after the first, which the log has: who
restores the snapshot brings that on top.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from deltasync.core.progress import Progress
from deltasync.service.snapshot_records import consumers_of, newest_release, records_of_consumers, records_of_model
from deltasync.service.snapshot_source import Source, SourceTable, SourceView
from deltasync.snapshots.manifest import Manifest, Piece, SnapshotTable, SnapshotView, pack_manifest
from deltasync.snapshots.packing import LogRecord, PieceWriter, pack_records, pack_small
from deltasync.snapshots.place import SnapshotPlace
from deltasync.storage.log_store import LAST_NUMBER, LogStore
from deltasync.storage.records import reading, unpack_json
from deltasync.views.records import head_record, heads_stream, releases_stream

Check = Callable[[], None]

_BLOCK_BYTES, _GROUP_BYTES = 1 << 20, 8 << 20
_SEAL_GROUPS = 50  # More are written together again.


class SnapshotMaker:
    """Makes one snapshot. Blocks."""

    def __init__(
        self, place: SnapshotPlace, source: Source, log: LogStore, earlier: Manifest | None, check: Check
    ) -> None:
        """`earlier` is a snapshot of the model, of which nothing is stored again; `check` raises to break off."""
        self._place, self._source, self._log, self._check = place, source, log, check
        self._earlier = earlier
        self._id = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
        tables = [*source.tables, *(table for view in source.views.values() for table in view.tables)]
        size = sum(array.nbytes for table in tables for array in table.arrays)
        self._progress = Progress(f"model {source.model!r}: making a snapshot", size, "bytes")
        self._pieces = PieceWriter(place, source.model, self._id, earlier.pieces if earlier else ())

    def make(self) -> Manifest:
        """Make it, with what the log has of the model, and of its consumers.

        Raises:
            StorageFailed: it could not be stored, or something not be read; what was stored, nobody names.
        """
        model = self._source.model
        tables = [self._table(each) for each in self._source.tables]
        views = {name: self._view(each) for name, each in self._source.views.items()}
        small = records_of_consumers(self._log, model)  # Before the version: what they name is there.
        version, seal = self._newest()
        small |= records_of_model(self._log, model)  # After it: all tables are there that it has rows of.
        manifest = Manifest(
            model=model,
            history=self._source.history,
            first=self._source.head.number,
            head=head_record(self._source.head),
            version=version,
            seal=seal,
            made_unix_ns=time.time_ns(),
            id=self._id,
            tables=tables,
            views=views,
            records=list(self._records(version, small)),
            seals=list(self._seals(version)),
            consumers=consumers_of(self._log, model),
            small=self._pieces.add(pack_small(small)),
        )
        self._pieces.end()
        self._place.put(manifest.name, pack_manifest(manifest))
        return manifest

    def _table(self, table: SourceTable) -> SnapshotTable:
        row_bytes = sum(array.nbytes for array in table.arrays) // max(1, table.rows)
        block_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
        blocks = []
        for start in range(0, table.rows, block_rows):
            self._check()
            block = b"".join(array[start : start + block_rows].tobytes() for array in table.arrays)
            blocks.append(self._pieces.add(block))
            self._progress.add(len(block))
        arrays = [(array.dtype.str, array.shape[1:]) for array in table.arrays]
        return SnapshotTable(
            record=table.record, rows=table.rows, block_rows=block_rows, arrays=arrays, blocks=blocks
        )

    def _view(self, view: SourceView) -> SnapshotView:
        return SnapshotView(
            record=view.record,
            first=view.head.number,
            head=head_record(view.head),
            tables=[self._table(each) for each in view.tables],
        )

    def _newest(self) -> tuple[int, int]:
        """The newest version that the log has, and the checksum of its seal."""
        *_, (version, _, _, payload) = _read(self._log, f"seals/{self._source.model}", self._source.head.number)
        with reading(f"seal of version {version} of model {self._source.model!r}"):
            return version, unpack_json(payload)["checksum"]

    def _seals(self, version: int) -> Iterator[Piece]:
        """The seals up to a version: those that an earlier snapshot has, and what came since."""
        stream, earlier, first = f"seals/{self._source.model}", self._earlier, 0
        if earlier and self._follows(earlier) and len(earlier.seals) < _SEAL_GROUPS:
            yield from earlier.seals
            first = earlier.version + 1
        yield from self._grouped((stream, *each) for each in _read(self._log, stream, first, version))

    def _follows(self, earlier: Manifest) -> bool:
        """Whether the log has the past of an earlier snapshot."""
        found = list(_read(self._log, f"seals/{self._source.model}", earlier.version, earlier.version))
        return bool(found) and unpack_json(found[0][-1]).get("checksum") == earlier.seal

    def _records(self, version: int, small: dict[str, bytes]) -> Iterator[Piece]:
        model = self._source.model
        wanted = [(f"layouts/{model}", 0, LAST_NUMBER), (f"cuts/{model}", self._source.head.number + 1, version)]
        for name, view in self._source.views.items():
            newest = newest_release(small, name)
            wanted += [(releases_stream(name), view.head.number + 1, newest), (heads_stream(name), 0, newest)]
        for stream, first, last in wanted:
            yield from self._grouped((stream, *each) for each in _read(self._log, stream, first, last))

    def _grouped(self, records: Iterable[LogRecord]) -> Iterator[Piece]:
        """Records, many to a piece."""
        group, size = list[LogRecord](), 0
        for each in records:
            self._check()
            group.append(each)
            size += len(each[-1])
            if size >= _GROUP_BYTES:
                yield self._pieces.add(pack_records(group))
                group, size = [], 0
        if group:
            yield self._pieces.add(pack_records(group))


def _read(
    log: LogStore, stream: str, first: int = 0, last: int = LAST_NUMBER
) -> Iterator[tuple[int, int, int, bytes]]:
    for record in log.read(stream, first, last):
        yield record.number, record.part, record.index, bytes(record.payload)
