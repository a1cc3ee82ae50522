"""From addresses of one kind to those of the other, each process by itself: some of them may be gone."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.server import RunningService

from deltasync.client import Endpoint
from deltasync.client.other_side import grpc_of, http_of
from deltasync.core.errors import NotPermitted, ServiceUnavailable
from deltasync.core.roles import token_digest

GONE = "127.0.0.1:1"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[RunningService, RunningService]]:
    with RunningService(tmp_path / "one") as one, RunningService(tmp_path / "two") as two:
        yield one, two


def test_each_process_has_an_address_of_its_own(two: tuple[RunningService, RunningService]) -> None:
    grpc, http = ",".join(each.grpc for each in two), ",".join(each.http for each in two)
    assert http_of(Endpoint(grpc)).address == http
    assert grpc_of(Endpoint(http)).address == grpc
    assert http_of(Endpoint(http)).address == http
    assert grpc_of(Endpoint(grpc)).address == grpc


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_gone_is_left_out(two: tuple[RunningService, RunningService], place: int) -> None:
    grpc, http = [each.grpc for each in two], [each.http for each in two]
    some, others = [*grpc[:place], GONE, *grpc[place:]], [*http[:place], f"http://{GONE}", *http[place:]]
    assert http_of(Endpoint(",".join(some))).address == ",".join(http)
    assert grpc_of(Endpoint(",".join(others))).address == ",".join(grpc)
    for addresses in (some, others):
        code, out, err = deltasync("lag", "--service", ",".join(addresses))
        assert (code, "predictors" in out) == (0, True), err


def test_one_that_hangs_is_not_waited_for(two: tuple[RunningService, RunningService]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hanging = f"127.0.0.1:{listener.getsockname()[1]}"
        begun = time.monotonic()
        assert http_of(Endpoint(f"{hanging},{two[0].grpc}", timeout_seconds=20)).address == two[0].http
        assert grpc_of(Endpoint(f"http://{hanging},{two[0].http}", timeout_seconds=20)).address == two[0].grpc
        assert time.monotonic() - begun < 5


def test_where_none_answers_it_is_said() -> None:
    for address in (GONE, f"{GONE},127.0.0.1:2"):
        with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:[12]"):
            http_of(Endpoint(address))
    for address in (f"http://{GONE}", f"http://{GONE},http://127.0.0.1:2"):
        with pytest.raises(ServiceUnavailable, match=r"127\.0\.0\.1:[12]"):
            grpc_of(Endpoint(address))


def test_who_may_not_ask_is_told_so_whoever_else_is_gone(tmp_path: Path) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text(f'[tokens.ana]\nsha256 = "{token_digest("see").hex()}"\nroles = ["read"]\n')
    with RunningService(tmp_path / "data", admin_token=None, roles=roles) as service:
        with pytest.raises(NotPermitted):
            http_of(Endpoint(service.grpc))
        with pytest.raises(NotPermitted):
            http_of(Endpoint(f"{GONE},{service.grpc}"))
