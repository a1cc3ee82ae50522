"""Pins of a reader: the entry of a thread in the table of readers, which keeps a side from being written."""

import errno
import os
import weakref

import numpy as np

from deltasync.base.errors import LimitReached, ServiceUnavailable
from deltasync.client.shared import layout
from deltasync.client.shared.mapped_side import Folder
from deltasync.client.shared.memory import lock_byte
from deltasync.kernels.fences import fence


class Pin:
    """The entry of this thread in the table of readers.

    Attributes:
        is_taken: whether it pins a side.
    """

    def __init__(self, folder: Folder) -> None:
        self.is_taken = False
        try:
            self._fd = os.open(layout.READERS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        except OSError as error:
            folder.check()
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise folder.unusable(layout.READERS, error) from error
            raise ServiceUnavailable(
                f"{folder.path / layout.READERS} cannot be written ({error.strerror}), which reading a whole "
                "version needs: use lookups, or mount it writable"
            ) from error
        self.close = weakref.finalize(self, os.close, self._fd)
        _PINS.add(self)
        for number in range(layout.MOST_READERS):
            if lock_byte(self._fd, number):
                break
        else:
            raise LimitReached(f"{layout.MOST_READERS} threads read whole versions of this mirror already")
        self._offset = number * layout.READER.itemsize
        self._entry = np.zeros(1, layout.READER)
        self._entry["pid"] = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether it is of a process from which this one was forked."""
        return not self.close.alive

    def take(self, side: int) -> None:
        """Pin a side."""
        self.is_taken = True
        self._write(side + 1)
        fence()

    def release(self) -> None:
        """Release the pinned side, unless this process was forked in the meantime: the pin is not its own."""
        self.is_taken = False
        if not self.is_closed:
            self._write(0)

    def _write(self, side: int) -> None:
        self._entry["side"] = side
        os.pwrite(self._fd, self._entry.tobytes(), self._offset)


_PINS = weakref.WeakSet[Pin]()


def _close_pins() -> None:
    for each in list(_PINS):
        each.close()


# A pin ends with its process. Its lock would go on in a forked process that kept the descriptor.
os.register_at_fork(after_in_child=_close_pins)
