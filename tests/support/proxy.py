"""A TCP proxy that simulates network failures."""

import contextlib
import socket
import struct
import threading
from typing import Literal, Self

Direction = Literal["up", "down"]

_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a service, with one thread per direction.

    Attributes:
        address: HOST:PORT for clients.
        delay_seconds: delay of all data, in both directions.
        bytes_per_second: bandwidth towards clients; None = unlimited.
        twice: number of first bytes from a client to repeat on a second connection.
        connections: number of connections so far.
    """

    def __init__(self, target: str) -> None:
        self.forward_to(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_seconds = 0.0
        self.bytes_per_second: int | None = None
        self.twice = 0
        self.connections = 0
        self._left: dict[Direction, int | None] = {"up": None, "down": None}
        self._flowing, self._closed = threading.Event(), threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and stop listening."""
        self._closed.set()
        self._flowing.set()
        with contextlib.suppress(OSError):  # Else who accepts would go on, although it is closed.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut_after(self, direction: Direction, size: int) -> None:
        """Reset all connections after this number of further bytes in one direction."""
        with self._lock:
            self._left[direction] = size

    def forward_to(self, target: str) -> None:
        """Forward later connections to this service, HOST:PORT."""
        host, _, port = target.rpartition(":")
        self._target = host, int(port)

    def stall(self) -> None:
        """Keep all connections but stop forwarding, like a network that has gone away."""
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # It is closed.
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), name="proxy", daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self.connections += 1
        ours = [client]
        with self._lock:
            self._sockets.append(client)  # At once: what it is to be connected with may be gone.
        with contextlib.suppress(OSError):
            service = self._opened()
            copy = self._opened() if self.twice else None
            ours += [service, *([copy] if copy else [])]
            with self._lock:
                self._sockets += ours[1:]
            for each in (client, service):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arguments = ("down", service, client, None)
            down = threading.Thread(target=self._pump, args=arguments, name="proxy", daemon=True)
            down.start()
            self._pump("up", client, service, copy)
            down.join()
        with self._lock:
            self._sockets = [each for each in self._sockets if each not in ours]
        for each in ours:
            each.close()

    def _opened(self) -> socket.socket:
        return socket.create_connection(self._target)

    def _pump(
        self, direction: Direction, source: socket.socket, sink: socket.socket, copy: socket.socket | None
    ) -> None:
        with contextlib.suppress(OSError):  # It was cut, or one end has closed.
            while data := source.recv(self._most(direction)):
                if self.delay_seconds:
                    self._closed.wait(self.delay_seconds)
                self._flowing.wait()
                if copy:
                    copy.sendall(data[: self.twice])
                    self.twice = max(0, self.twice - len(data))
                passed, cut = self._passed(direction, len(data))
                sink.sendall(data[:passed])
                if cut:
                    self.cut()
                if direction == "down" and self.bytes_per_second:
                    self._closed.wait(len(data) / self.bytes_per_second)
        self._flowing.wait()  # Nor does anybody hear that the other has closed.
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _most(self, direction: Direction) -> int:
        return self.bytes_per_second if direction == "down" and self.bytes_per_second else 1 << 16

    def _passed(self, direction: Direction, size: int) -> tuple[int, bool]:
        """The number of these bytes to forward, and whether they are the last."""
        with self._lock:
            left = self._left[direction]
            if left is None:
                return size, False
            cut = size >= left
            self._left[direction] = None if cut else left - size
            return min(size, left), cut
