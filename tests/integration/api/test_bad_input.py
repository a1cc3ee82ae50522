"""What can never be right is refused with the right status and a message that says what, and changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from tests.integration.api.conftest import publish_everything, published
from tests.support.server import TOKEN, RunningService
from tests.support.state import state_of
from tests.support.wire import (
    ITEM,
    USER,
    WHOLE,
    RankStream,
    ReplicaStream,
    ack,
    chunk,
    close,
    full_part,
    part,
    publish_open,
    random_rows,
    subscribe_open,
    whole_part,
)

from deltasync.core.position import Position
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.v1 import publish_pb2, subscribe_pb2, tables_pb2
from deltasync.wire.row_messages import MAX_CHUNK_BYTES

# Some parts leave a cut open, which a part of a later step replaces.
pytestmark = pytest.mark.in_order

INVALID, CONTRADICTION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
AnyStream = TypeVar("AnyStream", RankStream, ReplicaStream)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, Position]]:
    """A service that holds version 1 of run-1, and that position. Shared, since nothing changes it."""
    with RunningService(tmp_path_factory.mktemp("bad") / "data") as service, RankStream(service.grpc) as rank:
        position = publish_everything(rank, random_rows(0), step=10)
        with ReplicaStream(service.grpc) as replica:
            replica.release()
            replica.send(ack(0, position))
            replica.end()
            replica.refusal()
        yield service, position


@contextmanager
def refused(
    service: RunningService, kind: type[AnyStream], expected: grpc.StatusCode, *said: str, **fields: Any
) -> Iterator[AnyStream]:
    """A stream of which something is refused in such words, and that changes nothing of what the service holds."""
    before = state_of(service)
    with kind(service.grpc, **fields) as stream:
        yield stream
        code, details = stream.refusal()
    assert code is expected
    assert all(each in details for each in said), details
    assert state_of(service) == before


def rows(count: int, cols: int, value: float = 1.0, dtype: Any = "<f4") -> np.ndarray:
    return np.full((count, cols), value, dtype)


def table_message(**wrong: Any) -> tables_pb2.Table:
    fields: dict[str, Any] = {
        "name": "t",
        "rows": 1,
        "dim": 1,
        "value_type": tables_pb2.VALUE_TYPE_FP32,
        "kind": tables_pb2.TABLE_KIND_EMBEDDING,
    }
    return tables_pb2.Table(**fields | wrong)


def opening(**wrong: Any) -> publish_pb2.PublishRequest:
    request = publish_open()
    for name, value in wrong.items():
        if isinstance(value, list):
            request.open.ClearField(name)  # type: ignore[arg-type]
            getattr(request.open, name).extend(value)
        else:
            setattr(request.open, name, value)
    return request


HALF = Shard(USER, 0, 20, 0, 4)


def map_of(table: TableSpec, rows: int) -> TableSpec:
    return TableSpec("raw_ids", rows, 1, np.dtype("<i8"), TableKind.ID_MAP, table.name)


def cases(bad: dict[grpc.StatusCode, dict[str, Any]]) -> list[Any]:
    return [pytest.param(code, case, id=case) for code, named in bad.items() for case in named]


def parameter(name: str, *aliases: str) -> tables_pb2.Table:
    return table_message(name=name, kind=tables_pb2.TABLE_KIND_PARAMETER, aliases=aliases)


BAD_OPENS: dict[grpc.StatusCode, dict[str, tuple[Any, str]]] = {
    INVALID: {
        "model": (opening(model="a/b"), "model name 'a/b'"),
        "no run": (opening(run=""), "run id ''"),
        "an alias that is a table": (
            opening(tables=[parameter("a", "b"), parameter("b")]),
            "'a' has the alias 'b', which another table uses",
        ),
        "an alias of two": (
            opening(tables=[parameter("a", "c"), parameter("b", "c")]),
            "'b' has the alias 'c', which another table uses",
        ),
        "rank": (opening(rank=1), "rank 1: expected 0 to 0"),
        "world of none": (opening(world_size=0), "world size 0"),
        "vast world": (opening(world_size=65_537), "world size 65537"),
        "no tables": (opening(tables=[], shards=[]), "no tables"),
        "table twice": (publish_open(tables=[USER, USER], shards=[]), f"{USER.name!r} is announced twice"),
        "no rows": (opening(tables=[table_message(rows=0)], shards=[]), "table 't': 0 rows"),
        "no dim": (opening(tables=[table_message(dim=0)], shards=[]), "table 't': dim 0"),
        "vast table": (opening(tables=[table_message(rows=2**63)], shards=[]), "table 't'"),
        "no type": (opening(tables=[table_message(value_type=0)], shards=[]), "'t': value type 0"),
        "no kind": (opening(tables=[table_message(kind=0)], shards=[]), "'t': kind 0: expected one of"),
        "no name": (opening(tables=[table_message(name="")], shards=[]), "table name ''"),
        "shard of no table": (opening(shards=[publish_pb2.Shard(table=2, cols=1)]), "shard 0 has table index 2"),
        "rows outside": (
            opening(shards=[publish_pb2.Shard(table=0, row_offset=1, rows=40, cols=4)]),
            f"{USER.name!r}: rows 1 to 41, the table has 40",
        ),
        "columns outside": (
            opening(shards=[publish_pb2.Shard(table=1, rows=30, col_offset=4, cols=3)]),
            f"{ITEM.name!r}: columns 4 to 7, the table has 6",
        ),
        "map of no table": (
            publish_open(tables=[USER, map_of(ITEM, 30)], shards=[]),
            f"table 'raw_ids' belongs to {ITEM.name!r}, not an embedding table of the run",
        ),
        "map of rows outside": (
            publish_open(tables=[USER, map_of(USER, 41)], shards=[]),
            f"table 'raw_ids' has 41 rows, but {USER.name!r}, to which it belongs, has 40",
        ),
        "first a chunk": (chunk(11, 0, [0], rows(1, 4)), "expected one open message"),
        "first a close": (close(11, 0), "expected one open message"),
        "first nothing": (publish_pb2.PublishRequest(), "expected one open message"),
    },
    CONTRADICTION: {
        "size of the run": (opening(world_size=2), "run run-1 has 1 rank, this rank reports 2"),
        "older run": (publish_open(run="run-0", started=0), "run run-0 began before run run-1"),
        "other rows": (
            publish_open(tables=[TableSpec(USER.name, 41, 4), ITEM], shards=[]),
            f"table {USER.name!r} of model 'clicks' is 40 x 4 float32, the run has 41 x 4 float32",
        ),
        "other dim": (publish_open(tables=[TableSpec(USER.name, 40, 5)], shards=[]), "the run has 40 x 5"),
        "other type": (
            publish_open(tables=[USER, TableSpec(ITEM.name, 30, 6)], shards=[]),
            "30 x 6 float16, the run has 30 x 6 float32",
        ),
    },
}


@pytest.mark.parametrize(("expected", "case"), cases(BAD_OPENS))
def test_a_bad_open(served: tuple[RunningService, Position], expected: grpc.StatusCode, case: str) -> None:
    request, said = BAD_OPENS[expected][case]
    with refused(served[0], RankStream, expected, said, bare=True) as stream:
        stream.send(request)


# What rows have to be whoever sends them: unit/wire/test_messages.py.
BAD_PARTS: dict[grpc.StatusCode, dict[str, tuple[Any, str]]] = {
    INVALID: {
        "second open": ([publish_open()], "expected one open message"),
        "nothing": ([publish_pb2.PublishRequest()], "expected one open message"),
        "id past the table": ([chunk(11, 0, [39, 40], rows(2, 4))], f"{USER.name!r}: row id 40 is outside"),
        "id twice in the part": (
            [chunk(11, 0, [3], rows(1, 4)), chunk(11, 0, [3], rows(1, 4))],
            "row id 3 came after 3",
        ),
        "wrong type": (
            [chunk(11, 1, [3], rows(1, 6))],
            f"{ITEM.name!r}: 24 bytes of values for 1 row of 6 float16",
        ),
        "nan": ([chunk(11, 0, [5], rows(1, 4, np.nan))], f"{USER.name!r}: row 5 holds nan in column 0"),
        "good, then nan": (
            [chunk(11, 0, [5], rows(1, 4)), chunk(11, 0, [6], rows(1, 4, np.nan))],
            "row 6 holds nan",
        ),
        "fewer rows than closed": ([chunk(11, 0, [5], rows(1, 4)), close(11, 2)], "of 2 rows, but 1 arrived"),
        "more rows than closed": ([chunk(11, 0, [5], rows(1, 4)), close(11, 0)], "of 0 rows, but 1 arrived"),
        "full of the same rows": (
            [
                chunk(11, 0, np.arange(40), rows(40, 4)),
                chunk(11, 0, np.arange(30), rows(30, 4)),
                close(11, 70, full=True),
            ],
            "row id 0 came after 39",
        ),
        "differing of no table": (
            [publish_pb2.PublishRequest(close=publish_pb2.PartClose(step=11, differing=[9]))],
            "table 9 differs between ranks, but only 2 were announced",
        ),
        "a whole part of fewer rows": (
            [publish_pb2.PublishRequest(part=publish_pb2.WholePart(close=publish_pb2.PartClose(step=11, rows=1)))],
            "of 1 row, but 0 arrived",
        ),
        "a row twice in a whole part": (
            [whole_part(11, [(0, [3], rows(1, 4)), (0, [3], rows(1, 4))])],
            "row id 3 came after 3",
        ),
    },
    CONTRADICTION: {
        "an old step": (part(9, [(0, [1], rows(1, 4))]), "step 10 of this run is already published"),
        "step back in the cut": (
            [chunk(13, 0, [5], rows(1, 4)), chunk(12, 0, [6], rows(1, 4))],
            "part of step 12 while the cut of step 13 is under way",
        ),
    },
}


@pytest.mark.parametrize(("expected", "case"), cases(BAD_PARTS))
def test_a_bad_part(served: tuple[RunningService, Position], expected: grpc.StatusCode, case: str) -> None:
    requests, said = BAD_PARTS[expected][case]
    service, position = served
    with refused(service, RankStream, expected, said, continues=position) as stream:
        assert stream.opened().continues
        stream.send(*requests)


@pytest.mark.parametrize(
    ("shards", "requests", "expected", "said"),
    [
        (WHOLE, part(1, []), grpc.StatusCode.DATA_LOSS, "rank 0 sent only changed rows"),
        ([], close(1, 0, full=True), CONTRADICTION, f"{USER.name!r}: rows 0 to 39, columns 0 to 3 are in no"),
        (
            [HALF, WHOLE[1]],
            full_part(1, random_rows(3), [HALF, WHOLE[1]]),
            CONTRADICTION,
            f"{USER.name!r}: rows 20 to 39",
        ),
        (
            # As many values as the table has, but some of them twice and others never.
            [HALF, Shard(USER, 10, 20, 0, 4), WHOLE[1]],
            full_part(1, random_rows(3), [HALF, Shard(USER, 10, 20, 0, 4), WHOLE[1]]),
            CONTRADICTION,
            f"{USER.name!r}: rows 30 to 39",
        ),
    ],
    ids=["not full", "no shards", "rows in no shard", "overlapping shards"],
)
def test_a_new_run_that_does_not_publish_everything(
    tmp_path: Path, shards: list[Shard], requests: Any, expected: grpc.StatusCode, said: str
) -> None:
    run = {"run": "run-2", "started": 2, "shards": shards}
    with RunningService(tmp_path / "data") as service:
        published(service, random_rows(0))
        with refused(service, RankStream, expected, said, **run) as stream:
            assert not stream.opened().continues
            stream.send(*(requests if isinstance(requests, list) else [requests]))


def test_an_open_that_is_refused_makes_no_model(served: tuple[RunningService, Position]) -> None:
    service, _ = served
    for request in (publish_open(model="typo", rank=9), publish_open(model="typo", tables=[], shards=[])):
        with RankStream(service.grpc, bare=True) as stream:
            stream.send(request)
            assert stream.refusal()[0] is INVALID
    assert "typo" not in service.get("/metrics")[1]


def big_chunk(size: int) -> publish_pb2.PublishRequest:
    """A request whose chunk is of about this size."""
    count = size // 12
    return chunk(1, 0, np.arange(count), np.zeros((count, 1), "<f4"))


def test_a_whole_part_over_the_limit(served: tuple[RunningService, Position]) -> None:
    """Of several tables, each within it."""
    service, _ = served
    table = TableSpec("wide", 2**21, 1)
    half = big_chunk(MAX_CHUNK_BYTES // 2 + 100).chunk.rows
    request = publish_pb2.PublishRequest(part=publish_pb2.WholePart(rows=[half, half]))
    with RankStream(service.grpc, model="whole", tables=[table], shards=[Shard.whole(table)]) as stream:
        stream.opened()
        stream.send(request)
        code, details = stream.refusal()
    assert code is INVALID
    assert "a part of" in details
    assert f"at most {MAX_CHUNK_BYTES} are allowed" in details


@pytest.mark.parametrize(
    ("size", "expected", "said"),
    [
        (MAX_CHUNK_BYTES + 100, INVALID, f"at most {MAX_CHUNK_BYTES} are allowed"),
        (20 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_a_message_over_the_limit(
    served: tuple[RunningService, Position], size: int, expected: grpc.StatusCode, said: str
) -> None:
    service, _ = served
    whole = [TableSpec("wide", 2**21, 1)]
    with RankStream(service.grpc, model=f"wide-{size}", tables=whole, shards=[Shard.whole(whole[0])]) as stream:
        stream.opened()
        stream.send(big_chunk(size))
        code, details = stream.refusal()
    assert code is expected
    assert said in details
    assert service.get("/livez")[0] == 200
    assert f"wide-{size}" not in {line["model"] for line in service.get_json("/models")}


BAD_REPLICAS = {
    "unknown consumer": (subscribe_open(consumer="nobody"), grpc.StatusCode.NOT_FOUND, "predictors, probes"),
    "replica name": (subscribe_open(replica="a b"), INVALID, "replica name 'a b'"),
    "no replica name": (subscribe_open(replica=""), INVALID, "replica name ''"),
    "first an ack": (ack(), INVALID, "begin with an open message"),
    "first nothing": (subscribe_pb2.SubscribeRequest(), INVALID, "begin with an open message"),
}


@pytest.mark.parametrize("case", BAD_REPLICAS)
def test_a_bad_subscription(served: tuple[RunningService, Position], case: str) -> None:
    request, expected, said = BAD_REPLICAS[case]
    with refused(served[0], ReplicaStream, expected, said, bare=True) as stream:
        stream.send(request)


def test_a_subscription_that_ends_before_it_begins(served: tuple[RunningService, Position]) -> None:
    with ReplicaStream(served[0].grpc, bare=True) as stream:
        stream.end()
        assert stream.refusal() == (INVALID, "a stream must begin with an open message")


def bad_acks(position: Position) -> dict[str, tuple[subscribe_pb2.SubscribeRequest, str]]:
    no_table = ack(0, position)
    no_table.ack.unbound.append(9)
    return {
        "bytes never sent": (ack(10**9), "acked 1000000000 bytes, but only"),
        "a future version": (ack(0, Position(position.history, 2)), "acked number 2 of history"),
        "another history": (ack(0, Position("0" * 32, 1)), "of history '000"),
        "no history": (ack(0, Position("", 1)), "of history ''"),
        "no such table": (no_table, "an ack names table 9, but there are only 2"),
        "a second open": (subscribe_open(replica="p1"), "expected only acks"),
        "nothing": (subscribe_pb2.SubscribeRequest(), "expected only acks"),
    }


@pytest.mark.parametrize("case", bad_acks(Position()))
def test_a_bad_ack(served: tuple[RunningService, Position], case: str) -> None:
    service, position = served
    request, said = bad_acks(position)[case]
    # It holds everything, so that nothing is on its way when it acks.
    with refused(service, ReplicaStream, INVALID, said, held=position) as stream:
        stream.until("opened")
        stream.send(request)


def test_an_ack_of_a_version_that_was_not_sent(served: tuple[RunningService, Position]) -> None:
    """It exists, but this replica cannot have it: its budget lets only a first chunk through."""
    service, position = served
    early = {"consumer": "probes", "replica": "early", "budget": 1}
    with refused(service, ReplicaStream, INVALID, "acked number 1", "only number 0", **early) as stream:
        stream.until("chunk")
        stream.send(ack(0, position))
    lag = service.get_json("/consumers/probes")
    assert "early" not in [line["replica"] for line in lag["replicas"]]  # It has held nothing.


GARBAGE = {
    "noise": b"\xff\xff\xff\xff no protobuf",
    "cut short": publish_open().SerializeToString()[:-1],
    "text that is no UTF-8": publish_pb2.PublishRequest(open=publish_pb2.PublishOpen(run="xx"))
    .SerializeToString()
    .replace(b"xx", b"\xff\xff"),
    "in the middle of a part": b"\xff",
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("method", ["PublishService/Publish", "SubscribeService/Subscribe"])
def test_bytes_that_are_no_protobuf(served: tuple[RunningService, Position], method: str, garbage: str) -> None:
    service, position = served
    before, contents = state_of(service), [GARBAGE[garbage]]
    if garbage == "in the middle of a part" and method == "PublishService/Publish":
        requests = [publish_open(continues=position), chunk(14, 0, [5], rows(1, 4))]
        contents = [*(request.SerializeToString() for request in requests), *contents]
    with grpc.insecure_channel(service.grpc) as channel:
        stub: Any = channel.stream_stream(f"/deltasync.v1.{method}")
        with pytest.raises(grpc.RpcError) as error:
            list(stub(iter(contents), timeout=10))
    said = f"/deltasync.v1.{method}: {len(contents[-1])} bytes are not a valid message of this method"
    assert (error.value.code(), error.value.details()) == (INVALID, said)
    assert state_of(service) == before


def test_a_place_that_can_be_none_is_refused(served: tuple[RunningService, Position]) -> None:
    status, answer = served[0].request("POST", "/backup", TOKEN, rb'{"url": "/dev/null/\u0000"}')
    assert (status, "a URL must not contain a null character" in answer) == (400, True)
