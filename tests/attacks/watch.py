"""What a process takes, as Linux counts it."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_EVERY_SECONDS = 0.05


@dataclass(frozen=True)
class Usage:
    """What a service has at one time.

    Attributes:
        memory: resident bytes, without pages of files that it maps.
        disk: bytes of its files.
        threads: their number.
        descriptors: files and sockets that it has open.
        lines: of its log.
        log: bytes of its log.
    """

    memory: int = 0
    disk: int = 0
    threads: int = 0
    descriptors: int = 0
    lines: int = 0
    log: int = 0

    def most(self, other: "Usage") -> "Usage":
        return Usage(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})

    def more(self, later: "Usage", spare: "Usage") -> list[str]:
        """What there is more of later, by more than what is to spare; lines of the log do not count."""
        kinds = ("memory", "disk", "threads", "descriptors")
        return [name for name in kinds if getattr(later, name) > getattr(self, name) + getattr(spare, name)]


class Watch:
    """Looks at a service every now and then, while the block runs."""

    def __init__(self, pid: int, data_dir: Path, log: Path) -> None:
        self._pid, self._data_dir, self._log = pid, data_dir, log
        self._read, self._counted = 0, 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.most = Usage()

    def look(self) -> Usage:
        with self._lock:
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{self._pid}/status").read_text().splitlines()
            )
            now = Usage(
                memory=int(status["RssAnon"].split()[0]) * 1024,
                disk=_size(self._data_dir),
                threads=int(status["Threads"]),
                descriptors=len(os.listdir(f"/proc/{self._pid}/fd")),
                lines=self._lines(),
                log=self._read,
            )
            self.most = self.most.most(now)
            return now

    def anew(self) -> Usage:
        """Forget what there was, and look."""
        self.most = Usage()
        return self.look()

    def _lines(self) -> int:
        with self._log.open("rb") as log:
            log.seek(self._read)
            while piece := log.read(1 << 20):
                self._counted += piece.count(b"\n")
                self._read += len(piece)
        return self._counted

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            try:
                self.look()
            except OSError:
                return  # The service is gone, which is told elsewhere.

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _size(folder: Path) -> int:
    """Bytes on the disk of all files in a folder: those that are reserved count."""
    found = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:  # Removed meanwhile.
                continue
    return found
