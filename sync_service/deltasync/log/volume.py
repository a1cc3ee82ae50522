"""Whether a volume accepts writes: the refused write, its reason, time and remedy if it does not."""

import errno
import os
import resource
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from deltasync.base.errors import StorageFailed
from deltasync.base.files import advice

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# LMDB reports a write that was cut short as an input/output error; less than this may be free at that time.
_SLACK_BYTES = 1 << 20
# Size of the write that `probe` tries. For larger writes it only compares the free room.
_PROBE_BYTES = 1 << 16


class Volume:
    """A folder on some volume. Safe to use from any thread.

    Attributes:
        name: its name in metrics and messages.
        folder: the folder, which may not exist yet.
        refusal: the largest write refused since the volume last took one, or a refusal with its own remedy; None
            if the volume takes writes. It is replaced, never changed.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.refusal: Refusal | None = None
        self._lock = threading.Lock()

    @property
    def trouble(self) -> str:
        """The problem with its remedy; empty if there is none."""
        refusal = self.refusal
        return f"{refusal.path} on volume {self.name!r}: {refusal.in_words}" if refusal else ""

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the service's user may still write; None if unknown."""
        return _free_bytes(self.folder)

    def refuse(self, refusal: "Refusal") -> None:
        """Note a refused write."""
        with self._lock:
            before = self.refusal
            if before is None:
                self.refusal = refusal
            elif refusal.remedy or (not before.remedy and refusal.needed_bytes > before.needed_bytes):
                self.refusal = replace(refusal, since_unix_ns=before.since_unix_ns)

    def take(self, size: int) -> None:
        """Note that the volume took a write of `size` bytes.

        This does not end a lack of room, because the write may have used space that its file already owned. Only
        `probe` ends that.
        """
        refusal = self.refusal
        if refusal and refusal.number not in _NO_ROOM and size >= refusal.needed_bytes:
            self.recover(refusal)

    def recover(self, refusal: "Refusal") -> None:
        """Note that the volume takes a write again that it had refused."""
        with self._lock:
            if self.refusal is refusal:
                self.refusal = None

    def has_file(self, path: Path) -> bool:
        """Whether a path is in this folder."""
        return path.is_relative_to(self.folder)

    def probe(self, refusal: "Refusal") -> bool:
        """Whether the volume would now take the write that it refused. Blocks."""
        if refusal.number in _NO_ROOM and _free_bytes(self.folder) < refusal.needed_bytes + _SLACK_BYTES:
            return False
        end = refusal.path.stat().st_size if refusal.path.is_file() else 0
        try:
            with tempfile.TemporaryFile(dir=existing(self.folder), buffering=0) as file:
                os.ftruncate(file.fileno(), end + refusal.needed_bytes)  # Fails above the limit on file size.
                os.pwrite(file.fileno(), bytes(_PROBE_BYTES), 0)
                os.fsync(file.fileno())
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A write that a volume refused.

    Attributes:
        path: the file or the folder.
        number: the system's error number; 0 if there is none.
        reason: the error of the system or of the log.
        needed_bytes: size of the write; 0 if unknown.
        free_bytes: free room on the volume.
        since_unix_ns: time of the first refusal, nanoseconds since 1970.
        remedy: what to do; empty to derive it from the number.
    """

    path: Path
    number: int
    reason: str
    needed_bytes: int
    free_bytes: int
    since_unix_ns: int
    remedy: str = ""

    @property
    def in_words(self) -> str:
        """The reason, the room and the remedy."""
        needed = f"the write needs {self.needed_bytes} bytes, " if self.needed_bytes else ""
        room = f"{needed}{self.free_bytes} {'' if needed else 'bytes '}are free"
        return f"{self.reason} ({room}): {self.remedy or advice(self.number)}"


class VolumeFailed(StorageFailed):
    """A volume refused a write. Later writes are still tried."""

    def __init__(self, what: str, refusal: Refusal) -> None:
        super().__init__(f"{what}: {refusal.in_words}")
        self.refusal = refusal


def is_refusal(error: Exception) -> bool:
    """Whether an error of LMDB or of the system means that a volume refused a write."""
    return isinstance(error, OSError) or _number_of(error) != 0


def refused(what: str, path: Path, error: Exception, needed_bytes: int = 0) -> VolumeFailed:
    """The error for a refused write of `needed_bytes` to a path; `what` the service cannot do, in words."""
    free, number = _free_bytes(path), _number_of(error)
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number == errno.EIO and (cause := _cause(path, needed_bytes, free)):
        number, reason = cause, f"{os.strerror(cause)}, reported as {reason!r}"
    return VolumeFailed(
        what,
        Refusal(
            path=path,
            number=number,
            reason=reason,
            needed_bytes=needed_bytes,
            free_bytes=free,
            since_unix_ns=time.time_ns(),
        ),
    )


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if each.exists())


def _free_bytes(path: Path) -> int:
    try:
        volume = os.statvfs(existing(path))
    except OSError:  # The device is gone.
        return 0
    return volume.f_bavail * volume.f_frsize


def _cause(path: Path, needed_bytes: int, free_bytes: int) -> int:
    """The likely error of a write that was cut short, which LMDB reports as EIO; 0 if there is none."""
    if free_bytes < needed_bytes + _SLACK_BYTES:
        return errno.ENOSPC
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    end = (path.stat().st_size if path.is_file() else 0) + needed_bytes
    return errno.EFBIG if most != resource.RLIM_INFINITY and end > most else 0


def _number_of(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    text = str(error)  # LMDB gives words only. EINVAL and EAGAIN come from wrong calls, not from a volume.
    numbers = errno.errorcode.keys() - {errno.EINVAL, errno.EAGAIN}
    return next((number for number in numbers if text.endswith(os.strerror(number))), 0)
