"""Publish rows from any program, without TorchRec."""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import numpy as np

from deltasync.base.arguments import check_items, check_name, check_type
from deltasync.base.errors import Damaged, DeltasyncError, InvalidInput, ResyncRequired, ServiceUnavailable
from deltasync.base.process import this_process
from deltasync.client.connection import Connection, Connectivity, ForkGuard, LiveStream, Tuning, check_process
from deltasync.client.endpoint import Endpoint, Route
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest, Ids, RowBatch
from deltasync.core.seal import check_event_time
from deltasync.core.tables import ID_TYPE, Shard, TableSpec
from deltasync.v1 import publish_pb2, tables_pb2
from deltasync.wire.errors import is_final
from deltasync.wire.messages import (
    changed_from_message,
    joined,
    position_from_message,
    position_to_message,
    shard_to_message,
    table_to_message,
)
from deltasync.wire.row_messages import chunked, fits_message, part_chunk, serialized, table_pieces, whole_message

logger = logging.getLogger(__name__)

# Timeout of the service's answer to a goodbye.
_GOODBYE_SECONDS = 2.0

_PUBLISH = f"/{publish_pb2.DESCRIPTOR.services_by_name['PublishService'].full_name}/Publish"


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    """The service and the model that a rank publishes to.

    Attributes:
        service: the gRPC endpoint of the service, or its address HOST:PORT.
        model: name of the model.
        run: unique id of this training run, the same on all ranks.
        run_started_unix_ns: start of the run, nanoseconds since 1970, the same on all ranks.
        rank: number of this process, from 0.
        world_size: number of ranks.
        continues: the position of this run's rows, from the checkpoint that it loaded.
        takes_deletes: whether this rank deletes rows on request (`Publisher.deletes`).
        start_over: whether the rows of this run are good although `continues` is not set. After a rollback the
            service admits no other run that does not continue from its version or an earlier one.
    """

    service: Endpoint | str
    model: str
    run: str
    run_started_unix_ns: int
    rank: int = 0
    world_size: int = 1
    continues: Position = field(default_factory=Position)
    takes_deletes: bool = False
    start_over: bool = False

    def __post_init__(self) -> None:
        check_type("PublisherOptions(...)", "continues", self.continues, Position)
        Endpoint.of_grpc(self.service)
        check_name("model", self.model)
        if self.world_size < 1:
            raise InvalidInput(f"world_size {self.world_size}: expected 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise InvalidInput(f"rank {self.rank}: expected 0 to {self.world_size - 1}, below world_size")


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's share of a cut.

    Attributes:
        step: the optimizer step after which the rows were read. Must be later than the last sealed step.
        step_end_unix_ns: end of the step on this rank, nanoseconds since 1970.
        rows: the rows; may be empty.
        full: whether these are all rows of all shards of this rank.
        deletes: numbers of the requests in `Publisher.deletes` that this rank has carried out.
        event_time_unix_ns: the time of the newest event that this rank has trained on, nanoseconds since 1970;
            None = unknown.
        differing: tables that should be equal on all ranks, but are not. The part has this rank's rows of them.
        made_unix_ns: when the rank had read all rows, nanoseconds since 1970; by default, when it makes the part.

    Raises:
        InvalidInput: the event time is not a positive whole number.
    """

    step: int
    step_end_unix_ns: int
    rows: list[RowBatch] = field(default_factory=list)
    full: bool = False
    deletes: Sequence[int] = ()
    event_time_unix_ns: int | None = None
    differing: Sequence[str] = ()
    made_unix_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        check_event_time(self.event_time_unix_ns)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values on the wire."""
        return sum(rows.nbytes for rows in self.rows)


_Requests: TypeAlias = "queue.SimpleQueue[Part | publish_pb2.PublishRequest | None]"
_Call: TypeAlias = "grpc._CallIterator[publish_pb2.PublishResponse]"


class Publisher:
    """Publishes parts of cuts. Reconnects, and sends a part again until its cut is sealed.

    Only one part can be in flight. Its arrays must not change until its future is done.

    Attributes:
        deletes: pending delete requests of operators, oldest first, as of the service's last answer. The
            publisher's thread replaces the tuple. All ranks must carry out the same requests in a cut.
        quarantine: the reason why the service withholds the last version from replicas; empty if it does not.
    """

    def __init__(
        self,
        options: PublisherOptions,
        tables: list[TableSpec],
        shards: list[Shard],
        *,
        tuning: Tuning | None = None,
    ) -> None:
        """Start the publisher's thread.

        Args:
            options: see `PublisherOptions`.
            tables: all tables of the model.
            shards: the shards of this rank.
            tuning: only for tests.

        Raises:
            TypeError: an argument has another type.
            InvalidInput: a shard appears twice.
        """
        call = "Publisher(options, tables, shards)"
        check_type(call, "options", options, PublisherOptions)
        check_items(call, "tables", tables, TableSpec)
        check_items(call, "shards", shards, Shard)
        check_process()
        self._options, self._tuning = options, tuning or Tuning()
        self._fork_guard = ForkGuard(f"the publisher of rank {options.rank} of model {options.model!r}")
        self._route = Route(Endpoint.of_grpc(options.service))
        self._tables = tables
        self._shards = shards
        self._slots = {shard: slot for slot, shard in enumerate(shards)}
        if len(self._slots) < len(shards):
            twice = next(shard for slot, shard in enumerate(shards) if self._slots[shard] != slot)
            raise InvalidInput(f"{twice} appears twice: pass each shard once")
        self._continues = options.continues
        self.deletes: tuple[DeleteRequest, ...] = ()
        self.quarantine = ""
        self._connectivity = Connectivity(f"rank {options.rank} of model {options.model!r}", self._tuning.clock)
        self._parts: queue.SimpleQueue[tuple[Part, Future[Position]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._stream: _Stream | None = None
        self._busy = False
        self._sealed_step: int | None = None
        # The service's head when it last named rows to publish, and these rows by table.
        self._told: tuple[Position, dict[str, bytes]] | None = None
        self._thread = threading.Thread(target=self._run, name="deltasync-publisher", daemon=True)
        self._thread.start()

    @property
    def connection(self) -> Connection:
        """The state of the connection, which the first part opens."""
        return self._connectivity.forked(left) if (left := self._fork_guard.left) else self._connectivity.now

    def publish(self, part: Part) -> "Future[Position]":
        """Send a part, without waiting.

        Returns:
            A future of the position of the sealed cut. Its exceptions:

            - `ResyncRequired`: the service's rows do not match this run's. Publish a full part, or add the rows
              that the error names to the next part.
            - `InvalidInput`, `Contradiction`: the service refuses the part for good. If the other ranks are at a
              later step, publish these rows again with the part of that step.
            - `Damaged`: rows have changed in this process since their digests were computed.

        Raises:
            InvalidInput: rows do not match their shard, the step is sealed already, or a part is in flight.
            ServiceUnavailable: the publisher is closed, or belongs to the process that this one was forked from.
        """
        self._fork_guard.check()
        if self._closing.is_set():
            raise ServiceUnavailable(f"part of step {part.step}: the publisher is closed")
        if self._busy:
            raise InvalidInput(f"part of step {part.step}: wait for the future of the previous part first")
        if self._sealed_step is not None and part.step <= self._sealed_step:
            raise InvalidInput(
                f"part of step {part.step}: step {self._sealed_step} is sealed already; publish a later step"
            )
        for rows in part.rows:
            self._check(rows)
        done: Future[Position] = Future()
        self._busy = True
        if stream := self._stream:
            # Send from this thread, because the publisher's thread wakes up late while training holds the GIL.
            stream.begin(part)
        self._parts.put((part, done))
        return done

    def close(self) -> None:
        """Sign off from the service and close the connection. Does nothing in a forked process.

        If a part is in flight or the service cannot be reached, this is the same as `abort`.
        """
        if (stream := self._stream) and not self._busy and not self._fork_guard.left:
            stream.say_goodbye(_GOODBYE_SECONDS)
        self.abort()

    def abort(self) -> None:
        """Drop the part in flight and close the connection. Does nothing in a forked process.

        The service counts this rank as lost until it comes back.
        """
        if self._fork_guard.left:
            return
        self._closing.set()
        self._parts.put(None)
        if stream := self._stream:
            stream.cancel()
        self._thread.join()
        self._connectivity.note_lost(ServiceUnavailable("the publisher is closed"))

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.abort() if error else self.close()

    def _check(self, rows: RowBatch) -> None:
        shard = rows.shard
        if shard not in self._slots:
            raise InvalidInput(f"rows of {shard}: expected one of this publisher's {len(self._slots)} shards")
        if (
            not isinstance(rows.ids, np.ndarray)
            or rows.ids.ndim != 1
            or (len(rows.ids) and rows.ids.dtype != ID_TYPE)
        ):
            kind = getattr(rows.ids, "dtype", type(rows.ids).__name__)
            raise InvalidInput(
                f"table {shard.table.name!r}: ids of type {kind}, expected int64 [n]: use RowBatch.of_table"
            )
        if not isinstance(rows.values, np.ndarray):
            kind = type(rows.values).__name__
            raise InvalidInput(f"table {shard.table.name!r}: values of type {kind}, expected a NumPy array")
        expected = (len(rows.ids), shard.cols)
        if rows.values.shape != expected or rows.values.dtype != shard.table.dtype:
            raise InvalidInput(
                f"table {shard.table.name!r}: values of shape {rows.values.shape} and type {rows.values.dtype}, "
                f"expected {expected} and {shard.table.dtype}"
            )

    # The publisher's thread.

    def _run(self) -> None:
        while True:
            if self._stream:
                try:
                    self._stream.idle()
                except DeltasyncError as error:  # The connection has ended without a part in flight.
                    self._drop_stream()
                    self._connectivity.note_lost(error)
            if (item := self._parts.get()) is None:
                break
            part, done = item
            try:
                position = self._deliver(part)
            except Exception as error:  # noqa: BLE001  # becomes the future's exception
                self._drop_stream()
                self._note_failed(error, None)
                self._busy = False  # First: a thread that waits for the future may publish again at once.
                done.set_exception(error)
            else:
                self._continues, self._sealed_step = position, part.step
                self._busy = False
                done.set_result(position)
        self._drop_stream()

    def _deliver(self, part: Part) -> Position:
        pauses = self._tuning.pauses()
        while True:
            try:
                if self._stream is None:
                    self._stream = _Stream(self._route.endpoint, self._open_message(), self._slots)
                stream = self._stream
                if self._closing.is_set():
                    break
                if not stream.opened:
                    answer, changed = stream.open()
                    self._route.answered()
                    self._note_answer(answer)
                    self._check_opened(answer, changed, part)
                sealed = stream.send(part)
                self._note_answer(sealed)
                if sealed.quarantine and not self.quarantine:
                    text = "the last version is in quarantine: replicas get no new rows until an operator resumes "
                    logger.warning("%sthem: %s", text, sealed.quarantine)
                self.quarantine = sealed.quarantine
                return position_from_message(sealed.position)
            except DeltasyncError as error:
                self._drop_stream()
                if is_final(error):
                    raise
                if isinstance(error, Damaged):
                    _check_digests(part)
                if self._route.turn(error):
                    self._note_failed(error, 0.0)
                    continue
                pause = self._route.pause(next(pauses))
                self._note_failed(error, pause)
            if self._closing.wait(pause):
                break
        raise ServiceUnavailable(f"part of step {part.step}: closed before it was sealed")

    def _note_failed(self, error: Exception, pause: float | None) -> None:
        if not self._closing.is_set():
            self._connectivity.note_failed(error, pause)

    def _drop_stream(self) -> None:
        if self._stream:
            self._stream.cancel()
        self._stream = None

    def _check_opened(self, answer: publish_pb2.PublishOpened, changed: Mapping[int, Ids], part: Part) -> None:
        """Raise ResyncRequired if a part lacks rows. `changed` has newer rows by the index of their table."""
        head = position_from_message(answer.head)
        if part.full:
            return
        if not answer.continues:
            raise ResyncRequired(f"publish every row: {answer.reason}", head=head)
        rows = [(self._tables[table].name, ids) for table, ids in changed.items()]
        told = head, {table: ids.tobytes() for table, ids in rows}
        if answer.since and self._told != told:
            self._told = told
            text = f"also publish the rows that the service names: {answer.reason}"
            raise ResyncRequired(text, head=head, changed=rows)

    def _note_answer(self, answer: publish_pb2.PublishOpened | publish_pb2.CutSealed) -> None:
        self._connectivity.note_connected()
        self.deletes = tuple(
            DeleteRequest(each.number, self._tables[each.table].name, np.array(each.ids, ID_TYPE))
            for each in answer.deletes
        )

    def _open_message(self) -> publish_pb2.PublishOpen:
        options = self._options
        return publish_pb2.PublishOpen(
            model=options.model,
            run=options.run,
            run_started_unix_ns=options.run_started_unix_ns,
            rank=options.rank,
            world_size=options.world_size,
            tables=[table_to_message(table) for table in self._tables],
            shards=[shard_to_message(shard, self._tables) for shard in self._shards],
            continues=position_to_message(self._continues),
            takes_deletes=options.takes_deletes,
            takes_changes=True,
            start_over=options.start_over,
            process=this_process(),
        )


class _Stream:
    """One connection to the service.

    Attributes:
        opened: whether the service has accepted this rank.
    """

    def __init__(self, endpoint: Endpoint, message: publish_pb2.PublishOpen, slots: Mapping[Shard, int]) -> None:
        self._endpoint, self._message, self._slots = endpoint, message, slots
        self._tables = {table.name: index for index, table in enumerate(message.tables)}
        self._parts: _Requests = queue.SimpleQueue()
        self._channel = endpoint.channel()
        publish = self._channel.stream_stream(_PUBLISH, serialized, publish_pb2.PublishResponse.FromString)
        self._call: _Call = publish(self._requests())
        alive = publish_pb2.PublishRequest(alive=tables_pb2.Alive())
        self._responses: LiveStream[publish_pb2.PublishResponse] = LiveStream(
            self._call, str(endpoint), endpoint.timeout_seconds, self._parts, alive
        )
        self.opened = False
        # The part that `begin` sent, and the answer to it, or the error.
        self._begun: Part | None = None
        self._early: publish_pb2.PublishResponse | DeltasyncError | None = None

    def begin(self, part: Part) -> None:
        """Start sending the part of the next `send` if the service has already accepted this rank."""
        if self.opened:
            self._begun = part
            self._parts.put(part)

    def open(self) -> tuple[publish_pb2.PublishOpened, dict[int, Ids]]:
        """Wait until the service accepts this rank; return its answer, and its row ids by index of their table."""
        opened, changed = self._receive().opened, list[tuple[int, Ids]]()
        named = not opened.since
        while not named:
            message = self._receive().changed
            changed += changed_from_message(message)
            named = message.last
        self.opened = True
        return opened, joined(changed)

    def idle(self) -> None:
        """Wait until the service answers the next part, which `begin` sends, or the connection ends before."""
        try:
            self._early = self._receive()
        except DeltasyncError as error:
            if self._begun is None:
                raise
            self._early = error

    def send(self, part: Part) -> publish_pb2.CutSealed:
        """Send a part after `open`, and wait until its cut is sealed."""
        if self._begun is not part:
            self._parts.put(part)
        early, self._early, self._begun = self._early, None, None
        if isinstance(early, DeltasyncError):
            raise early
        return (early or self._receive()).sealed

    def say_goodbye(self, seconds: float) -> None:
        """Sign off from the service, and wait for its answer, `seconds` at most."""
        if self.opened and self._call.is_active():
            ended = threading.Event()
            self._call.add_callback(ended.set)
            self._parts.put(publish_pb2.PublishRequest(goodbye=publish_pb2.PublishGoodbye()))
            self._parts.put(None)
            ended.wait(seconds)

    def cancel(self) -> None:
        """Close the connection."""
        self._parts.put(None)
        self._call.cancel()
        self._responses.close()
        self._channel.close()

    def _receive(self) -> publish_pb2.PublishResponse:
        try:
            return next(self._responses)
        except StopIteration:
            raise ServiceUnavailable(f"{self._endpoint} closed the stream") from None
        except grpc.RpcError as error:
            raise self._endpoint.error_of(error) from error

    def _requests(self) -> Iterator[publish_pb2.PublishRequest | bytes]:
        yield publish_pb2.PublishRequest(open=self._message)
        while (part := self._parts.get()) is not None:
            if isinstance(part, publish_pb2.PublishRequest):
                yield part
                continue
            close = publish_pb2.PartClose(
                step=part.step,
                rows=sum(map(len, part.rows)),
                step_end_unix_ns=part.step_end_unix_ns,
                full=part.full,
                deletes=part.deletes,
                event_time_unix_ns=part.event_time_unix_ns or 0,
                differing=[self._tables[name] for name in part.differing if name in self._tables],
                gather_ns=max(0, part.made_unix_ns - part.step_end_unix_ns),
            )
            if fits_message(sum(rows.message_bytes for rows in part.rows)):
                yield whole_message([close.SerializeToString()], table_pieces(self._chunks(part)))
            else:
                yield from (part_chunk(part.step, *chunk) for chunk in self._chunks(part))
                yield publish_pb2.PublishRequest(close=close)

    def _chunks(self, part: Part) -> Iterator[tuple[int, RowBatch]]:
        for rows in part.rows:
            for chunk in chunked(rows):
                yield self._slots[rows.shard], chunk.digested()


def _check_digests(part: Part) -> None:
    """Raise Damaged if a part was damaged in this process. Sending it again would not help."""
    try:
        for rows in part.rows:
            rows.check_digests()
    except Damaged as error:
        raise Damaged(
            f"part of step {part.step}: {error}; they have changed in this process: do not write to rows until "
            "their part is sealed, and if your program did not, check this machine's memory"
        ) from error
