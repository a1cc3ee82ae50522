"""Free loopback ports for processes that are about to start."""

import contextlib
import random
import socket
from collections.abc import Callable

# Below those that systems give to connections, one of which could take a port before its process has it.
_PORTS = range(15_000, 30_000)
# That this process has given out: who has one need not listen yet.
_reservations = set[int]()


def is_free(port: int) -> bool:
    """Whether nothing listens on a port."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def free_ports(count: int, fits: Callable[[int], bool] = is_free) -> list[int]:
    """Ports on which nothing listens, outside the ephemeral range; those returned before come last."""
    found = list[int]()
    tried = random.sample(_PORTS, len(_PORTS))  # Others look for some at the same time.
    for port in sorted(tried, key=_reservations.__contains__):
        if fits(port):
            found.append(port)
        if len(found) == count:
            _reservations.update(found)
            return found
    raise RuntimeError(f"no {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free")


def free_port() -> int:
    """One free port."""
    return free_ports(1)[0]
