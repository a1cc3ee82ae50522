"""The records of one model in the log: tables, cuts and seals, and their removal."""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from deltasync.base.errors import Damaged, StorageFailed
from deltasync.base.words import counted
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal, seal_of_record
from deltasync.core.table_form import spec_of_record, spec_record
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LAST_NUMBER, Buffer, LogFull, LogStore, LogUnavailable
from deltasync.log.records import (
    layout_number,
    name_of,
    pack_json,
    reading,
    unpack_json,
    unpack_layout,
    unpack_rows,
)
from deltasync.log.volume import VolumeFailed


@dataclass
class _Layout:
    """A layout that is in the log, or will be once `written` is done.

    `newest` is the last version that may have rows in it.
    """

    shards: Sequence[Shard]
    written: Future[None]
    newest: int


@dataclass(frozen=True)
class LayoutUse:
    """A layout in the log to which rows may refer.

    Attributes:
        number: the number by which rows refer to it.
        log_bytes: bytes that this use added to the log.
        written: done once the layout is in the log.
    """

    number: int
    log_bytes: int
    written: Future[None]


class Layouts:
    """The layouts of one model in its log. Safe to use from any thread.

    One lock covers each decision together with its write. Otherwise truncating the log could remove a layout that
    a part is about to use.
    """

    def __init__(self, log: LogStore, model: str) -> None:
        self._log = log
        self._stream = f"layouts/{model}"
        self._layouts: dict[int, _Layout] = {}
        self._damage = ""
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the layouts in the log. All of them stay until `note_newest` reports which rows exist.

        Layouts after a damaged one are missing: `shards` raises an error for each.
        """
        written: Future[None] = Future()
        written.set_result(None)
        try:
            for record in self._log.read(self._stream):
                with reading(name_of(self._stream, record.number)):
                    self._layouts[record.number] = _Layout(unpack_layout(record.payload), written, LAST_NUMBER)
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:
            self._damage = str(error)

    def note_newest(self, version: int) -> None:
        """Note that the loaded layouts have no rows of versions after this one."""
        with self._lock:
            for layout in self._layouts.values():
                layout.newest = min(layout.newest, version)

    def use(self, record: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Use a packed layout for rows of an unsealed version, and write it unless it is in the log."""
        number = layout_number(record)
        with self._lock:
            layout = self._layouts.get(number)
            log_bytes = 0 if layout else len(record)
            if layout is None:
                written = self._log.append(self._stream, number, 0, 0, record)
                layout = self._layouts[number] = _Layout(shards, written, version)
            layout.newest = max(layout.newest, version)
        layout.written.add_done_callback(partial(self._forget_unwritten, number))
        return LayoutUse(number, log_bytes, layout.written)

    def shards(self, number: int) -> Sequence[Shard]:
        """The shards of a layout."""
        layout = self._layouts.get(number)
        if layout is None:
            raise StorageFailed(self._damage or f"the log's {name_of(self._stream, number)} is missing: {RESTORE}")
        return layout.shards

    def forget(self, upto: int) -> list[Future[None]]:
        """Forget layouts without rows after version `upto`. The futures end once the log has dropped them too."""
        with self._lock:
            forgotten = [number for number, layout in self._layouts.items() if layout.newest <= upto]
            for number in forgotten:
                del self._layouts[number]
            return [self._log.drop(self._stream, number, 0) for number in forgotten]

    def _forget_unwritten(self, number: int, written: Future[None]) -> None:
        with self._lock:
            if written.exception() and self._layouts.get(number) and self._layouts[number].written is written:
                del self._layouts[number]


# The log keeps this number of seals after dropping their rows, to compute the lag of old offsets in seconds. It
# keeps fewer if it is full and has no rows to drop.
KEPT_SEALS = 100_000
_GROWN = "grown_from"
_NONE: Mapping[str, int] = MappingProxyType({})


def recorded_models(log: LogStore) -> dict[str, Mapping[str, Any]]:
    """The records of all models, by name."""
    models = {}
    for name, record in log.items("model/").items():
        with reading(f"record model/{name}"):
            models[name] = unpack_json(record)
    return models


def follows(before: Seal, seal: Seal) -> bool:
    """Whether a seal directly follows another one, according to its checksum."""
    return seal.version == before.version + 1 and seal.after(before).checksum == seal.checksum


