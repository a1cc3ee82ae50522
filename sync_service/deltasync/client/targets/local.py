"""Base of targets in this process, which write while readers wait, or into a second copy."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.client.connection import ForkGuard
from deltasync.client.targets.target import Reading, Reads, Release, TornTarget, Written, reading_fields
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

logger = logging.getLogger(__name__)
_FIRST_COPY = "part of a first copy"
_REMEDY = "Start a new subscriber without `held`: it receives everything and repairs the target"
C = TypeVar("C", bound="Copy")
R = TypeVar("R", bound=Reading)


class LocalTarget(Generic[C, R]):
    """Base class of targets whose rows are read in this process, always at one version.

    With one copy, readers wait while a release is written. With two copies, the target writes a release into the
    copy that has no readers, serves that copy, and writes the other one when its readers have left.

    Attributes:
        reads: "pause": one copy; readers wait while a release is written. "copies": two copies; no reader waits.
    """

    def __init__(self, reads: Reads, sides: "Sequence[Side[C, R]]") -> None:
        """Use these copies; the first one is served first."""
        self.reads = reads
        self._sides = sides
        self._served = sides[0]

    @contextmanager
    def reading(self) -> Iterator[R]:
        """The rows and their version. No release is written into them while the block runs.

        Several threads may read at the same time, and blocks may be nested. Do not use the rows after the block.

        Raises:
            TornTarget: a release was only partly written, or a first copy is still arriving.
            Contradiction: this thread is applying a release.
        """
        while True:
            # A nested `reading` must see the version of the outer one, even if a newer one is served.
            outer = next((side for side in self._sides if side.gate.reads_here()), None)
            side = outer or self._served
            with side.gate.reading():
                if side is outer or side is self._served:
                    side.check()
                    yield side.reading
                    return
            # The copies were swapped before this thread got in: try again.

    def begin_at(self, position: Position) -> None:
        """Note the position of the rows that this target has had since before its first release."""
        for side in self._sides:
            if side.reading.step is None:
                side.reading = replace(side.reading, position=position)

    @property
    def position(self) -> Position:
        """The position to continue from: the last release's, or an empty one if that was only partly written."""
        return Position() if self._torn() else self._served.reading.position

    @property
    def takes_parts(self) -> bool:
        """Whether to write a first copy as it arrives. With `reads="copies"` old rows stay readable instead."""
        return self.reads == "pause" and not self.position.number

    def newest(self) -> Reading:
        """The version of the rows that readers get, without waiting for a release. Read rows with `reading`."""
        return self._served.reading

    @property
    def event_time_unix_ns(self) -> int | None:
        """See `Reading`."""
        return self._served.reading.event_time_unix_ns

    def apply(self, release: Release) -> Written | None:
        """Write a release. If this raises one of the errors below, nothing was written.

        Returns:
            The digests of the written rows in memory; None if they must be read back, for example because two
            copies differ.

        Raises:
            Contradiction: the consumer's mode is `ids`, this thread is inside `reading()`, or rows contradict each
                other.
            TornTarget: an earlier release was only partly written, and this one does not replace everything.
        """
        release.check_values()
        if any(side.gate.reads_here() for side in self._sides):
            raise Contradiction("a release cannot be applied inside reading(), because it would wait for itself")
        if not release.resync and self._torn():
            raise TornTarget(f"version {release.version} cannot be applied to {self._torn()}")
        # The served copy comes last, when readers already use the other one.
        staged = [(side, side.copy.stage(release)) for side in self._served_first[::-1]]
        written = list[Written | None]()
        for side, write in staged:
            written.append(side.write(write, release))
            if side is staged[0][0]:
                self._serve(side)
        first, *others = written
        return first if first and all(map(first.same_as, others)) else None

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Rows of a table by number, see `ReadableTarget`.

        If two copies have different rows, the result differs from both, so that checksums show the damage.
        """
        served, *others = (copy.read(table, ids) for copy in self._copies)
        for other in others:
            served = None if served is None or other is None else _agreed(served, other)
        return served

    def _serve(self, side: "Side[C, R]") -> None:
        """Let readers use this copy from now on."""
        self._served = side

    @property
    def _copies(self) -> list[C]:
        """All copies, the served one first. Only the subscriber's thread may use the others."""
        return [side.copy for side in self._served_first]

    @property
    def _served_first(self) -> "list[Side[C, R]]":
        return sorted(self._sides, key=lambda side: side is not self._served)

    def _torn(self) -> str | None:
        """The state of a copy that is not complete at the served version; None if all are."""
        sides = [side for side in self._sides if side.unfinished]
        behind = [side for side in self._sides if side.reading.position != self._served.reading.position]
        return next((side.state for side in (*sides, *behind)), None)


class Copy(Protocol):
    """One copy of a target's tables."""

    def stage(self, release: Release) -> Callable[[], Written | None]:
        """Prepare a release while readers continue; returns a quick function that writes it."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `ReadableTarget`."""


def _agreed(rows: Values, others: Values) -> Values:
    """The rows of two copies; where they differ, bytes that differ from both."""
    bits, other_bits = (np.ascontiguousarray(each).view(np.uint8) for each in (rows, others))
    if np.array_equal(bits, other_bits):
        return rows
    low, high = np.minimum(bits, other_bits), np.maximum(bits, other_bits)
    neither = np.where(low > 0, 0, np.where(high > 1, 1, 2)).astype(np.uint8)
    agreed: Values = np.where(low == high, bits, neither).view(rows.dtype)
    return agreed


