"""`deltasync fsck`: reads all stored data and reports damage with its consequences. Repairs nothing."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.base.errors import Damaged, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.progress import Progress
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.kept_version import KEPT
from deltasync.checkpoints.manifest import DATA, MANIFESTS, id_of
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.consumers.serving_history import history_stream
from deltasync.core.rows import DamagedRows
from deltasync.core.stamped_table import StampedTable
from deltasync.log.data_directory import (
    ASK_IT,
    CHECKPOINTS,
    RESTORE,
    check_is_data_directory,
    for_owner_only,
    lock_data_directory,
    writing,
)
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore, LogUnavailable
from deltasync.log.records import check_format
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.model_store import ModelStore, recorded_models
from deltasync.service.checkpoints import models_of_consumers
from deltasync.service.models import Models
from deltasync.views.registry import ViewRegistry
from deltasync.views.view import View

_BYTES_AT_ONCE = 4 << 20
# Streams of a model, of its consumers' views, and of its consumers.
_OF_MODELS, _OF_VIEWS = ("cuts", "seals", "layouts"), ("heads", "releases")
_OF_CONSUMERS = (*_OF_VIEWS, "history")
_LATER, _FROM_TRAINER = "after the next load, the trainer has to send the rows of version", "and later"
# Names that a service or a file system creates in a data directory.
_TOP = frozenset({"lock", "log", CHECKPOINTS, "kernels", "endpoints.json", "endpoints.new", "lost+found"})
_LOG = frozenset({"data.mdb", "lock.mdb"})


async def check_service(
    models: Models, registry: ConsumerRegistry, views: ViewRegistry, data_dir: Path, events: Events, by: str
) -> "list[Checked]":
    """Read all data of a running service, which continues to work; `by` names the caller.

    If rows in memory do not match their digests, the service reloads the model.

    Raises:
        ServiceUnavailable: a model is still recovering, or is being reloaded.
        StorageFailed: a file or the log cannot be read now.
    """
    for name in models.recovering:
        models.check_recovered(name)
    results, names = list[Checked](), sorted(models)
    for name in names:
        models.check_recovered(name)
        if (model := models.get(name)) is None:
            continue  # It was deleted meanwhile.
        checked = Checked(model=name)
        await _check_memory(checked, model, views.of_model(model))
        consumers = [each.name for each in registry.of_model(name)]
        await in_own_thread(_check_stored, checked, model.log, model.checkpoints, consumers)
        results.append(checked)
    consumers = list(registry.consumers)
    other = Checked(unknown=unknown_files(data_dir))
    for log in models.storage.logs.each():
        await in_own_thread(_check_others, other, log, names, consumers)
    problems = sum(len(each.problems) for each in [*results, other])
    events.emit(EventKind.CHECKED, f"{counted(problems, 'problem')} in the stored data", by=by)
    return [*results, other]


@for_owner_only()
def check_data_directory(data_dir: Path) -> "list[Checked]":
    """Read a data directory that no service uses. It is locked during the check.

    Raises:
        InvalidInput: the folder is not a data directory.
        StorageFailed: a service uses it, it has another format, or it cannot be read now.
    """
    check_is_data_directory(data_dir)
    with closing(lock_data_directory(data_dir, ASK_IT)), writing(f"{data_dir} cannot be read", data_dir):
        return _check_directory(data_dir)


@dataclass(kw_only=True)
class Checked:
    """The result of checking a model.

    Attributes:
        model: its name; empty for data that belongs to no model.
        checkpoints: number of checkpoints read.
        records: number of log records read.
        rows: number of rows in memory compared with their digests, including those of views; 0 if no service
            runs.
        problems: damaged or missing data, and the consequences.
        unknown: files that no service created.
    """

    model: str = ""
    checkpoints: int = 0
    records: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turn errors about damage inside the block into problems."""
        try:
            yield
        except (LogUnavailable, VolumeFailed):
            raise  # The data cannot be read now, but need not be damaged.
        except (StorageFailed, Damaged) as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))


def _check_directory(data_dir: Path) -> list[Checked]:
    place, other = Place(str(data_dir / CHECKPOINTS)), Checked(unknown=unknown_files(data_dir))
    models, log = {each.parent.name for each in (data_dir / CHECKPOINTS).glob(f"*/{MANIFESTS}")}, None
    with other.noting():
        log = LmdbStore(LogOptions(directory=data_dir / "log"))
    if log is None:  # Checkpoints can be read without the log.
        results = [Checked(model=name) for name in sorted(models)]
        for each in results:
            _check_checkpoints(each, CheckpointStore(each.model, place))
        return [*results, other]
    with closing(log):
        check_format(log)
        consumers = dict[str, str]()
        with other.noting():
            models |= recorded_models(log).keys()
            consumers = models_of_consumers(log)
        results = [Checked(model=name) for name in sorted(models)]
        for each in results:
            own = [name for name, model in consumers.items() if model == each.model]
            _check_stored(each, log, CheckpointStore(each.model, place), own)
        _check_others(other, log, models, consumers)
        return [*results, other]


# Rows in memory.


