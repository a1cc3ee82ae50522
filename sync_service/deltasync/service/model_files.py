"""The files of a model that another process has had: from the newest snapshot that its log goes on from."""

from collections.abc import Callable
from pathlib import Path

from deltasync.core.events import EventKind, Events
from deltasync.service.log_chain import go_back, rows_upto, sound_upto
from deltasync.service.snapshot_fit import Fit, LogEnd, fitness
from deltasync.service.snapshot_restore import make_files, seals_of, write_log, write_missing
from deltasync.snapshots.manifest import Manifest, SnapshotDamaged
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import snapshots_of
from deltasync.storage.anew import make_anew
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import reading, unpack_json
from deltasync.storage.removal import remove_model

Call = Callable[[Callable[[], None]], object]


class ModelFiles:
    """Makes the files of models. Blocks; any thread but that of the event loop, in which `tell` is called."""

    def __init__(self, place: SnapshotPlace, models: Path, events: Events, call: Call) -> None:
        """`call` has the event loop call a function."""
        self._place, self._models, self._events, self._call = place, models, events, call

    def make(self, model: str, log: LogStore) -> None:
        """Have files of a model from which, with its log, it comes back: where the log has lost something, as of
        the newest version that is there whole.

        Raises:
            StorageFailed: snapshots cannot be read now, there is no room, or the log could not be written.
        """
        directory = self._models / model
        check_log(log, directory / "none")
        self._mend_chain(model, log)
        found = snapshots_of(self._place, model)
        for problem in found.problems:
            self._tell(model, problem)
        for also in (False, True):  # Rather an older version than none.
            if any(self._made(each, model, log, directory, also_gap=also) for each in found.manifests):
                return
        if log_end(log, model).cut:
            self._tell(model, "neither its log nor a snapshot has all of its rows: its trainer sends every one")
            remove_model(log, model, directory)
            return
        make_anew(log, model, directory)

    def _made(self, manifest: Manifest, model: str, log: LogStore, directory: Path, *, also_gap: bool) -> bool:
        """Whether there are files now, of this snapshot; `also_gap` if the log has not all that comes after it."""
        try:
            end = log_end(log, model)
            decision = fitness(manifest, seals_of(self._place, manifest), end)
            if decision.fit is Fit.FORKED or (decision.fit is Fit.GAP and not also_gap):
                self._tell(model, f"{decision.reason}: it is passed over")
                return False
            if decision.fit in (Fit.AHEAD, Fit.GAP):
                self._tell(model, f"{decision.reason}: the log is written again from it")
                write_log(self._place, manifest, log)
            elif end.cut > manifest.first:
                write_missing(self._place, manifest, log, end.cut)
            make_files(self._place, manifest, log, directory)
            self._mend_rows(model, log, manifest.first)
        except SnapshotDamaged as error:  # Of all else another try may find less.
            self._tell(model, f"a snapshot is passed over: {error}")
            return False
        return True

    def _mend_chain(self, model: str, log: LogStore) -> None:
        version, problem = sound_upto(log, model)
        if problem:
            self._tell(
                model, f"its log is whole up to version {version} ({problem}): what came after is sent again"
            )
            go_back(log, model, version)

    def _mend_rows(self, model: str, log: LogStore, first: int) -> None:
        newest = log_end(log, model).newest
        version, problem = rows_upto(log, model, first, newest)
        if problem:
            self._tell(
                model, f"its log is whole up to version {version} ({problem}): what came after is sent again"
            )
            go_back(log, model, version)

    def _tell(self, model: str, text: str) -> None:
        self._call(lambda: self._events.emit(EventKind.FAILED, text, model=model))


def log_end(log: LogStore, model: str) -> LogEnd:
    """What a log has of a model.

    Raises:
        StorageFailed: a record is damaged.
    """
    with reading(f"records of model {model!r}"):
        seals = {record.number: unpack_json(record.payload)["checksum"] for record in log.read(f"seals/{model}")}
        found = log.items(f"model/{model}").get("")
        return LogEnd(seals, unpack_json(found)["flushed"] if found else 0)
