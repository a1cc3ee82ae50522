"""Having a replica read again all rows that it holds.

Asked and answered are numbers that only grow, and do not come again: not after a restart either, nor where another
process has the model.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from deltasync.core.errors import DeltasyncError
from deltasync.core.signals import Signal
from deltasync.core.verified import VerifiedTable

# Questions are counted from a random number of so many bits on: a replica may remember those of another process.
_BITS = 62


@dataclass(frozen=True)
class Verified:
    """What a replica has found.

    Attributes:
        version: the model's, of which what it holds was made.
        tables: those that its consumer follows.
    """

    version: int
    tables: Sequence[VerifiedTable]


class Verification:
    """Of one replica, whichever stream it has. Used in the event loop.

    Attributes:
        signal: wakes when something was asked, when some more rows were read, and when it was answered.
        rows: that were read so far, and that there are.
    """

    def __init__(self) -> None:
        self.signal = Signal()
        self._asked = self._answered = secrets.randbits(_BITS)
        self._found: Verified | DeltasyncError | None = None
        self.rows = (0, 0)

    def ask(self) -> int:
        """Ask for rows to be read again from now on; the number of the question."""
        self._asked += 1
        self.rows = (0, 0)
        self.signal.wake()
        return self._asked

    @property
    def open(self) -> int:
        """The number of the last question, as long as it is not answered; else 0."""
        return self._asked if self._asked > self._answered else 0

    def note(self, read: int, rows: int) -> None:
        """So many of so many rows were read."""
        self.rows = (read, rows)
        self.signal.wake()

    def answer(self, number: int, found: Verified | DeltasyncError) -> None:
        """Answer a question, and all before it."""
        if number > self._answered:
            self._answered, self._found = number, found
            self.signal.wake()

    def answer_to(self, number: int) -> Verified | None:
        """The answer to a question, if there is one.

        Raises:
            DeltasyncError: it could not be answered.
        """
        if self._answered < number:
            return None
        if isinstance(self._found, DeltasyncError):
            raise self._found
        return self._found
