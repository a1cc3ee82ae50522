"""Whether files are mapped privately: what is written to them stays in this process's memory until it is flushed.

The first write to a page of a shared mapping, after each time that the system has written it to the disk, costs
several microseconds: most of what a small cut into a large table takes. Private pages that were written cannot
leave memory, so there may not be too many of them.
"""

import logging
import os
import threading
from pathlib import Path

from deltasync.core.position import Decision

logger = logging.getLogger(__name__)

_CGROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_NO_OVERCOMMIT = "2"  # vm.overcommit_memory
_GIB = 1 << 30


class PrivateMemory:
    """How much of this process's memory is privately mapped files. Any thread."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that there are of memory."""
        self._limit = limit
        self._mapped = 0
        self._last: bool | None = None
        self._lock = threading.RLock()  # Garbage may be collected within `take`, and mappings among it give back.

    def take(self, size: int) -> bool:
        """Whether so many more bytes are to be mapped privately; if so, they are counted."""
        with self._lock:
            decision = fits(self._mapped, size, self._limit)
            self._mapped += size if decision.yes else 0
            changed, self._last = decision.yes is not self._last, decision.yes
        if changed:
            logger.info("tables are %s: %s", "kept in memory" if decision.yes else "mapped files", decision.reason)
        return decision.yes

    def give_back(self, size: int) -> None:
        """Count so many bytes fewer."""
        with self._lock:
            self._mapped -= size


def fits(mapped: int, size: int, limit: int) -> Decision:
    """Whether a file is to be mapped privately.

    Args:
        mapped: bytes that are so mapped by this process.
        size: of the file.
        limit: bytes that there are of memory.
    """
    total = f"those of this process take {(mapped + size) / _GIB:.2f} GiB"
    if 2 * (mapped + size) <= limit:
        return Decision(True, f"{total}, at most half of the {limit / _GIB:.2f} GiB that there are")
    reason = f"more than half of the {limit / _GIB:.2f} GiB that there are; with more, small cuts are faster"
    return Decision(False, f"{total}, {reason}")


def memory_bytes(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Memory that this process may have, bytes: what others leave of the machine's now, or less if a control group
    (1 or 2) allows less.
    """
    limits, own = _of_machine(proc), proc / "self" / "cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            limits += _limits(cgroups, group, "memory.max") + _limits(cgroups, group, "memory.high")
        elif "memory" in controllers.split(","):
            limits += _limits(cgroups / "memory", group, "memory.limit_in_bytes")
    return min(limits)


def _of_machine(proc: Path) -> list[int]:
    """All of it, what is available, and of a system that promises no more than it has, what it still can."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info, overcommit = proc / "meminfo", proc / "sys" / "vm" / "overcommit_memory"
    lines = [line.split() for line in info.read_text().splitlines()] if info.exists() else []
    found = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
    limits = [machine, found.get("MemAvailable", machine)]
    if found and overcommit.exists() and overcommit.read_text().strip() == _NO_OVERCOMMIT:
        limits.append(max(0, found["CommitLimit"] - found["Committed_AS"]))
    return limits


def _limits(root: Path, group: str, name: str) -> list[int]:
    """What is said of a group and those that it is in. In a container, its own is the root."""
    inner = root / group.lstrip("/")
    files = [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    texts = [file.read_text().strip() for file in files if file.exists()]
    return [int(text) for text in texts if text.isdigit()]
