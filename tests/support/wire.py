"""Raw streams, to send what a client in another language or a broken client would send."""

import queue
from collections.abc import Iterable, Sequence
from typing import Any, Self

import grpc
import numpy as np

from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.v1 import publish_pb2, publish_pb2_grpc, subscribe_pb2, subscribe_pb2_grpc, tables_pb2
from deltasync.wire.errors import protocol_to_metadata
from deltasync.wire.messages import position_to_message, shard_to_message, table_to_message
from deltasync.wire.row_messages import Columns

USER = TableSpec("sparse.embedding_bags.user", 40, 4)
ITEM = TableSpec("sparse.embedding_bags.item", 30, 6, np.dtype("<f2"))
TABLES = [USER, ITEM]
WHOLE = [Shard.whole(USER), Shard.whole(ITEM)]
# Longer than any test may take: on a busy machine, a stream must not end before its test does.
_TIMEOUT_SECONDS = 400.0
Metadata = list[tuple[str, str]]


class Stream:
    """A bidirectional stream, which ends with the block."""

    def __init__(self, address: str, method: Any, metadata: Metadata | None = None) -> None:
        self._channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = method(self._channel)(
            iter(self._requests.get, None), timeout=_TIMEOUT_SECONDS, metadata=metadata or [protocol_to_metadata()]
        )

    def send(self, *requests: Any) -> None:
        for request in requests:
            self._requests.put(request)

    def receive(self) -> Any:
        """The next message other than `Alive`; raises `grpc.RpcError` if the service has ended the stream."""
        while (message := next(self._call)).WhichOneof("message") == "alive":
            pass
        return message

    def rest(self) -> list[Any]:
        """All further messages other than `Alive` until the service ends the stream."""
        return [each for each in self._call if each.WhichOneof("message") != "alive"]

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """The status with which the service ends the stream, after any messages."""
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def end(self) -> None:
        """Close this side of the stream."""
        self._requests.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._call.cancel()
        self._channel.close()


class RankStream(Stream):
    """A rank's raw Publish stream; a bare one has sent nothing yet."""

    def __init__(
        self, address: str, *, bare: bool = False, metadata: Metadata | None = None, **fields: Any
    ) -> None:
        def publish(channel: grpc.Channel) -> Any:
            return publish_pb2_grpc.PublishServiceStub(channel).Publish

        super().__init__(address, publish, metadata)
        if not bare:
            self.send(publish_open(**fields))

    def opened(self) -> publish_pb2.PublishOpened:
        message = self.receive()
        assert message.WhichOneof("message") == "opened", message
        opened: publish_pb2.PublishOpened = message.opened
        return opened

    def publish_all(self, seed: int = 0) -> Position:
        """Open the stream with step 1, and publish all rows of `TABLES`, drawn at random."""
        self.opened()
        self.send(*full_part(1, random_rows(seed), WHOLE))
        return self.sealed()

    def sealed(self) -> Position:
        message = self.receive()
        assert message.WhichOneof("message") == "sealed", message
        return Position(message.sealed.position.history, message.sealed.position.version)


class ReplicaStream(Stream):
    """A replica's raw Subscribe stream; a bare one has sent nothing yet."""

    def __init__(
        self, address: str, *, bare: bool = False, metadata: Metadata | None = None, **fields: Any
    ) -> None:
        def subscribe(channel: grpc.Channel) -> Any:
            return subscribe_pb2_grpc.SubscribeServiceStub(channel).Subscribe

        super().__init__(address, subscribe, metadata)
        self._pieces: list[Any] = []
        if not bare:
            self.send(subscribe_open(**fields))

    def receive(self) -> Any:
        """The next message; returns a whole release as its chunks and its end."""
        if not self._pieces:
            self._pieces = pieces(super().receive())
        return self._pieces.pop(0)

    def until(self, *kinds: str) -> Any:
        """The next message of one of these kinds."""
        while True:
            message = self.receive()
            kind = message.WhichOneof("message")
            if kind in kinds:
                return getattr(message, kind)

    def release(self) -> tuple[list[tables_pb2.Rows], subscribe_pb2.ReleaseEnd]:
        """All rows of the next release, and its end."""
        rows: list[tables_pb2.Rows] = []
        while True:
            message = self.receive()
            kind = message.WhichOneof("message")
            if kind == "release_end":
                return rows, message.release_end
            if kind == "chunk":
                rows.append(message.chunk.rows.rows)


def pieces(response: subscribe_pb2.SubscribeResponse) -> list[subscribe_pb2.SubscribeResponse]:
    """The same messages without whole releases."""
    if not response.HasField("release"):
        return [response]
    chunks = [subscribe_pb2.ReleaseChunk(rows=rows) for rows in response.release.rows]
    end = subscribe_pb2.SubscribeResponse(release_end=response.release.end)
    return [*(subscribe_pb2.SubscribeResponse(chunk=each) for each in chunks), end]


