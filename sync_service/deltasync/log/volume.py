"""Whether a volume takes what is written to it: what it has refused, why, since when, and what to do."""

import errno
import os
import resource
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from deltasync.base.errors import StorageFailed

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    errno.ENOSPC: "make room on it",
    errno.EDQUOT: "raise the quota of the service's user, or make room",
    errno.EFBIG: "raise the largest size of a file (ulimit -f), or use a file system that takes larger ones",
    errno.EROFS: "find out why it is mounted read-only, and mount it for writing",
    errno.EACCES: "let the service's user write to it",
    errno.EPERM: "let the service's user write to it",
    errno.EIO: "look for the device's errors in the system's log, and mend it; nothing that was acknowledged is "
    "lost",
    errno.EMFILE: "raise the number of files that the service may have open (ulimit -n), and restart it",
    errno.ENFILE: "raise the number of files that the system may have open (fs.file-max)",
    errno.EEXIST: "move away what has its name",
    errno.EISDIR: "move away what has its name",
    errno.ENOTDIR: "move away what has its name",
}
_OTHERWISE = "look for its errors in the system's log"
# LMDB calls what was written in part an input/output error: so much may be left then.
_SLACK_BYTES = 1 << 20
# What is written to see whether it can be; of more it is only asked whether there is room.
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What a volume has refused to take.

    Attributes:
        path: the file or the folder.
        number: the system's number of the error; 0 where it said none.
        reason: what the system, or the log, said.
        needed_bytes: that were to be written; 0 where that is not known.
        free_bytes: that the volume had left.
        since_unix_ns: when that was, nanoseconds since 1970.
        remedy: what to do; empty where the number says that.
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
        """What was refused, why, and what to do."""
        needed = f"{self.needed_bytes} bytes were to be written, " if self.needed_bytes else ""
        room = f"{needed}{self.free_bytes} {'' if needed else 'bytes '}are free"
        return f"{self.reason} ({room}): {self.remedy or _ADVICE.get(self.number, _OTHERWISE)}"


class VolumeFailed(StorageFailed):
    """A volume has refused a write; the next one is tried all the same."""

    def __init__(self, what: str, refusal: Refusal) -> None:
        super().__init__(f"{what}: {refusal.in_words}")
        self.refusal = refusal


def is_refusal(error: Exception) -> bool:
    """Whether an error of LMDB, or of the system, says that a volume has refused something."""
    return isinstance(error, OSError) or _number_of(error) != 0


def refused(what: str, path: Path, error: Exception, needed_bytes: int = 0) -> VolumeFailed:
    """The error that a write was refused.

    Args:
        what: what cannot be done, in words.
        path: the file or the folder that was written to.
        error: what was raised.
        needed_bytes: that were to be written.
    """
    free, number = _free_bytes(path), _number_of(error)
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number == errno.EIO and (cause := _cause(path, needed_bytes, free)):
        number, reason = cause, f"{os.strerror(cause)}, told as {reason!r}"
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


class Volume:
    """A folder on some volume. Any thread.

    Attributes:
        name: by which metrics and messages call it.
        folder: the folder; it need not be there yet.
        refusal: the largest write that was refused since it last took what it was given, or one with a remedy of
            its own; None if it takes what it is given. Replaced whole.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.refusal: Refusal | None = None
        self._lock = threading.Lock()

    @property
    def trouble(self) -> str:
        """What is wrong with it, and what to do; empty if nothing is."""
        refusal = self.refusal
        return f"{refusal.path} on volume {self.name!r}: {refusal.in_words}" if refusal else ""

    @property
    def free_bytes(self) -> int | None:
        """What it has left for the service's user; None if it does not say that."""
        return _free_bytes(self.folder)

    def refuse(self, refusal: Refusal) -> None:
        """Note that it has refused a write: the largest since it last took what it was given, or one with a remedy
        of its own.
        """
        with self._lock:
            before = self.refusal
            if before is None:
                self.refusal = refusal
            elif refusal.remedy or (not before.remedy and refusal.needed_bytes > before.needed_bytes):
                self.refusal = replace(refusal, since_unix_ns=before.since_unix_ns)

    def take(self, size: int) -> None:
        """Note that it has taken a write of so many bytes.

        That a file has room of its own does not show that the volume has: where it had none, `probe` finds out.
        """
        refusal = self.refusal
        if refusal and refusal.number not in _NO_ROOM and size >= refusal.needed_bytes:
            self.recover(refusal)

    def recover(self, refusal: Refusal) -> None:
        """Note that it takes again what it had refused."""
        with self._lock:
            if self.refusal is refusal:
                self.refusal = None

    def has_file(self, path: Path) -> bool:
        """Whether a path is in its folder."""
        return path.is_relative_to(self.folder)

    def probe(self, refusal: Refusal) -> bool:
        """Whether it would take now what it has refused. Blocks."""
        if refusal.number in _NO_ROOM and _free_bytes(self.folder) < refusal.needed_bytes + _SLACK_BYTES:
            return False
        try:
            self._write(refusal)
        except OSError:
            return False
        return True

    def _write(self, refusal: Refusal) -> None:
        path = refusal.path
        end = path.stat().st_size if path.is_file() else 0
        with tempfile.TemporaryFile(dir=existing(self.folder), buffering=0) as file:
            os.ftruncate(file.fileno(), end + refusal.needed_bytes)  # Whether a file may be as large.
            os.pwrite(file.fileno(), bytes(_PROBE_BYTES), 0)
            os.fsync(file.fileno())


def existing(path: Path) -> Path:
    """The path, or the first above it that is there."""
    return next(each for each in (path, *path.parents) if each.exists())


def _free_bytes(path: Path) -> int:
    try:
        found = os.statvfs(existing(path))
    except OSError:  # A device that is gone says nothing any more.
        return 0
    return found.f_bavail * found.f_frsize


def _cause(path: Path, needed_bytes: int, free_bytes: int) -> int:
    """What may have cut a write short, which is then called an input/output error; 0 if nothing is known."""
    if free_bytes < needed_bytes + _SLACK_BYTES:
        return errno.ENOSPC
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    end = (path.stat().st_size if path.is_file() else 0) + needed_bytes
    return errno.EFBIG if most != resource.RLIM_INFINITY and end > most else 0


def _number_of(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    text = str(error)  # LMDB says it in words only. These two are said of calls, not of a volume.
    numbers = errno.errorcode.keys() - {errno.EINVAL, errno.EAGAIN}
    return next((number for number in numbers if text.endswith(os.strerror(number))), 0)
