"""What a data directory says of itself that no service uses, compared with what is in it. Nothing is written."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from deltasync.core.damage import ranges
from deltasync.core.digests import row_digests
from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.core.id_sets import union
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal
from deltasync.core.table_records import delivery_of_record, spec_of_record
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.words import counted
from deltasync.service.inspection import InspectedTable
from deltasync.service.stored_rows import StoredTable, files_of, ids_of
from deltasync.service.stored_views import StoredView
from deltasync.storage.data_directory import ASK_IT, RESTORE, check_is_data_directory, lock_data_directory
from deltasync.storage.files import for_owner_only, writing
from deltasync.storage.layouts import Layouts
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import FORMAT
from deltasync.storage.log_store import LogOptions, LogStore, LogUnavailable
from deltasync.storage.made_files import foreign, unused
from deltasync.storage.model_records import recorded_files, recorded_models
from deltasync.storage.records import name_of, reading, seal_of_record, unpack_json, unpack_rows
from deltasync.storage.volume import VolumeFailed
from deltasync.views.records import is_of_removed, place_of_record, recorded_release, recorded_view
from deltasync.views.table import EncodedTable, view_arrays

MENDABLE = "a service mends them from the log when it starts, or asks the trainer for them; or run fsck --mend"
NEW_VIEW = "a service makes what its replicas hold anew when it starts, and sends them every row"


@dataclass(frozen=True)
class Checked:
    """What was found.

    Attributes:
        tables: of each table what was found of its rows.
        problems: what else does not fit, in sentences.
        unused: files and folders that a service has made and nothing uses: one that starts removes them.
        foreign: files and folders that no service has made, which are left alone.
    """

    tables: Sequence[InspectedTable]
    problems: Sequence[str]
    unused: Sequence[Path]
    foreign: Sequence[Path]


@for_owner_only()
def check_data_directory(data_dir: Path) -> Checked:
    """Look at all that a data directory has, while no service uses it; none can meanwhile.

    Raises:
        InvalidInput: it is none, or one of another format.
        StorageFailed: a service uses it, or it cannot be read now.
    """
    check_is_data_directory(data_dir)
    with closing(lock_data_directory(data_dir, ASK_IT)), writing(f"{data_dir} cannot be read", data_dir):
        check = _Check(data_dir)
        check.run()
    return Checked(check.tables, check.problems, check.unused(), foreign(data_dir))


class _Check:
    def __init__(self, data_dir: Path) -> None:
        self._models = data_dir / "models"
        self._directory = data_dir
        self.tables = list[InspectedTable]()
        self.problems = list[str]()
        # Of models and views; those that could not be looked at are spared.
        self._used, self._spared = set[Path](), {self._models}

    def unused(self) -> list[Path]:
        """What a service has made and nothing uses."""
        return unused(self._models, self._used, self._spared)

    def run(self) -> None:
        """Look at the log, and then at what it leads to."""
        try:
            log = LmdbStore(LogOptions(directory=self._directory / "log"))
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:
            self.problems.append(str(error))
            return
        with closing(log):
            found = bytes(log.items("format").get("", b""))
            if found != b"%d" % FORMAT:
                text = f"{self._directory} is of format {found.decode(errors='replace') or 'none'}"
                raise InvalidInput(f"{text}, this version reads {FORMAT}: update deltasync")
            self._try(self._records, log)
            self._try(self._all_models, log)

    def _try(self, look: Callable[..., None], *arguments: Any, at: Path | None = None) -> None:
        """Look; where something is damaged, what is `at` a place may be used."""
        try:
            look(*arguments)
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:
            self._spared |= {at} if at else set()
            if str(error) not in self.problems:  # Several looks read the same record.
                self.problems.append(str(error))

    def _records(self, log: LogStore) -> None:
        log.items("")
        for stream in log.streams():
            self._try(_read, log, stream)

    def _all_models(self, log: LogStore) -> None:
        models = recorded_models(log)
        self._spared.clear()
        for name, record in models.items():
            self._try(self._model, log, name, record, at=self._models / name)

    def _model(self, log: LogStore, name: str, record: Mapping[str, Any]) -> None:
        directory = self._models / name
        seals = list(_seals(log, name))
        self._chained(name, seals)
        with reading(f"record model/{name}"):
            specs = [
                replace(spec_of_record(each), rows=each.get("flushed_rows", each["rows"]))
                for each in record["tables"]
            ]
            files, flushed = recorded_files(directory, record), record["flushed"]
        logged = self._logged(log, name, specs, [seal for seal in seals if seal.version > flushed])
        newest = seals[-1].version if seals else 0
        tables = [
            StoredTable(spec, "rows", place, arrays, row_digests, logged[spec.name], newest)
            for spec, (place, arrays) in zip(specs, files, strict=True)
        ]
        unsound = {table.spec.name: self._table(name, "", table) for table in tables}
        self._used |= {directory / "tables", directory / "views"}.union(*(files_of(*each) for each in files))
        for consumer in log.items("view/").keys() & log.items("consumer/").keys():
            at = directory / "views" / consumer
            self._try(self._view, log, consumer, name, record, tables, unsound, newest, at=at)

    def _chained(self, model: str, seals: Sequence[Seal]) -> None:
        for before, seal in pairwise(seals):
            if seal.version != before.version + 1:
                text = (
                    f"seals of versions {before.version + 1} to {seal.version - 1} of model {model!r} are missing"
                )
                self.problems.append(text)
            elif seal.after(before).checksum != seal.checksum:
                self.problems.append(
                    f"the seal of version {seal.version} of model {model!r} does not follow the one before"
                )

    def _logged(
        self, log: LogStore, model: str, specs: Sequence[TableSpec], seals: Sequence[Seal]
    ) -> dict[str, Ids]:
        """The rows that the log has of versions after the last flush, by table; all versions have theirs."""
        layouts, found = Layouts(log, model), defaultdict[str, list[Ids]](list)
        layouts.recover()
        for seal in seals:
            rows = 0
            for record in log.read(f"cuts/{model}", seal.version, seal.version):
                if record.part < seal.world_size:
                    with reading(name_of(f"cuts/{model}", record.number, record.part, record.index)):
                        batch = unpack_rows(record.payload, layouts.shards)
                    rows += len(batch)
                    found[batch.table.name].append(np.array(batch.ids))
            if rows != seal.rows:
                self.problems.append(
                    f"the log has {counted(rows, 'row')} of version {seal.version} of model {model!r}, "
                    f"expected {seal.rows}"
                )
        whole = {name for seal in seals for name in seal.whole}
        return {
            spec.name: np.arange(spec.rows) if spec.name in whole else ids_of(found, spec.name) for spec in specs
        }

    def _view(
        self,
        log: LogStore,
        consumer: str,
        model: str,
        record: Mapping[str, Any],
        sources: Sequence[StoredTable],
        unsound: Mapping[str, Ids | None],
        newest_version: int,
    ) -> None:
        view, release = recorded_view(log, consumer), recorded_release(log, consumer)
        if view is None or view["model_history"] != record["history"]:
            return
        directory, by_name = self._models / model / "views" / consumer, {each.spec.name: each for each in sources}
        with reading(f"record view/{consumer}"):
            removed = record.get("removed", {})
            if any(is_of_removed(each, by_name, removed) for each in view["tables"]):
                return
            deliveries = [delivery_of_record(each, by_name[each["table"]].spec) for each in view["tables"]]
            places = [place_of_record(each, directory) for each in view["tables"]]
            flushed, newest = view["flushed"], release["head"]["number"] if release else 0
            made_of = max(view["seen"], release["head"]["version"] if release else 0)
        if made_of > newest_version:
            self.problems.append(
                f"consumer {consumer}: what its replicas hold is of version {made_of}, and the newest of model "
                f"{model!r} is {newest_version}: {NEW_VIEW}"
            )
        found, shards = defaultdict[str, list[Ids]](list), [Shard.whole(each.encoded_spec) for each in deliveries]
        for each in log.read(f"releases/{consumer}", flushed + 1):
            with reading(name_of(f"releases/{consumer}", each.number, each.part, each.index)):
                found[deliveries[each.part].spec.name].append(
                    np.array(unpack_rows(each.payload, lambda _: shards).ids)
                )
        for delivery, place in zip(deliveries, places, strict=True):
            arrays = view_arrays(delivery)
            self._used |= files_of(place, arrays)
            logged = ids_of(found, delivery.spec.name)
            held = delivery.encoded_spec
            stored = StoredTable(held, EncodedTable.role, place, arrays, delivery.held_digests, logged, newest)
            source = by_name[delivery.spec.name]
            self._table(model, consumer, stored, StoredView(delivery, stored, source, view["seen"]), unsound)

    def _table(
        self,
        model: str,
        consumer: str,
        table: StoredTable,
        view: StoredView | None = None,
        unsound: Mapping[str, Ids | None] = MappingProxyType({}),
    ) -> Ids | None:
        """Look at a table; returns its rows that are not as they were stored, or None if it could not be read."""
        if problems := list(table.problems()):
            whose, remedy = (f"consumer {consumer}", NEW_VIEW) if consumer else (f"model {model}", RESTORE)
            self.problems += [f"{whose}, table {table.spec.name}: {each}: {remedy}" for each in problems]
            return None
        damaged, untagged = table.damaged()
        of_source, lost = unsound.get(table.spec.name), damaged[:0]
        if view and of_source is not None:
            lost = view.lost(union(union(damaged, untagged), of_source))
        self.tables.append(
            InspectedTable(
                model=model,
                consumer=consumer,
                table=table.spec.name,
                rows=table.spec.rows,
                damaged=len(damaged),
                restamped=len(untagged) + len(lost),
                left=len(damaged) + len(untagged) + len(lost),
                reason=_reason(damaged, untagged, lost),
            )
        )
        return union(damaged, untagged)


def _read(log: LogStore, stream: str) -> None:
    for _ in log.read(stream):
        pass


def _reason(damaged: Ids, untagged: Ids, lost: Ids) -> str:
    found = {
        "other bits than were stored in": damaged,
        "other stamps or digests than were stored of": untagged,
        "rows that differ from the model's, and nothing says that they are to be sent:": lost,
    }
    said = [f"{what} {ranges(ids)}" for what, ids in found.items() if len(ids)]
    return f"{' and '.join(said)}: {MENDABLE}" if said else ""


def _seals(log: LogStore, model: str) -> Iterator[Seal]:
    for record in log.read(f"seals/{model}"):
        with reading(name_of(f"seals/{model}", record.number)):
            yield seal_of_record(unpack_json(record.payload))
