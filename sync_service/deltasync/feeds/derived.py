"""What recovery and checkpoints of a model need of the views of its consumers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deltasync.checkpoints.manifest import TableEntry, TableKey
from deltasync.checkpoints.writing import Source
from deltasync.core.change_counts import Stamps
from deltasync.core.rows import Ids
from deltasync.core.stamps import StampedTable


class Derived(Source, Protocol):
    """A view: tables that are made of a model's tables and of the log. Used on the model's thread.

    Recovery calls `restore`, then `restored` once the tables that it returned are loaded. Then it calls `replay`
    for the version that they are of, and for each that follows. If something is damaged, it begins again.
    """

    def let_go(self) -> None:
        """Keep nothing of an earlier `restore`: its tables are in the way of new ones."""

    def restore(self, state: Mapping[str, Any] | None, entries: Sequence[TableEntry]) -> list[StampedTable | None]:
        """Begin with the tables that a checkpoint has of it.

        Args:
            state: what `checkpoint_state` had returned; None = there is no checkpoint of it.
            entries: its tables in the checkpoint.

        Returns:
            The tables to be loaded, in the order of `entries`; None for one that is no longer needed.
        """

    def restored(self, dirty: Mapping[TableKey, tuple[Ids, Stamps]]) -> None:
        """All rows of the tables are loaded, and `dirty` has those of `SourceTable.dirty`."""

    def replay(self, version: int) -> None:
        """Make again what the log says that was made of the model's version, which its tables are at."""

    def cut_log(self, state: Mapping[str, Any]) -> None:
        """Drop what the log has up to a state that checkpoints have. Blocks; any thread.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
