"""The rows of one release on their way to the log."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.views.store import ViewStore

# Pieces handed to the log and not yet on disk: what bounds the memory of a large release.
_UNWRITTEN_PIECES = 16


@dataclass
class Piece:
    """Some encoded rows of the table in `slot`, the piece `index` of these."""

    slot: int
    index: int
    rows: RowBatch
    logged: Future[None] | None = None


class ReleaseLog:
    """Hands pieces to the log while others are still being drawn, as long as it keeps up; the rest at the end."""

    def __init__(self, store: ViewStore, number: int) -> None:
        self._store = store
        self._number = number
        self._dropped: Future[None] | None = None
        self._pieces: list[Piece] = []
        self._unwritten: deque[Future[None]] = deque()

    def add(self, piece: Piece) -> None:
        """Take a piece. Waits for nothing: on the model's thread."""
        self._pieces.append(piece)
        while self._unwritten and self._unwritten[0].done():
            self._unwritten.popleft()
        if len(self._unwritten) < _UNWRITTEN_PIECES:
            self._hand_over(piece)

    def settle(self) -> tuple[list[Piece], list[Piece], StorageFailed | None]:
        """Wait until the log has all pieces: those that it has, those that it refused, and why. Blocks.

        Raises:
            StorageFailed: none of them is to be released.
        """
        written, refused, failure = list[Piece](), list[Piece](), None
        for number, piece in enumerate(self._pieces):
            for ahead in self._pieces[number : number + _UNWRITTEN_PIECES]:
                if ahead.logged is None:
                    self._hand_over(ahead)
            if error := _failure_of(piece):
                refused.append(piece)
                failure = error
            else:
                written.append(piece)
        if self._dropped:
            self._dropped.result()
        return written, refused, failure

    def _hand_over(self, piece: Piece) -> None:
        if self._dropped is None:
            # What is there of one that broke off would be taken for rows of this one after a restart.
            self._dropped = self._store.drop(self._number)
        piece.logged = self._store.append(self._number, piece.slot, piece.index, piece.rows)
        self._unwritten.append(piece.logged)


def _failure_of(piece: Piece) -> StorageFailed | None:
    try:
        if piece.logged:
            piece.logged.result()
    except StorageFailed as error:
        return error
    return None
