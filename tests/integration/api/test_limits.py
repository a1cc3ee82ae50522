"""A service whose limits are reached: what is refused names the limit, and what is given back is free again."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.metrics import samples_of
from tests.support.server import RunningService
from tests.support.wire import RankStream, ReplicaStream, publish_open

from deltasync.access.limits import LimitOptions
from deltasync.core.tables import Shard, TableSpec

LIMITS = LimitOptions(
    streams_per_peer=3, message_bytes=100_000, tables_per_model=2, shards_per_open=3, rows_per_table=1000
)
TABLE = TableSpec("t", 100, 4)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder: Path = tmp_path_factory.mktemp("service")
    with RunningService(folder / "data", limits=LIMITS) as service:
        yield service


def refusal(service: RunningService, **fields: Any) -> str:
    """Why a rank is not let in."""
    with RankStream(service.grpc, bare=True) as stream:
        stream.send(publish_open(**fields))
        code, details = stream.refusal()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(details)


def taken(service: RunningService) -> float:
    return samples_of(service).get(("deltasync_limit_taken", (("limit", "streams"),)), 0.0)


def wait_until_free(service: RunningService) -> None:
    """Wait until the service has noticed that all streams have ended."""
    deadline = time.monotonic() + 20.0
    while taken(service):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_peer_has_so_many_streams(service: RunningService) -> None:
    for _ in range(2):
        with ExitStack() as stack:
            for number in range(3):
                stack.enter_context(ReplicaStream(service.grpc, replica=f"r{number}")).until("progress")
            assert "streams of one peer: at most 3 are allowed (limit streams_per_peer)" in refusal(service)
            # It is told so before its message is received.
            bare = stack.enter_context(RankStream(service.grpc, bare=True))
            code, details = bare.refusal()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "limit streams_per_peer" in details
            assert taken(service) == 3
        wait_until_free(service)
    refused = samples_of(service)["deltasync_limit_refused_total", (("limit", "streams_per_peer"),)]
    assert refused >= 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tables": [TableSpec(f"t{n}", 1, 1) for n in range(3)], "shards": []}, "at most 2 .*tables_per_model"),
        ({"tables": [TABLE], "shards": [Shard.whole(TABLE)] * 4}, "at most 3 .*shards_per_open"),
        ({"tables": [TableSpec("t", 1001, 1)], "shards": []}, "at most 1000 .*rows_per_table"),
        ({"process": "x" * 100_000}, "larger than max"),
    ],
)
def test_an_open_has_so_much_in_it(service: RunningService, fields: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal(service, **fields))
    wait_until_free(service)


def test_what_is_below_all_limits_is_let_in(service: RunningService) -> None:
    with RankStream(service.grpc, tables=[TABLE], shards=[Shard.whole(TABLE)] * 3) as stream:
        stream.opened()
    wait_until_free(service)