def publish_open(
    *,
    model: str = "clicks",
    run: str = "run-1",
    started: int = 1,
    rank: int = 0,
    world_size: int = 1,
    tables: Iterable[TableSpec] = tuple(TABLES),
    shards: Iterable[Shard] = tuple(WHOLE),
    continues: Position | None = None,
    takes_deletes: bool = False,
    takes_changes: bool = False,
    process: str = "",
) -> publish_pb2.PublishRequest:
    tables = list(tables)
    return publish_pb2.PublishRequest(
        open=publish_pb2.PublishOpen(
            model=model,
            run=run,
            run_started_unix_ns=started,
            rank=rank,
            world_size=world_size,
            tables=[table_to_message(table) for table in tables],
            shards=[shard_to_message(shard, tables) for shard in shards],
            continues=position_to_message(continues) if continues else None,
            takes_deletes=takes_deletes,
            takes_changes=takes_changes,
            process=process,
        )
    )


def chunk(step: int, slot: int, ids: Any, values: Any) -> publish_pb2.PublishRequest:
    return publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=rows_message(slot, ids, values)))


def delete_chunk(step: int, slot: int, ids: Any) -> publish_pb2.PublishRequest:
    rows = rows_message(slot, ids, [], deleted=True)
    return publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=rows))


def rows_message(slot: int, ids: Any, values: Any, **fields: Any) -> tables_pb2.TableRows:
    ids, values = np.asarray(ids, np.int64).tobytes(), np.asarray(values).tobytes()
    return tables_pb2.TableRows(slot=slot, rows=tables_pb2.Rows(ids=ids, values=values, **fields))


def decoded(message: tables_pb2.TableRows, shards: Sequence[Shard] = tuple(WHOLE)) -> RowBatch:
    """The rows in a message."""
    return Columns.read(memoryview(message.rows.SerializeToString())).rows_of(message.slot, shards)


def close(step: int, rows: int, *, full: bool = False) -> publish_pb2.PublishRequest:
    return publish_pb2.PublishRequest(
        close=publish_pb2.PartClose(step=step, rows=rows, step_end_unix_ns=step * 1000, full=full)
    )


def part(
    step: int, changes: Iterable[tuple[int, Any, Any]], *, full: bool = False
) -> list[publish_pb2.PublishRequest]:
    """Chunks of (slot, ids, values) and the message that closes the part."""
    chunks = [chunk(step, slot, ids, values) for slot, ids, values in changes]
    return [*chunks, close(step, sum(len(each.chunk.rows.rows.ids) // 8 for each in chunks), full=full)]


def whole_part(
    step: int, changes: Iterable[tuple[int, Any, Any]], *, full: bool = False
) -> publish_pb2.PublishRequest:
    """The same part in one message."""
    *chunks, end = part(step, changes, full=full)
    rows = [each.chunk.rows for each in chunks]
    return publish_pb2.PublishRequest(part=publish_pb2.WholePart(rows=rows, close=end.close))


def block(rows: np.ndarray, shard: Shard) -> np.ndarray:
    """The shard's share of a table's rows."""
    rows = rows[shard.row_offset : shard.row_offset + shard.rows]
    return rows[:, shard.col_offset : shard.col_offset + shard.cols]


def full_part(step: int, rows: list[np.ndarray], shards: list[Shard]) -> list[publish_pb2.PublishRequest]:
    """A full part: `rows` has the complete tables in the order of `TABLES`."""
    changes = [
        (
            slot,
            np.arange(shard.row_offset, shard.row_offset + shard.rows),
            block(rows[TABLES.index(shard.table)], shard),
        )
        for slot, shard in enumerate(shards)
    ]
    return part(step, changes, full=True)


def subscribe_open(
    *, consumer: str = "predictors", replica: str = "p0", held: Position | None = None, budget: int = 0
) -> subscribe_pb2.SubscribeRequest:
    return subscribe_pb2.SubscribeRequest(
        open=subscribe_pb2.SubscribeOpen(
            consumer=consumer,
            replica=replica,
            held=position_to_message(held) if held else None,
            max_outstanding_bytes=budget,
        )
    )


def ack(received_bytes: int = 0, applied: Position | None = None) -> subscribe_pb2.SubscribeRequest:
    message = position_to_message(applied) if applied else None
    return subscribe_pb2.SubscribeRequest(ack=subscribe_pb2.Ack(received_bytes=received_bytes, applied=message))


def random_rows(seed: int, tables: Iterable[TableSpec] = tuple(TABLES)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(table.rows, table.dim)).astype(table.dtype) for table in tables]


def size_of(several: Iterable[tables_pb2.Rows | tables_pb2.TableRows]) -> int:
    rows = [each.rows if isinstance(each, tables_pb2.TableRows) else each for each in several]
    return sum(len(each.ids) + len(each.values) for each in rows)
