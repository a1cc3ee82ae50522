"""Connections of HTTP that say nothing, or are too many."""

import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.support.process import ServiceProcess
from tests.support.server import RunningService

from deltasync.access.limits import LimitOptions, Limits, network_of
from deltasync.api.http_server import HttpListener
from deltasync.base.process import listening_socket

_SECONDS = 20.0


def connected(service: RunningService) -> socket.socket:
    host, port = service.http.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), _SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Whether it is, after whatever answer there is."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def answers(connection: socket.socket) -> bool:
    connection.sendall(b"GET /livez HTTP/1.1\r\nhost: s\r\n\r\n")
    answer = b""
    while not answer.endswith(b"ok\n") and (more := connection.recv(4096)):
        answer += more
    return answer.startswith(b"HTTP/1.1 200")


def test_only_connections_over_the_limit_are_closed(tmp_path: Path) -> None:
    limits = LimitOptions(http_connections_per_peer=3)
    with RunningService(tmp_path, limits=limits) as service, ExitStack() as open_ones:
        first = [open_ones.enter_context(connected(service)) for _ in range(3)]
        assert all(answers(each) for each in first)
        with connected(service) as further:
            assert is_closed(further)
        assert all(answers(each) for each in first)
        first[0].close()
        assert wait_for_answer(service)


def wait_for_answer(service: RunningService) -> bool:
    """Whether there is room again; the service may not have seen yet that a connection is closed."""
    for _ in range(1000):
        with connected(service) as again:
            try:
                if answers(again):
                    return True
            except ConnectionError:
                continue
    return False


@pytest.mark.parametrize(
    "said", [b"", b"GET /livez HT", b"POST /deletes HTTP/1.1\r\nhost: s\r\ncontent-length: 9\r\n\r\n{"]
)
def test_who_does_not_end_a_request_is_hung_up_on(tmp_path: Path, said: bytes) -> None:
    limits = LimitOptions(http_idle_seconds=1)
    with RunningService(tmp_path, limits=limits) as service, connected(service) as silent:
        silent.sendall(said)
        assert is_closed(silent)


def test_who_sends_a_request_byte_by_byte_is_hung_up_on(tmp_path: Path) -> None:
    limits, ended = LimitOptions(http_idle_seconds=1), threading.Event()
    with RunningService(tmp_path, limits=limits) as service, connected(service) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nx: ")
        drip = threading.Thread(target=drop_by_drop, args=(slow, ended))
        drip.start()
        assert is_closed(slow)
        ended.set()
        drip.join()


def drop_by_drop(connection: socket.socket, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        try:
            connection.sendall(b"x")
        except OSError:
            return


def test_a_connection_beyond_the_limit_is_closed() -> None:
    limits = Limits(LimitOptions(http_connections_per_peer=1))
    with HttpListener(listening_socket("127.0.0.1", 0), limits) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, _SECONDS), socket.create_connection(address, _SECONDS) as further:
            accepted, _ = listener.accept()
            assert limits.number("http_connections") == 1
            with pytest.raises(ConnectionAbortedError):
                listener.accept()
            assert is_closed(further)
            accepted.close()
            accepted.close()
    assert limits.number("http_connections") == 0
    assert limits.refused["http_connections_per_peer"] == 1


def test_a_network_of_ipv6_is_one_peer() -> None:
    networks = [network_of(each) for each in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::ffff:10.0.0.7")]
    assert networks == ["2001:db8::", "2001:db8::", "2001:db8:0:1::", "10.0.0.7"]


def test_idle_connections_of_grpc_leave_descriptors_for_all_else(tmp_path: Path) -> None:
    """Who knows HTTP/2 and then says nothing is not hung up on for long."""
    files, greeting = 256, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    with ServiceProcess(tmp_path / "data", files=files) as service, ExitStack() as open_sockets:
        host, _, port = service.grpc.rpartition(":")
        idle = [socket.create_connection((host, int(port)), _SECONDS) for _ in range(2 * files)]
        for each in idle:
            with suppress(ConnectionError):
                open_sockets.enter_context(each).sendall(greeting)
        for each in idle:
            with suppress(ConnectionError):
                each.recv(1)  # It is let in, or closed: none is left to wait for a descriptor.
        assert service.get("/livez")