class Side(Generic[C, R]):
    """A copy with its gate for readers and writers, and the object for its readers.

    `unfinished` describes a release that is being written or was only partly written.
    """

    def __init__(self, copy: C, reading: R) -> None:
        self.copy = copy
        self.reading = reading
        self.gate = Gate()
        self.unfinished = ""

    def write(self, write: Callable[[], Written | None], release: Release) -> Written | None:
        """Write a release that `Copy.stage` has prepared, while readers wait."""
        with self.gate.writing():
            self.unfinished = _FIRST_COPY if release.more else f"part of version {release.version}"
            written = write()
            if release.more:
                return written
            self.reading = replace(self.reading, **reading_fields(release))
            self.unfinished = ""
            return written

    @property
    def state(self) -> str:
        """The content of the copy, for errors."""
        if self.unfinished == _FIRST_COPY:
            return (
                f"{_FIRST_COPY}, which is still arriving or was interrupted: wait until the subscriber is ready, "
                "or start another one"
            )
        begun = f" and {self.unfinished}" if self.unfinished else ""
        return f"rows of version {self.reading.version}{begun}: a release was only partly written. {_REMEDY}"

    def check(self) -> None:
        """Raise TornTarget if a release was only partly written."""
        if self.unfinished:
            raise TornTarget(f"the target has {self.state}")


class Gate:
    """A lock for readers and writers, in the order of `LockOrder`.

    After waiting `patience_seconds`, a writer logs the names of the readers' threads.
    """

    def __init__(self, patience_seconds: float = 10.0) -> None:
        self._patience_seconds = patience_seconds
        self._turns = LockOrder()
        # After a fork, no thread would release locks and turns of the parent's other threads.
        self._fork_guard = ForkGuard("a target")
        # Garbage collection may end an abandoned reading at any point of this thread, even while it has the lock.
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep writers out. Blocks may be nested, and may end in another thread."""
        self._fork_guard.check()
        who = threading.get_ident()
        with self._lock:
            if self._turns.writer == who:
                raise Contradiction("reading() in a thread that applies a release would wait for itself")
            self._acquire(who, self._turns.read)
        try:
            yield
        finally:
            self._leave(who)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep all others out."""
        self._fork_guard.check()
        who = threading.get_ident()
        with self._lock:
            if self._turns.inside(who):
                raise Contradiction(
                    "a release cannot be applied inside reading() or apply(), because it would wait for itself"
                )
            self._acquire(who, self._turns.write, self._patience_seconds)
        try:
            yield
        finally:
            self._leave(who)

    def reads_here(self) -> bool:
        """Whether this thread is a reader."""
        return threading.get_ident() in self._turns.readers

    def _acquire(self, who: int, comes: Callable[[int], bool], patience: float | None = None) -> None:
        if comes(who):
            return
        try:
            if not self._moved.wait_for(lambda: self._turns.inside(who), patience):
                self._tell_of_readers()
                self._moved.wait_for(lambda: self._turns.inside(who))
        except BaseException:  # If this thread is interrupted, others must not wait for its turn.
            self._turns.withdraw(who)
            self._moved.notify_all()
            raise

    def _tell_of_readers(self) -> None:
        names = {each.ident: each.name for each in threading.enumerate()}
        readers = [names.get(who, "a thread that has ended") for who in self._turns.readers]
        self._lock.release()  # A log handler may itself enter or leave `reading`.
        try:
            text = "a release has waited %g s for readers to leave reading(), and still waits; their threads: %s"
            logger.warning(text, self._patience_seconds, ", ".join(readers))
        finally:
            self._lock.acquire()

    def _leave(self, who: int) -> None:
        if self._fork_guard.left:  # A thread that the fork has not copied may have the lock.
            return
        with self._lock:
            self._turns.leave(who)
            self._moved.notify_all()


class LockOrder:
    """The order in which readers and writers enter a `Gate`, without threads.

    Readers and writers take turns. A reader enters at once unless a writer is inside or waits. When a writer
    leaves, all waiting readers enter together. Writers enter in order of arrival, each after at most one turn of
    readers. A reader that is inside may always enter again, because it keeps writers out anyway.
    """

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}
        self.writer: int | None = None
        self._waiting_readers: set[int] = set()
        self._waiting_writers: deque[int] = deque()

    def read(self, who: int) -> bool:
        """Add a reader; returns whether it is inside now. Otherwise it waits."""
        if who in self.readers or (self.writer is None and not self._waiting_writers):
            self.readers[who] = self.readers.get(who, 0) + 1
            return True
        self._waiting_readers.add(who)
        return False

    def write(self, who: int) -> bool:
        """Add a writer; returns whether it is inside now. Otherwise it waits."""
        self._waiting_writers.append(who)
        self._next_writer()
        return self.writer == who

    def inside(self, who: int) -> bool:
        """Whether a thread is inside."""
        return who == self.writer or who in self.readers

    def leave(self, who: int) -> None:
        """Remove a thread that is inside."""
        if who == self.writer:
            self.writer = None
            self._all_readers()
        elif self.readers[who] > 1:
            self.readers[who] -= 1
        else:
            del self.readers[who]
        self._next_writer()

    def withdraw(self, who: int) -> None:
        """Remove a waiting thread, even if it has entered meanwhile."""
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
