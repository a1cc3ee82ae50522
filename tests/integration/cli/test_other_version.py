"""A command and a service of different versions: the error names both, and what to do."""

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from tests.support.command import deltasync
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.base.process import built_version
from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions

OLDER = {"version": "0.0.9", "commit": "0123456789abcdef0123", "formats": {}}
BOTH = f"this command is deltasync {built_version()}"
REMEDY = "the service 0.0.9 (commit 0123456789ab): use a command of the service's version, or update the service"
HERE = {"process": "", "http": "", "here": True, "alive": True, "confirmed": True, "unowned": []}


@contextmanager
def answering(answers: Mapping[str, Any]) -> Iterator[str]:
    """A server that answers some paths, and others as FastAPI does by itself."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            body = json.dumps(answers.get(path, {"detail": "Not Found"})).encode()
            self.send_response(200 if path in answers else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815  # named by http.server

        def log_message(self, *_: Any) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["tables", "list"], 1),
        (["lag", "predictors"], 1),
        (["consumers", "create", "new", "--model", "clicks"], 1),
        (["consumers", "pause", "predictors"], 1),
        (["fsck"], 2),
    ],
)
def test_a_route_that_an_older_service_lacks_is_explained(command: list[str], code: int) -> None:
    with answering({"/version": OLDER}) as service:
        found, _, err = deltasync(*command, "--service", service)
    assert (found, err.count("\n")) == (code, 1)
    assert BOTH in err
    assert REMEDY in err


def test_an_answer_that_lacks_something_is_explained() -> None:
    with answering({"/version": OLDER, "/processes": [HERE], "/tables": [{"model": "m"}]}) as service:
        code, _, err = deltasync("tables", "list", "--service", service)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("Error: the answer has no 'table'; ")
    assert REMEDY in err


def test_what_is_no_service_is_told_which_version_asks() -> None:
    with answering({}) as service:
        code, _, err = deltasync("lag", "--service", service)
    assert code == 1
    assert f"{BOTH}" in err
    assert "check that the address is that of a deltasync service" in err


def test_errors_of_a_service_of_the_same_version_say_nothing_of_versions(running: RunningService) -> None:
    at = ("--service", running.http)
    for command in (["lag", "nobody"], ["consumers", "delete", "predictors"], ["consumers", "pause", "a b"]):
        code, _, err = deltasync(*command, *at)
        assert (code, "this command is" in err) == (1, False), err


def test_a_call_that_a_grpc_service_lacks_is_explained() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        options = SubscriberOptions(service=f"127.0.0.1:{port}", consumer="predictors", replica="p")
        with Subscriber(options, NumpyTarget()) as subscriber:
            error = wait_for(lambda: str(subscriber.connection.last_error or ""))
    finally:
        server.stop(None)
    assert "does not know this call (Method not found!)" in error
    assert f"of this version ({built_version()})" in error
