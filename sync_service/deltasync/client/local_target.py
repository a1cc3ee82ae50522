"""What targets are alike in whose rows are read in this process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic

from deltasync.client.copies import C, Copies, R
from deltasync.client.reading import Reads
from deltasync.client.targets import Release
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec


class LocalTarget(Generic[C, R]):
    """A target whose rows are read in this process, all of one version.

    Attributes:
        reads: "pause": readers wait while a release is written. "copies": everything is there twice, and no reader
            waits.
    """

    def __init__(self, reads: Reads, copies: Sequence[tuple[C, R]]) -> None:
        """Keep these copies, as many as the way of reading needs, each with what its readers get."""
        self.reads = reads
        self._copies = Copies(copies)

    def reading(self) -> AbstractContextManager[R]:
        """What is held and of which version it is, with no release written into it while the block runs.

        Several threads may be inside, each of them more than once. Nothing of it is to be used after the block.

        Raises:
            TornTarget: a release was not written to its end, or a first copy is still arriving.
            Contradiction: this thread is applying a release.
        """
        return self._copies.reading()

    @property
    def position(self) -> Position:
        """The one to go on from: of the last release, or an empty one where that was not written to its end."""
        return self._copies.position

    @property
    def takes_parts(self) -> bool:
        """Whether a first copy is written as it arrives. With `reads="copies"` what is there stays served."""
        return self.reads == "pause" and not self.position.number

    @property
    def event_time_unix_ns(self) -> int | None:
        """As in a `Reading`."""
        return self._copies.newest.event_time_unix_ns

    def apply(self, release: Release) -> None:
        """Write a release: all of it, or nothing where one of these is raised.

        Raises:
            Contradiction: the consumer streams ids only, this thread is inside `reading()`, or rows contradict
                each other.
            TornTarget: a release before was not written to its end, and this one does not bring everything.
        """
        release.check_values()
        self._copies.apply(release)

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table by number, as `ReadableTarget` has it.

        Where two copies hold different rows, it is what neither of them holds.
        """
        return self._copies.read(table, ids)
