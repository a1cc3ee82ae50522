"""A proxy whose connections can be cut, silenced and delayed."""

import socket
import threading
from collections.abc import Iterator

import pytest
from tests.soak.link import Link, Links
from tests.support.ports import free_port

WAIT = 20.0


class Echo:
    """Sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(1000):
                    peer.sendall(data)
            except OSError:
                return


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo()
    yield found
    found.close()


@pytest.fixture
def links() -> Iterator[Links]:
    with Links() as found:
        yield found


def connected(links: Links, echo: Echo) -> tuple[Link, socket.socket]:
    host, _, port = links.open("a", echo.address).partition(":")
    peer = socket.create_connection((host, int(port)), WAIT)
    return links.named["a"], peer


def asked(peer: socket.socket, text: bytes) -> bytes:
    peer.sendall(text)
    return peer.recv(len(text))


def test_what_is_sent_arrives(links: Links, echo: Echo) -> None:
    link, peer = connected(links, echo)
    with peer:
        assert asked(peer, b"hello") == b"hello"
    assert link.connections == 1


def test_a_cut_ends_the_connection_and_the_next_one_works(links: Links, echo: Echo) -> None:
    link, peer = connected(links, echo)
    with peer:
        assert asked(peer, b"hello") == b"hello"
        links.on_loop(link.cut())
        assert is_over(peer)
    with socket.create_connection(("127.0.0.1", link.port), WAIT) as again:
        assert asked(again, b"again") == b"again"
    assert link.connections == 2


def test_half_open_nothing_passes_and_nobody_is_told(links: Links, echo: Echo) -> None:
    link, peer = connected(links, echo)
    with peer:
        assert asked(peer, b"hello") == b"hello"
        links.on_loop(link.silence(True))
        peer.sendall(b"later")
        peer.settimeout(0.05)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        links.on_loop(link.silence(False))
        peer.settimeout(WAIT)
        assert peer.recv(5) == b"later"


def test_a_slow_reader_gets_everything_in_pieces(links: Links, echo: Echo) -> None:
    link, peer = connected(links, echo)
    link.bytes_per_second = 2000
    with peer:
        peer.sendall(b"x" * 100)
        found = b""
        while len(found) < 100:
            found += peer.recv(1000)
    assert found == b"x" * 100


def test_a_service_that_is_away_ends_the_connection(links: Links) -> None:
    where = links.open("a", f"127.0.0.1:{free_port()}")
    with socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])), WAIT) as peer:
        assert is_over(peer)


def test_the_end_of_all_links_is_no_error(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    with Links() as links:
        link, peer = connected(links, echo)
        with peer:
            assert asked(peer, b"hello") == b"hello"
            links.on_loop(link.silence(True))
            peer.sendall(b"later")
            waiting = socket.create_connection(("127.0.0.1", link.port), WAIT)
            while link.connections < 2:
                links.on_loop(link.silence(True))
    with waiting:
        assert is_over(waiting)
    assert not caplog.records


def is_over(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True
