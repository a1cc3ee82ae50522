"""Ports for processes that are about to start."""

import subprocess
import sys

from tests.support.ports import Ports, free_port, reserve


def test_none_is_given_out_twice_while_there_are_others() -> None:
    """Who was given one listens only once its process has started."""
    ports = Ports(range(20_000, 20_006), lambda _: True)
    found = [port for _ in range(3) for port in ports.free(2)]
    assert sorted(found) == list(range(20_000, 20_006))
    assert set(ports.free(6)) == set(found), "then again"


def test_a_port_is_reserved_for_one_process() -> None:
    """Another that only looks whether it is free would keep its owner from it."""
    port = free_port()
    assert reserve(port)
    program = f"from tests.support.ports import reserve; print(reserve({port}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
