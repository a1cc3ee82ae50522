"""One copy of what a target serves, written in a pause, or two, written in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from deltasync.client.gate import Gate
from deltasync.client.reading import Reading, TornTarget
from deltasync.client.targets import Release
from deltasync.core.errors import Contradiction
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec


class Copy(Protocol):
    """The tables of a target, once."""

    def stage(self, release: Release) -> Callable[[], None]:
        """Prepare a release while others read, and return what writes it, which is quick."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `ReadableTarget`."""


C = TypeVar("C", bound=Copy)
R = TypeVar("R", bound=Reading)

_FIRST_COPY = "some of a first copy"
_REMEDY = "Start a subscriber that holds nothing: it is sent everything, and the target is whole again"


class _Side(Generic[C, R]):
    """A copy behind a gate.

    Attributes:
        copy: the copy.
        reading: what its readers get.
        gate: readers and writers of the copy pass through it.
        unfinished: what is being written, or was not written to its end, in words.
    """

    def __init__(self, copy: C, reading: R) -> None:
        self.copy = copy
        self.reading = reading
        self.gate = Gate()
        self.unfinished = ""

    def write(self, write: Callable[[], None], release: Release) -> None:
        with self.gate.writing():
            self.unfinished = _FIRST_COPY if release.more else f"some of version {release.version}"
            write()
            if release.more:
                return
            self.reading = replace(
                self.reading,
                position=release.position,
                version=release.version,
                step=release.step,
                step_end_unix_ns=release.step_end_unix_ns,
                event_time_unix_ns=release.event_time_unix_ns,
            )
            self.unfinished = ""

    @property
    def state(self) -> str:
        """What it holds, in words."""
        if self.unfinished == _FIRST_COPY:
            return (
                f"{_FIRST_COPY}, which is still arriving or was broken off: wait until the subscriber is ready, "
                "or start another one"
            )
        begun = f" and {self.unfinished}" if self.unfinished else ""
        return f"rows of version {self.reading.version}{begun}: a release was not written to its end. {_REMEDY}"

    def check(self) -> None:
        """Raise TornTarget where a release was not written to its end."""
        if self.unfinished:
            raise TornTarget(f"the target holds {self.state}")


class Copies(Generic[C, R]):
    """What a target serves.

    With one copy, readers wait while a release is written. With two, a release is written into the one that is not
    served, which is served from then on, and then into the other one, once its readers have left: none waits.

    All but `reading`, `served`, `newest` and `position` belong to one thread, the subscriber's.
    """

    def __init__(self, copies: Sequence[tuple[C, R]]) -> None:
        self._sides = [_Side(copy, reading) for copy, reading in copies]
        self._served = self._sides[0]

    @property
    def served(self) -> C:
        """The copy that is served."""
        return self._served.copy

    @property
    def each(self) -> list[C]:
        """All of them, the one that is served first."""
        return [side.copy for side in self._by_service()]

    @property
    def newest(self) -> R:
        """What a reader gets that comes now; nothing keeps it from changing."""
        return self._served.reading

    @property
    def position(self) -> Position:
        """The one that a subscriber can go on from: an empty one where a release was not written to its end."""
        return Position() if self._torn() else self._served.reading.position

    @contextmanager
    def reading(self) -> Iterator[R]:
        """What is served, with no release written into it while the block runs.

        Raises:
            TornTarget: a release was not written to its end, or a first copy is still arriving.
            Contradiction: this thread is applying a release.
        """
        while True:
            # Inside of a reading() of this thread it is the same version, whatever is served by now.
            outer = next((side for side in self._sides if side.gate.reads_here()), None)
            side = outer or self._served
            with side.gate.reading():
                if side is outer or side is self._served:
                    side.check()
                    yield side.reading
                    return
            # They were swapped before it was inside.

    def apply(self, release: Release) -> None:
        """Write a release into every copy, or into none where it cannot be prepared.

        Raises:
            TornTarget: one before was not written to its end, and this one does not reset everything.
            Contradiction: this thread is reading; or what preparing it raises.
        """
        if any(side.gate.reads_here() for side in self._sides):
            raise Contradiction("a release cannot be applied inside reading(): it would wait for itself")
        if not release.resync and self._torn():
            raise TornTarget(f"version {release.version} cannot follow on {self._torn()}")
        # The one that is served comes last: readers have the other one by then.
        staged = [(side, side.copy.stage(release)) for side in self._by_service()[::-1]]
        for side, write in staged:
            side.write(write, release)
            if side is staged[0][0]:
                self._served = side

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Rows of a table, as `ReadableTarget` has it: where two copies differ, bytes that are in neither."""
        served, *others = (copy.read(table, ids) for copy in self.each)
        for other in others:
            served = None if served is None or other is None else _agreed(served, other)
        return served

    def _by_service(self) -> list[_Side[C, R]]:
        """The side that is served first."""
        return sorted(self._sides, key=lambda side: side is not self._served)

    def _torn(self) -> str | None:
        """What is wrong with a copy that is not whole at the version that is served."""
        sides = [side for side in self._sides if side.unfinished]
        behind = [side for side in self._sides if side.reading.position != self._served.reading.position]
        return next((side.state for side in (*sides, *behind)), None)


def _agreed(rows: Values, others: Values) -> Values:
    """Rows of two copies. Damage of either must show, and nobody can say which one is right."""
    bits, other_bits = (np.ascontiguousarray(each).view(np.uint8) for each in (rows, others))
    if np.array_equal(bits, other_bits):
        return rows
    low, high = np.minimum(bits, other_bits), np.maximum(bits, other_bits)
    neither = np.where(low > 0, 0, np.where(high > 1, 1, 2)).astype(np.uint8)
    agreed: Values = np.where(low == high, bits, neither).view(rows.dtype)
    return agreed
