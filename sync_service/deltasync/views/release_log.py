"""The rows of one release on their way to the log."""

from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.views.store import NewestRelease, ViewStore

# Pieces handed to the log and not yet on disk: what bounds the memory of a large release.
_UNWRITTEN_PIECES = 16


@dataclass(frozen=True)
class Piece:
    """Some encoded rows of the table in `slot`, the piece `index` of these."""

    slot: int
    index: int
    rows: RowBatch


class ReleaseLog:
    """Hands pieces to the log while others are still being drawn, as long as it keeps up; the rest at the end.

    Attributes:
        complete: the log has all pieces, and that there is a release of them.
    """

    def __init__(self, store: ViewStore, number: int) -> None:
        self._store = store
        self._number = number
        self.complete = False
        self._dropped: Future[None] | None = None
        self._pieces: list[Piece] = []
        self._logged: list[Future[None]] = []  # Of the first pieces, in their order.
        self._ended = 0  # So many of the first of these are done.

    def add(self, piece: Piece) -> None:
        """Take a piece. Waits for nothing: on the model's thread."""
        self._pieces.append(piece)
        while self._ended < len(self._logged) and self._logged[self._ended].done():
            self._ended += 1
        if not self._store.queue.full:
            self._hand_over(self._ended + _UNWRITTEN_PIECES)

    def settle(self, release: NewestRelease | None) -> tuple[list[Piece], list[Piece], StorageFailed | None]:
        """Wait until the log has all pieces, and that there is a release of them: those that it has, those that it
        refused, and why. Where there is any of the latter, the release is not written down. Blocks.

        Raises:
            StorageFailed: none of them is to be released.
        """
        written, refused, failure = list[Piece](), list[Piece](), None
        for number, piece in enumerate(self._pieces):
            self._hand_over(number + (1 if self._store.queue.full else _UNWRITTEN_PIECES))
            if release and not failure and len(self._logged) == len(self._pieces):
                # At once, so that the disk is waited for once.
                self._write_release(release)
                release = None
            if error := _failure_of(self._logged[number]):
                refused.append(piece)
                failure = error
            else:
                written.append(piece)
        if self._dropped:
            self._dropped.result()
        return written, refused, failure

    def _write_release(self, release: NewestRelease) -> None:
        """Try to write down that there is a release of all pieces."""
        with suppress(StorageFailed):  # Told by a piece, or when it is tried again.
            self._store.write_release(release, [*self._logged, *([self._dropped] if self._dropped else [])])
            self.complete = True

    def _hand_over(self, upto: int) -> None:
        """Hand the first `upto` pieces to the log, as far as they were not before."""
        if self._dropped is None:
            # What is there of one that broke off would be taken for rows of this one after a restart.
            self._dropped = self._store.drop(self._number)
        for piece in self._pieces[len(self._logged) : upto]:
            self._logged.append(self._store.append(self._number, piece.slot, piece.index, piece.rows))


def _failure_of(logged: Future[None]) -> StorageFailed | None:
    try:
        logged.result()
    except StorageFailed as error:
        return error
    return None
