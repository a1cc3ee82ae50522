"""Free loopback ports for processes that are about to start."""

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


def is_free(port: int) -> bool:
    """Whether nothing listens on a port. Meanwhile nothing else can."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@cache
def _locks() -> int:
    file = Path(tempfile.gettempdir()) / f"deltasync-test-ports-{os.getuid()}"
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # Open until the process ends.


def reserve(port: int) -> bool:
    """Reserve a port until this process ends, whoever else runs tests here. Whether it is reserved and free."""
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return is_free(port)


class Ports:
    """A range of ports, which it gives to processes of tests."""

    def __init__(self, ports: range, reserve: Callable[[int], bool] = reserve) -> None:
        self._ports, self._reserve = ports, reserve
        self._given = set[int]()  # Who has one need not listen yet.

    def free(self, count: int, beside: int = 0) -> list[int]:
        """Free ports, those given before last. The port `beside` above each is free, too."""
        found = list[int]()
        for port in sorted(random.sample(self._ports, len(self._ports)), key=self._given.__contains__):
            both = {port, port + beside}
            if port + beside in self._ports and all(map(self._reserve, both)):
                found.append(port)
                self._given |= both
            if len(found) == count:
                return found
        raise RuntimeError(f"no {count} ports of {self._ports} are free")


# Below those that systems give to connections, one of which could take a port before its process has it.
free_ports = Ports(range(15_000, 30_000)).free


def free_port() -> int:
    """One free port."""
    return free_ports(1)[0]
