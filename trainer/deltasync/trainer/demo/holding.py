"""Everything kept up to be looked at, and to be broken."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from deltasync.trainer.demo.processes import Processes

_POLL_SECONDS = 0.2


def hold(
    processes: Processes,
    names: Sequence[str],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> set[str]:
    """Leave processes alone until Ctrl-C, and say once of each that it has ended; those that have."""
    said = set[str]()
    with suppress(KeyboardInterrupt):
        while True:
            for name in names:
                status = processes.status(name)
                if status is not None and name not in said:
                    said.add(name)
                    say(f"{name} has ended (status {status})")
            sleep(_POLL_SECONDS)
    return {name for name in names if processes.status(name) is not None}


def lost_of(processes: Processes, names: Sequence[str]) -> str:
    """Those that were not asked to end, or could not, and left nothing behind; empty without any."""
    found = ((name, processes.status(name)) for name in names)
    return ", ".join(f"{name} (status {status})" for name, status in found if status)
