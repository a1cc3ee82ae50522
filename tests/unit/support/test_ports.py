"""Ports for processes that are about to start."""

import pytest
from tests.support import ports


def anyone(_port: int) -> bool:
    return True


def test_none_is_given_out_twice_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was given one listens only once its process has started."""
    monkeypatch.setattr(ports, "_PORTS", range(20_000, 20_006))
    monkeypatch.setattr(ports, "_reservations", set())
    found = [port for _ in range(3) for port in ports.free_ports(2, anyone)]
    assert sorted(found) == list(ports._PORTS)
    assert set(ports.free_ports(6, anyone)) == set(found), "then again"
