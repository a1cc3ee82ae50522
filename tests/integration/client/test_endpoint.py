"""Every call has the rights of its endpoint, and an end."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from tests.support.fleet import USER, WAIT

from deltasync.client import (
    Admin,
    CallbackTarget,
    Endpoint,
    Part,
    Publisher,
    PublisherOptions,
    ServiceUnavailable,
    Shard,
    Subscriber,
    SubscriberOptions,
)
from deltasync.client.http import NoAnswer, json_answer

TOKEN = "hush"  # noqa: S105
RIGHTS = f"Bearer {TOKEN}"


class Calls(grpc.GenericRpcHandler):
    """Notes the metadata of every call, by the method's name, and knows none of the methods."""

    def __init__(self) -> None:
        self.metadata: dict[str, dict[str, Any]] = {}
        self._came = threading.Condition()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        with self._came:
            name = handler_call_details.method.rpartition("/")[2]
            self.metadata[name] = dict(handler_call_details.invocation_metadata)
            self._came.notify_all()

    def rights(self, name: str) -> str | None:
        """What a call of this method has shown, once there is one."""
        with self._came:
            assert self._came.wait_for(lambda: name in self.metadata, WAIT), name
        return self.metadata[name].get("authorization")


@contextmanager
def listening() -> Iterator[tuple[str, Calls]]:
    calls = Calls()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[calls])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", calls
    server.stop(None).wait()


@contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("token", "shown"), [(TOKEN, RIGHTS), ("", None)])
def test_every_grpc_call_shows_its_rights(token: str, shown: str | None) -> None:
    with listening() as (address, calls):
        endpoint = Endpoint(address, token)
        options = PublisherOptions(service=endpoint, model="clicks", run="r", run_started_unix_ns=1)
        with Publisher(options, [USER], [Shard.whole(USER)]) as publisher:
            publisher.publish(Part(step=1, step_end_unix_ns=1))
            assert calls.rights("Publish") == shown
        with Subscriber(SubscriberOptions(service=endpoint, consumer="c"), CallbackTarget(lambda _: None)):
            assert calls.rights("Subscribe") == shown


@pytest.mark.parametrize(("token", "shown"), [(TOKEN, RIGHTS), ("", None)])
def test_an_http_call_shows_its_rights(token: str, shown: str | None) -> None:
    with told() as (address, asked):
        assert Admin(Endpoint(address, token)).consumer("predictors") == {}
    assert asked == [("GET", "/consumers/predictors", "", shown)]


def test_a_service_that_says_nothing_is_not_waited_for_for_ever() -> None:
    with silent() as address:
        with pytest.raises(ServiceUnavailable, match=f"http://{address}/models/m/checkpoint"):
            Admin(Endpoint(f"http://{address}")).make_checkpoint("m", timeout_seconds=0.1)
        with pytest.raises(ServiceUnavailable, match=f"http://{address}/consumers/c"):
            Admin(Endpoint(f"http://{address}", timeout_seconds=0.1)).consumer("c")


@pytest.mark.parametrize(
    ("begin", "piece", "said"),
    [
        (b"", b"H", "timed out"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x", "timed out"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" ", "timed out"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", b"x", "timed out"),
    ],
    ids=["status", "head", "body", "error"],
)
def test_an_answer_that_drips_is_not_waited_for_for_ever(begin: bytes, piece: bytes, said: str) -> None:
    """Each byte comes in time; the answer does not."""
    with answering(begin, piece, 0.02) as address, pytest.raises(ServiceUnavailable, match=said):
        Admin(Endpoint(address, timeout_seconds=0.5)).consumer("c")


def test_an_answer_that_does_not_end_is_refused() -> None:
    with (
        answering(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 16), 0) as address,
        pytest.raises(NoAnswer, match="larger than the limit of 1048576 bytes"),
    ):
        json_answer("GET", address, None, {}, (WAIT, WAIT), None, "", most_bytes=1 << 20)


@contextmanager
def answering(begin: bytes, piece: bytes, pause: float) -> Iterator[str]:
    """A server whose answer to one call begins in some way, and then goes on piece by piece."""
    given_up = threading.Event()

    def answer(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.sendall(begin)
            while not given_up.wait(pause):
                peer.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        given_up.set()
        thread.join()


class Told(BaseHTTPRequestHandler):
    """Notes what is asked, and sends who asks to an address, or answers `{}`."""

    asked: list[tuple[str, str, str, str | None]]
    location = ""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        self.asked.append((self.command, self.path, body, self.headers["Authorization"]))
        self.send_response(307 if self.location else 200)
        if self.location:
            self.send_header("location", self.location + self.path)
        self.send_header("content-length", "0" if self.location else "2")
        self.end_headers()
        if not self.location:
            self.wfile.write(b"{}")

    do_GET = do_POST = do_DELETE = do_PUT  # noqa: N815  # called by these names

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def told(location: str = "") -> Iterator[tuple[str, list[tuple[str, str, str, str | None]]]]:
    handler = type("Handler", (Told,), {"asked": [], "location": location})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def test_a_change_follows_to_the_owner_with_its_body_and_rights() -> None:
    with told() as (owner, asked), told(owner) as (other, first):
        Admin(Endpoint(other, TOKEN)).pause_consumer("c/1", "late")
    assert first == asked == [("PUT", "/consumers/c%2F1/pause", '{"reason": "late"}', RIGHTS)]


@pytest.mark.parametrize(
    "location", ["https://127.0.0.1:1", "ftp://127.0.0.1:1", "http://elsewhere.example:1", "//"]
)
def test_a_token_follows_to_no_other_scheme_and_to_no_insecure_machine(location: str) -> None:
    with told(location) as (address, asked), pytest.raises(ServiceUnavailable):
        Admin(Endpoint(address, TOKEN)).delete_model("clicks")
    assert asked == [("DELETE", "/models/clicks", "", RIGHTS)]


def test_endless_redirects_end_with_an_error() -> None:
    with told("http://127.0.0.1:1") as (address, asked):
        with pytest.raises(ServiceUnavailable):
            Admin(Endpoint(address, TOKEN)).resume_consumer("c")
        assert len(asked) < 5
