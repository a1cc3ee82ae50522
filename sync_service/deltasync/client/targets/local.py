"""Targets in this process: rows are written in a pause of the readers, or into a second copy."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.client.connection import Home
from deltasync.client.targets.target import Reading, Reads, Release, TornTarget, Written
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

logger = logging.getLogger(__name__)
# After so long a writer says for whom it waits.
_PATIENCE_SECONDS = 10.0
_FIRST_COPY = "some of a first copy"
_REMEDY = "Start a subscriber that holds nothing: it is sent everything, and the target is whole again"
C = TypeVar("C", bound="Copy")
R = TypeVar("R", bound=Reading)


class LocalTarget(Generic[C, R]):
    """A target whose rows are read in this process, all of one version.

    With one copy, readers wait while a release is written. With two, a release is first written into the copy that
    is not served. That one is served from then on, and the other one is written once its readers have left.

    Attributes:
        reads: "pause": readers wait while a release is written. "copies": everything is there twice, and no reader
            waits.
    """

    def __init__(self, reads: Reads, copies: Sequence[tuple[C, R]]) -> None:
        """Keep these copies, as many as the way of reading needs, each with what its readers get."""
        self.reads = reads
        self._sides = [_Side(copy, reading) for copy, reading in copies]
        self._served = self._sides[0]

    @contextmanager
    def reading(self) -> Iterator[R]:
        """What is held and of which version it is, with no release written into it while the block runs.

        Several threads may be inside, each of them more than once. Nothing of it is to be used after the block.

        Raises:
            TornTarget: a release was not written to its end, or a first copy is still arriving.
            Contradiction: this thread is applying a release.
        """
        while True:
            # A nested reading() sees the same version, whatever is served by then.
            outer = next((side for side in self._sides if side.gate.reads_here()), None)
            side = outer or self._served
            with side.gate.reading():
                if side is outer or side is self._served:
                    side.check()
                    yield side.reading
                    return
            # The copies were swapped before this thread was inside.

    @property
    def position(self) -> Position:
        """The one to go on from: of the last release, or an empty one where that was not written to its end."""
        return Position() if self._torn() else self._served.reading.position

    @property
    def takes_parts(self) -> bool:
        """Whether a first copy is written as it arrives. With `reads="copies"` what is there stays served."""
        return self.reads == "pause" and not self.position.number

    @property
    def event_time_unix_ns(self) -> int | None:
        """As in a `Reading`."""
        return self._served.reading.event_time_unix_ns

    def apply(self, release: Release) -> Written | None:
        """Write a release: all of it, or nothing where one of these is raised.

        Returns:
            The digests of the rows as they then lie in memory; None if only `read` can tell, as where two copies
            differ.

        Raises:
            Contradiction: the consumer streams ids only, this thread is inside `reading()`, or rows contradict
                each other.
            TornTarget: a release before was not written to its end, and this one does not bring everything.
        """
        release.check_values()
        if any(side.gate.reads_here() for side in self._sides):
            raise Contradiction("a release cannot be applied inside reading(): it would wait for itself")
        if not release.resync and self._torn():
            raise TornTarget(f"version {release.version} cannot follow on {self._torn()}")
        # The served copy comes last: its readers have the other one by then.
        staged = [(side, side.copy.stage(release)) for side in self._served_first[::-1]]
        written = list[Written | None]()
        for side, write in staged:
            written.append(side.write(write, release))
            if side is staged[0][0]:
                self._served = side
        first, *others = written
        return first if first and all(map(first.same_as, others)) else None

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table by number, as `ReadableTarget` has it.

        Where two copies hold different rows, it is what neither of them holds.
        """
        served, *others = (copy.read(table, ids) for copy in self._copies)
        for other in others:
            served = None if served is None or other is None else _agreed(served, other)
        return served

    @property
    def _copies(self) -> list[C]:
        """All copies, the served one first. They are for the subscriber's thread, but for the first one."""
        return [side.copy for side in self._served_first]

    @property
    def _served_first(self) -> "list[_Side[C, R]]":
        return sorted(self._sides, key=lambda side: side is not self._served)

    def _torn(self) -> str | None:
        """What is wrong with a copy that is not whole at the version that is served."""
        sides = [side for side in self._sides if side.unfinished]
        behind = [side for side in self._sides if side.reading.position != self._served.reading.position]
        return next((side.state for side in (*sides, *behind)), None)


class Copy(Protocol):
    """The tables of a target, once."""

    def stage(self, release: Release) -> Callable[[], Written | None]:
        """Prepare a release while others read, and return a quick function that writes it."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `ReadableTarget`."""


def _agreed(rows: Values, others: Values) -> Values:
    """Rows of two copies. Damage of either must show, and nobody can say which one is right."""
    bits, other_bits = (np.ascontiguousarray(each).view(np.uint8) for each in (rows, others))
    if np.array_equal(bits, other_bits):
        return rows
    low, high = np.minimum(bits, other_bits), np.maximum(bits, other_bits)
    neither = np.where(low > 0, 0, np.where(high > 1, 1, 2)).astype(np.uint8)
    agreed: Values = np.where(low == high, bits, neither).view(rows.dtype)
    return agreed


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

    def write(self, write: Callable[[], Written | None], release: Release) -> Written | None:
        with self.gate.writing():
            self.unfinished = _FIRST_COPY if release.more else f"some of version {release.version}"
            written = write()
            if release.more:
                return written
            self.reading = replace(
                self.reading,
                position=release.position,
                version=release.version,
                step=release.step,
                step_end_unix_ns=release.step_end_unix_ns,
                event_time_unix_ns=release.event_time_unix_ns,
            )
            self.unfinished = ""
            return written

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