class ModelStore:
    """The log's records of one model. Any thread may use it; methods that return no future block.

    Attributes:
        history: the id made when the model's log was created.
        specs: the recorded tables, in the order in which they were added.
        grown_from: the number of rows that a table had before it last grew, by table name.
        removed: the version at which a table of that name was last removed, by name. A present table of that name
            has only rows of later versions.
        dropped: the version up to which the log has dropped its rows.
        last: the last version that counts; the log may have later ones, until a cut replaces them.
        written: whether anything was written.
        queue: the log's pending writes, from all its users.
    """

    def __init__(self, log: LogStore, model: str, kept_seals: int = KEPT_SEALS) -> None:
        self._log, self.queue = log, log.queue
        self._model = model
        self._cuts, self._seals = f"cuts/{model}", f"seals/{model}"
        self._layouts = Layouts(log, model)
        self._cutting, self._retired = threading.Lock(), False
        self.history = uuid.uuid4().hex
        self.specs: dict[str, TableSpec] = {}
        self.grown_from: Mapping[str, int] = {}
        self.removed: Mapping[str, int] = {}
        self.dropped, self.written, self.last = 0, False, LAST_NUMBER
        self._replacing = list[Future[None]]()
        self._kept_seals = kept_seals

    def load(self, record: Mapping[str, Any]) -> None:
        """Read the records."""
        with reading(f"record model/{self._model}"):
            self.history, self.removed = record["history"], record["removed"]
            self.specs = {each["name"]: spec_of_record(each) for each in record["tables"]}
            self.grown_from = {each["name"]: each[_GROWN] for each in record["tables"] if _GROWN in each}
        with reading(f"record cut/{self._model}"):
            dropped = self._log.items(f"cut/{self._model}").get("")
            self.dropped = int(dropped) if dropped else 0
        self._layouts.load()

    def describe(
        self,
        specs: Mapping[str, TableSpec],
        grown_from: Mapping[str, int] = _NONE,
        removed: Mapping[str, int] = _NONE,
    ) -> None:
        """Record the present tables, the earlier sizes of grown tables, and removed tables."""
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
        """The seals from version `first` to `last`, oldest first, as long as each follows the one before.

        Also return the problem with the next seal; empty if there is none.
        """
        seals = list[Seal]()
        try:
            for record in self._log.read(self._seals, first, self.last):
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
        """Drop rows of unfinished cuts after version `sealed`. If the log has no room for that, they do no harm: a
        part drops its own rows when it begins, and `rows` skips others.
        """
        if self.last < LAST_NUMBER:
            return
        self._layouts.note_newest(sealed)
        with contextlib.suppress(VolumeFailed, LogFull):
            self._log.drop(self._cuts, sealed + 1).result()

    def go_back(self, version: int) -> None:
        """Leave out everything after a version, because some of it is lost; trainers publish it again.

        The log keeps it until a cut replaces it: what cannot be read today may be readable tomorrow.
        """
        self.last, self.dropped = version, min(self.dropped, version)

    def _replace(self) -> None:
        """Before the first write of a cut, drop what `go_back` has left out."""
        if self.last < LAST_NUMBER and not self._replacing:
            self._layouts.note_newest(self.last)
            dropped = self._log.put(f"cut/{self._model}", b"%d" % self.dropped if self.dropped else None)
            drops = [self._log.drop(stream, self.last + 1) for stream in (self._seals, self._cuts)]
            self._replacing = [dropped, *drops]
            for each in self._replacing:
                each.add_done_callback(self._note_replaced)

    def _note_replaced(self, _: Future[None]) -> None:
        if all(each.done() and not each.exception() for each in self._replacing):
            self.last, self._replacing = LAST_NUMBER, []

    def add_seals(self, seals: Sequence[Seal]) -> None:
        """Restore seals that the log lost, from a checkpoint."""
        written = [self._log.append(self._seals, seal.version, 0, 0, pack_json(asdict(seal))) for seal in seals]
        for each in written:
            each.result()

    # Dropping records that checkpoints contain.

    def truncate(self, version: int) -> None:
        """Drop rows up to a version that checkpoints contain."""
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
        """Drop half of the kept seals up to `version`, because the log is full and has no rows to drop."""
        with self._cutting:
            self._kept_seals = max(1, self._kept_seals // 2)
            self._log.truncate(self._seals, max(0, version - self._kept_seals)).result()

    def retire(self) -> None:
        """Drop no more records, and wait for a drop under way."""
        with self._cutting:
            self._retired = True

    # Cuts, from their first part to their seal.

    @property
    def capacity(self) -> int:
        """Maximum size of the log's rows, in bytes."""
        return self._log.capacity

    def drop_cut(self, version: int) -> Future[None]:
        """Drop the rows of an abandoned, unsealed cut."""
        if any(each.done() and each.exception() for each in self._replacing):
            self._replacing = []  # The next cut tries again; this one must not be sealed.
        return self._log.drop(self._cuts, version)

    def drop_part(self, version: int, rank: int) -> Future[None]:
        """Drop the rows of a rank's part of an unsealed cut. The drop is on disk with the seal."""
        self._replace()
        return self._log.drop(self._cuts, version, rank, patient=True)

    def use_layout(self, layout: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Use a packed layout with these shards for rows of a version that is not sealed yet."""
        self._replace()
        self.written = True
        return self._layouts.use(layout, shards, version)

    def append(self, version: int, rank: int, index: int, record: Sequence[Buffer]) -> Future[None]:
        """Append record `index` of a rank's part, see `pack_rows`. It is on disk once the seal is."""
        return self._log.append(self._cuts, version, rank, index, *record, patient=True)

    def seal(self, seal: Seal, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Seal a cut, unless one of the writes in `after` was refused.

        Once the future is done, the seal and these writes are on disk and part of the history.
        """
        self._replace()  # A cut without a row has written nothing yet.
        record, after = pack_json(asdict(seal)), [*self._replacing, *after]
        return self._log.append(self._seals, seal.version, 0, 0, record, after=after)

    def rows(self, seal: Seal) -> Iterator[RowBatch]:
        """Read the rows of a sealed cut from the log."""
        count = 0
        for record in self._log.read(self._cuts, seal.version, seal.version):
            if record.part < seal.world_size:
                name = name_of(self._cuts, record.number, record.part, record.index)
                with reading(name):
                    rows = unpack_rows(record.payload, self._layouts.shards)
                try:
                    rows.check_digests()
                except Damaged as error:  # They changed in memory before they reached the log.
                    raise StorageFailed(f"the log's {name} is damaged: {error}: {RESTORE}") from error
                count += len(rows)
                yield rows
        if count != seal.rows:
            raise StorageFailed(
                f"the log has {counted(count, 'row')} of version {seal.version} of model {self._model!r}, "
                f"expected {seal.rows}: {RESTORE}"
            )


_NOTE = "removed/"
_STREAMS = ("cuts", "seals", "layouts")
StoreOf = Callable[[str], CheckpointStore]


def note_removal(log: LogStore, model: str) -> Future[None]:
    """Note the removal of a model: once the future is done, a restart finishes it."""
    return log.put(f"{_NOTE}{model}", b"{}")


def remove_model(log: LogStore, model: str, checkpoints: CheckpointStore) -> None:
    """Remove a model whose removal is noted: its records, its streams, its checkpoints. Blocks."""
    remove_records(log, model)
    checkpoints.remove_all()
    log.put(f"{_NOTE}{model}", None).result()


def remove_records(log: LogStore, model: str) -> None:
    """Remove all log records of a model. Blocks."""
    for name in (f"model/{model}", f"cut/{model}", f"quarantine/{model}"):
        log.put(name, None).result()
    for deletes in (f"delete/{model}/", f"deleted/{model}/"):
        for name in log.items(deletes):
            log.put(f"{deletes}{name}", None).result()
    for kind in _STREAMS:
        log.truncate(f"{kind}/{model}", LAST_NUMBER).result()


def removal_noted(log: LogStore, model: str) -> bool:
    """Whether a removal of a model was noted and did not finish. Blocks.

    Finish it before making another model of that name, because the next start would remove that one.
    """
    return "" in log.items(f"{_NOTE}{model}")


def remove_unpublished(log: LogStore, checkpoints_of: StoreOf) -> list[str]:
    """Remove remains of models that never sealed a version, and return their names. Call it before reading models.

    The log may have rows of a first cut from before a crash. A model with checkpoints is kept: it was published,
    and brokers lost its seals. Blocks.
    """
    streams = [stream.partition("/") for stream in log.streams()]
    sealed = {model for kind, _, model in streams if kind == "seals"}
    begun = {model for kind, _, model in streams if kind in _STREAMS} | recorded_models(log).keys()
    names = list[str]()
    for model in sorted(begun - sealed - log.items("cut/").keys()):
        listing = checkpoints_of(model).manifests()
        if listing.manifests or (log.shared and listing.unreachable):
            continue
        names.append(model)
        with contextlib.suppress(VolumeFailed):
            remove_records(log, model)
    return names


def finish_removals(log: LogStore, checkpoints_of: StoreOf) -> list[str]:
    """Finish noted removals of models, and return the names of these. Call it before reading models.

    Blocks. If a volume or a place of checkpoints refuses, the rest stays until the next start, or until a model of
    that name is made.
    """
    names = list(log.items(_NOTE))
    for model in names:
        with contextlib.suppress(VolumeFailed, PlaceFailed):
            remove_model(log, model, checkpoints_of(model))
    return names