async def _check_memory(checked: Checked, model: Model, views: Sequence[View]) -> None:
    """Compare the rows of a model and its views with their digests, in blocks between which cuts continue."""
    sources: list[Source] = [model.tables, *views]
    tables = [each for source in sources for each in await model.on_thread(source.checkpoint_tables)]
    total = sum(each.table.slots for each in tables)
    progress = Progress(f"model {model.name!r}: comparing rows in memory", total)
    for each in tables:
        table, owner = each.table, each.key.owner
        size = max(1, _BYTES_AT_ONCE // table.spec.row_bytes)
        for first in range(0, table.slots, size):
            last = min(first + size, table.slots)
            try:
                checked.rows += await model.on_thread(_compare, table, first, last)
            except DamagedRows as error:
                whose = f"consumer {owner!r}, " if owner else ""
                checked.problems.append(f"{whose}{error}: the service reloads the model")
                return  # The reload repairs any other damage, too.
            progress.add(last - first)


def _compare(table: StampedTable, first: int, last: int) -> int:
    """Compare the rows of a range that ever changed with their digests; return their number."""
    ids = table.ids_of(table.index.changed_in(first, last, 0))
    live = ids[~table.deleted(ids)]
    table.check(live, table.rows_of(live))
    return len(ids)


# Checkpoints.


def _check_stored(checked: Checked, log: LogStore, store: CheckpointStore, consumers: Sequence[str]) -> None:
    _check_log(checked, log, consumers, _check_checkpoints(checked, store))


def _check_checkpoints(checked: Checked, store: CheckpointStore) -> int:
    """Read all checkpoints of a model; return the version of the newest sound one, 0 if there is none."""
    checked.problems += store.verify()
    manifests = store.manifests().manifests
    sound = [manifest.version for manifest in manifests if store.is_sound(manifest)]
    checked.checkpoints, newest = len(manifests), max(sound, default=0)
    if manifests and manifests[0].version > newest:
        text = f"the checkpoint of version {manifests[0].version} of model {checked.model!r} is damaged"
        used = f"the service uses that of version {newest} and more of the log"
        follows = used if newest else "so are all older ones"
        checked.problems.append(f"{text}: {follows}")
    return newest


# The log.


def _check_log(checked: Checked, log: LogStore, consumers: Sequence[str], saved: int) -> None:
    """Read all records of a model and of its consumers' views.

    Args:
        checked: receives the result.
        log: the log.
        consumers: names of the model's consumers.
        saved: version of the newest checkpoint that can be loaded.
    """
    name = checked.model
    with checked.noting():
        record = recorded_models(log).get(name)
        if record is None:
            checked.problems.append(f"the log has no record of model {name!r}: its trainer has to send every row")
            return
        store = ModelStore(log, name)
        seals, problem = store.seals()  # Before the layouts, to have the layout of each seal.
        store.load(record)
        if store.dropped > saved:
            text = f"the log of model {name!r} begins after version {store.dropped}, which no checkpoint has"
            checked.problems.append(f"{text}: after the next load, its trainer has to send the damaged rows")
        checked.records += len(seals)
        if problem:
            newest = max(saved, seals[-1].version if seals else 0)
            checked.problems.append(_with(problem, f"{_LATER} {newest + 1} {_FROM_TRAINER}"))
        rest = [seal for seal in seals if seal.version > store.dropped]
        progress = Progress(f"model {name!r}: reading the log", sum(seal.rows for seal in rest))
        for seal in rest:
            try:
                for _ in store.rows(seal):
                    checked.records += 1
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                if seal.version > int(log.items(f"cut/{name}").get("") or 0):  # Else a checkpoint dropped it.
                    checked.problems.append(_of_cut(error, seal.version, saved))
            progress.add(seal.rows)
    for each in consumers:
        for kind in _OF_VIEWS:
            _read_stream(checked, log, f"{kind}/{each}", f"replicas of consumer {each!r} get every row")
        _read_stream(checked, log, history_stream(each), f"what consumer {each!r} served is not known completely")


def _of_cut(error: Exception, version: int, saved: int) -> str:
    """A damaged version in the log, and the consequence."""
    if version <= saved:
        return _with(str(error), f"no loss: the checkpoint of version {saved} contains these rows")
    return _with(str(error), f"without another checkpoint, {_LATER} {version} {_FROM_TRAINER}")


def _with(problem: str, follows: str) -> str:
    return f"{problem.removesuffix(f': {RESTORE}')}: {follows}"


def _read_stream(checked: Checked, log: LogStore, stream: str, follows: str) -> None:
    try:
        for _ in log.read(stream):
            checked.records += 1
    except (LogUnavailable, VolumeFailed):
        raise
    except StorageFailed as error:
        checked.problems.append(_with(str(error), follows))


def _check_others(other: Checked, log: LogStore, models: Collection[str], consumers: Collection[str]) -> None:
    """Read all small records, and the streams that belong to no model or consumer."""
    owned = {f"{kind}/{name}" for kind in _OF_MODELS for name in models}
    owned |= {f"{kind}/{name}" for kind in _OF_CONSUMERS for name in consumers}
    with other.noting():
        small = log.items("")
        other.records += len(small)
    with other.noting():
        for stream in log.streams():
            if stream not in owned:
                _read_stream(other, log, stream, "no consequence: nothing uses it")


# Files.


def unknown_files(data_dir: Path) -> list[str]:
    """Files and folders in a data directory that no service created; of nested folders only the outermost."""
    checkpoints = data_dir / CHECKPOINTS
    folders = [(data_dir, _TOP), (data_dir / "log", _LOG)]
    paths = [path for folder, names in folders for path in _entries(folder) if path.name not in names]
    for model in _entries(checkpoints):
        paths += [] if model.is_dir() else [model]
        paths += [path for path in _entries(model) if path.name not in (MANIFESTS, DATA, KEPT)]
        paths += [
            path for kind in (MANIFESTS, DATA, KEPT) for path in _entries(model / kind) if not id_of(path.name)
        ]
    return sorted(str(path) for path in paths if path.name != "lost+found")


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
