"""Room for tables on their volume: it is looked for before it is taken, and the log's is left alone.

A file whose blocks are reserved beyond what is free takes all there is before the system says no; until it is
removed again the log has none, and no cut of any model is acknowledged.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltasync.core.errors import StorageFailed
from deltasync.core.position import Decision
from deltasync.storage.volume import existing

# What tables leave of a volume to the log, and to what else the service writes there: at most, and as a share.
_KEPT_BYTES = 1 << 30
_KEPT_SHARE = 16


@dataclass(frozen=True)
class VolumeRoom:
    """What a volume has, bytes.

    Attributes:
        free: what the service's user may still take of it.
        total: of the whole volume.
    """

    free: int
    total: int

    @classmethod
    def of(cls, path: Path) -> "VolumeRoom":
        """That of a path, which need not be there yet. Blocks.

        Raises:
            OSError: the volume says nothing.
        """
        found = os.statvfs(existing(path))
        return cls(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def room_for(wanted: int, room: VolumeRoom, taking: int = 0) -> Decision:
    """Whether a volume has room for tables of so many bytes, where others are just `taking` some.

    A pure decision.
    """
    kept = min(_KEPT_BYTES, room.total // _KEPT_SHARE)
    said = (
        f"{wanted} bytes are wanted, and {room.free} are free on the volume, of which {kept} are kept for the log"
    )
    said += f" and {taking} are being taken" if taking else ""
    return Decision(wanted <= room.free - kept - taking, said)


class TableRoom:
    """Who is just taking room for tables, in this process. Any thread; what it does blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taking = 0

    def check(self, what: str, folder: Path, wanted: int) -> None:
        """Check that there is room in a folder for so many bytes of `what`.

        Raises:
            StorageFailed: there is not, and nothing was taken; the message has both numbers.
        """
        if wanted:
            decision = room_for(wanted, VolumeRoom.of(folder), self._taking)
            if not decision.yes:
                raise StorageFailed(f"no room for {what}: {decision.reason}: make room on {existing(folder)}")

    @contextmanager
    def taking(self, what: str, folder: Path, wanted: int) -> Iterator[None]:
        """While the block takes so many bytes, which nobody else is promised meanwhile.

        Raises:
            StorageFailed: there is no room, and nothing was taken.
        """
        with self._lock:
            self.check(what, folder, wanted)
            self._taking += wanted
        try:
            yield
        finally:
            with self._lock:
                self._taking -= wanted


ROOM = TableRoom()
