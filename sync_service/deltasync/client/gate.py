"""Readers side by side, or one writer: in turns, so that neither waits for long on the other's account."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltasync.client.forks import Home
from deltasync.core.errors import Contradiction

logger = logging.getLogger(__name__)

# After so long a writer says for whom it waits.
_PATIENCE_SECONDS = 10.0


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
