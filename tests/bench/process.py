"""CPU time and memory of another process, as Linux counts them."""

import os
from contextlib import suppress
from pathlib import Path

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Seconds in which a core was at work for a process, in steps of `TICK_SECONDS`."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) * TICK_SECONDS


def cpu_seconds_by_thread(pid: int) -> dict[str, float]:
    """Seconds in which a core was at work for each thread of a process; those that a pool numbers are taken
    together.
    """
    seconds: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # It has ended meanwhile.
            name = "main" if task.name == str(pid) else (task / "comm").read_text().rstrip("_-0123456789\n")
            seconds[name] = seconds.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def own_bytes(pid: int, *, private: bool = True) -> int:
    """Resident bytes of shared memory, and with `private` also those of no file.

    A page that several processes have mapped counts for each of them in part.
    """
    kinds = ("Pss_Anon", "Pss_Shmem") if private else ("Pss_Shmem",)
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(size) * 1024 for name, size, *_ in fields if name.rstrip(":") in kinds)
