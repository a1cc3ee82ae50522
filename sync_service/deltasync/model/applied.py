"""The tables of a model, all at one version."""

from collections.abc import Iterable

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.threads import MODEL_THREAD, confined
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import Shard
from deltasync.model.model_store import ModelStore


@confined(_seal=MODEL_THREAD, _partly=MODEL_THREAD)
class AppliedTables:
    """The tables of a model, and the cut they are at. Used on the model's thread, except for `tables`.

    Attributes:
        tables: in the order they were added; a table's index is its slot. Any thread may read it: it is replaced
            when a table is added or removed.
    """

    def __init__(self, model: str, store: ModelStore, memory: TableMemory) -> None:
        self.tables: list[StampedTable] = []
        self._model = model
        self._store = store
        self._memory = memory
        self._seal: Seal | None = None
        self._partly = False

    @property
    def seal(self) -> Seal | None:
        """The seal of the cut the tables are at; None before the first one.

        Raises:
            ServiceUnavailable: the last cut was applied only in part. Nobody may see that.
        """
        if self._partly:
            raise ServiceUnavailable(f"a part of a version of model {self._model!r} is to be applied again")
        return self._seal

    def begin(self) -> None:
        """Make the tables that the log describes, all empty.

        Raises:
            StorageFailed: there is no room for them.
        """
        removed = self._store.removed
        self.tables = [
            StampedTable(spec, self._memory, removed.get(name, 0)) for name, spec in self._store.specs.items()
        ]
        self.begin_at(None)

    def begin_at(self, seal: Seal | None) -> None:
        """Note that the tables hold the rows of a cut, none before the first one."""
        self._seal = seal
        self._partly = False

    def apply(self, seal: Seal, rows: Iterable[RowBatch] | None) -> None:
        """Apply a cut, from `rows` or else from the log. Applying it again changes nothing.

        Raises:
            StorageFailed: the log cannot be read, or what it has of the cut is damaged.
        """
        # The log may have rows of a table that was removed later, also of one whose name another table has now.
        by_name = {table.spec.name: table for table in self.tables if table.removed_before < seal.version}
        for batch in self._store.rows(seal) if rows is None else rows:
            if table := by_name.get(batch.table.name):
                self._partly = True
                table.apply(batch, seal.version)
        for name in seal.whole:  # A full cut deletes the rows that it does not name.
            if table := by_name.get(name):
                self._partly = True
                unnamed = table.not_stamped(seal.version)
                table.apply(RowBatch.deletes(Shard.whole(table.spec), unnamed), seal.version)
        self.begin_at(seal)
