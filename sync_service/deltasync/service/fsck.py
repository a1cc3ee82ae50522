"""`deltasync fsck`: reads all data of a running service and reports damage. Repairs nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from deltasync.base.errors import Damaged, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.logs import Progress
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source
from deltasync.core.rows import DamagedRows
from deltasync.core.stamped_table import StampedTable
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.service.models import Models
from deltasync.views.registry import ViewRegistry
from deltasync.views.view import View

_BYTES_AT_ONCE = 4 << 20
# The remedy for a damaged record that a checkpoint makes superfluous.
_CHECKPOINT = "write a checkpoint, so that the next start does not need it (deltasync checkpoint MODEL)"


@dataclass(kw_only=True)
class Checked:
    """The result of checking a model, or the log.

    Attributes:
        model: the model's name; empty for the log.
        checkpoints: number of its checkpoints.
        rows: number of its rows in memory compared with their digests, including those of views.
        records: number of records read in the log.
        problems: what is damaged or missing.
    """

    model: str = ""
    checkpoints: int = 0
    rows: int = 0
    records: int = 0
    problems: list[str] = field(default_factory=list)

    @contextmanager
    def noting(self, remedy: str = RESTORE) -> Iterator[None]:
        """Turn errors about damage inside the block into problems with this remedy."""
        try:
            yield
        except (LogUnavailable, VolumeFailed):
            raise  # The data cannot be read now, but need not be damaged.
        except (StorageFailed, Damaged) as error:
            self.problems.append(str(error).replace(RESTORE, remedy))


async def check_service(models: Models, views: ViewRegistry, events: Events, by: str) -> list[Checked]:
    """Read all data of a running service, which continues to work; `by` names the caller.

    If rows in memory do not match their digests, the service reloads the model.
    """
    for name in models.recovering:
        models.check_recovered(name)
    results = list[Checked]()
    for name in sorted(models):
        models.check_recovered(name)
        if (model := models.get(name)) is None:
            continue  # It was deleted meanwhile.
        results.append(checked := Checked(model=name))
        await _check_memory(checked, model, views.of_model(model))
        await in_own_thread(_check_checkpoints, checked, model.checkpoints)
    results.append(of_log := Checked())
    for log in models.storage.logs.each():
        await in_own_thread(_check_log, of_log, log)
    problems = sum(len(each.problems) for each in results)
    events.emit(EventKind.CHECKED, f"{counted(problems, 'problem')} in the stored data", by=by)
    return results


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


def _check_checkpoints(checked: Checked, store: CheckpointStore) -> None:
    checked.problems += store.verify()
    checked.checkpoints = len(store.manifests().manifests)


def _check_log(checked: Checked, log: LogStore) -> None:
    with checked.noting():
        checked.records += len(log.items(""))
    with checked.noting():
        for stream in log.streams():
            with checked.noting(_CHECKPOINT):
                for _ in log.read(stream):
                    checked.records += 1