class Gate:
    """What `Turns` decides, for threads."""

    def __init__(self) -> None:
        self._turns = Turns()
        # The lock, or the turn, of a thread that a fork has not copied would never be given back.
        self._home = Home("a target")
        # Garbage collection may end a reading that nobody ended, wherever this thread is: within the lock, too.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, nobody writes. It may be nested in one thread, and left in another.

        Raises:
            Contradiction: this thread writes.
            ServiceUnavailable: this process was forked since the gate was made.
        """
        self._home.check()
        who = threading.get_ident()
        with self._lock:
            if self._turns.writer == who:
                raise Contradiction("reading() while this thread applies a release: it would wait for itself")
            self._come(who, self._turns.read)
        try:
            yield
        finally:
            self._leave(who)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, nobody else reads or writes.

        Raises:
            Contradiction: this thread reads, or writes already.
            ServiceUnavailable: this process was forked since the gate was made.
        """
        self._home.check()
        who = threading.get_ident()
        with self._lock:
            if self._turns.inside(who):
                raise Contradiction(
                    "a release cannot be applied inside reading(), nor inside apply(): it would wait for itself"
                )
            self._come(who, self._turns.write, _PATIENCE_SECONDS)
        try:
            yield
        finally:
            self._leave(who)

    def reads_here(self) -> bool:
        """Whether this thread reads."""
        return threading.get_ident() in self._turns.readers

    def _come(self, who: int, comes: Callable[[int], bool], patience: float | None = None) -> None:
        if comes(who):
            return
        try:
            if not self._moved.wait_for(lambda: self._turns.inside(who), patience):
                self._tell_of_readers()
                self._moved.wait_for(lambda: self._turns.inside(who))
        except BaseException:  # Interrupted; others must not wait for who never comes.
            self._turns.withdraw(who)
            self._moved.notify_all()
            raise

    def _tell_of_readers(self) -> None:
        names = {each.ident: each.name for each in threading.enumerate()}
        readers = [names.get(who, "a thread that has ended") for who in self._turns.readers]
        self._lock.release()  # Who logs, or is logging just now, may have to go in or out.
        try:
            text = "a release has waited %g s for readers to leave reading(), and waits on: they came in from %s"
            logger.warning(text, _PATIENCE_SECONDS, ", ".join(readers))
        finally:
            self._lock.acquire()

    def _leave(self, who: int) -> None:
        if self._home.left:  # The lock may be that of a thread which was not copied.
            return
        with self._lock:
            self._turns.leave(who)
            self._moved.notify_all()


class Turns:
    """Who is inside, who waits, and who goes next: the decisions of a `Gate`, without threads.

    Readers and writers take turns. A reader goes in at once unless a writer is inside or waits; where one does, it
    waits for one writer at most: once that has left, all readers that wait go in together. Writers go in the order
    in which they came, each after one turn of readers at most. Whoever reads already may read once more: its first
    reading keeps writers out anyway.

    Attributes:
        readers: those inside, and how often each has come in.
        writer: the one inside.
    """

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}
        self.writer: int | None = None
        self._waiting_readers: set[int] = set()
        self._waiting_writers: deque[int] = deque()

    def read(self, who: int) -> bool:
        """A reader comes: whether it is inside now; else it waits."""
        if who in self.readers or (self.writer is None and not self._waiting_writers):
            self.readers[who] = self.readers.get(who, 0) + 1
            return True
        self._waiting_readers.add(who)
        return False

    def write(self, who: int) -> bool:
        """A writer comes: whether it is inside now; else it waits."""
        self._waiting_writers.append(who)
        self._next_writer()
        return self.writer == who

    def inside(self, who: int) -> bool:
        """Whether somebody who waited has been let in."""
        return who == self.writer or who in self.readers

    def leave(self, who: int) -> None:
        """Somebody goes, who was inside."""
        if who == self.writer:
            self.writer = None
            self._all_readers()
        elif self.readers[who] > 1:
            self.readers[who] -= 1
        else:
            del self.readers[who]
        self._next_writer()

    def withdraw(self, who: int) -> None:
        """Somebody who waited does not want to go in any more; it may be inside by now."""
        if self.inside(who):
            self.leave(who)
        elif who in self._waiting_readers:
            self._waiting_readers.remove(who)
        else:
            self._waiting_writers.remove(who)
            if self.writer is None and not self._waiting_writers:
                self._all_readers()

    def _all_readers(self) -> None:
        self.readers.update(dict.fromkeys(self._waiting_readers, 1))
        self._waiting_readers.clear()

    def _next_writer(self) -> None:
        if self._waiting_writers and self.writer is None and not self.readers:
            self.writer = self._waiting_writers.popleft()
