"""A log in a stream of JetStream: records are messages, and what is dropped is purged."""

import asyncio
import base64
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltasync.base.durations import Durations
from deltasync.base.errors import StorageFailed
from deltasync.log.brokers import LOOK_AT_BROKERS, Brokers, BrokerVolume, refused_by_brokers
from deltasync.log.jetstream_index import Address, Index, Names, drop_note, put_note, truncate_note
from deltasync.log.jetstream_sender import Fence, Message, Sender
from deltasync.log.log_store import LAST_NUMBER, Buffer, LogFull, LogUnavailable, Record, Submitted, WriteQueue
from deltasync.log.records import damaged, key_of, name_of, with_checksum, without_checksum
from deltasync.log.volume import Volume

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_BATCH = 500
_SECONDS = 3
# Without a message, each by another broker maybe.
_TRIES = 10


async def read_message(brokers: Brokers, stream: str, sequence: int) -> bytes | None:
    """What a message has; None if there is none of that sequence.

    Raises:
        LogUnavailable: brokers do not answer.
    """
    # The stream's leader answers. Any broker that has a copy would answer `DIRECT.GET`: also one that has not got
    # the message yet, or one that the leader cannot reach any more, of which no answer comes.
    found = await brokers.ask(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    if "error" in found:
        if found["error"].get("code") == 404:
            return None
        raise LogUnavailable(refused_by_brokers(stream, found["error"]))
    return base64.b64decode(found["message"].get("data", ""))


@dataclass(frozen=True)
class StoredMessage:
    """A message of a stream.

    Attributes:
        sequence: its place.
        subject: what it is.
        session: of the process that has appended it, see `Fence`.
        payload: what it has; empty where only its headers were asked for.
        size: bytes of that.
    """

    sequence: int
    subject: str
    session: str
    payload: bytes
    size: int


async def messages(
    brokers: Brokers, stream: str, subjects: Sequence[str], last: int, *, headers_only: bool = False
) -> AsyncGenerator[StoredMessage]:
    """The messages of some subjects up to message `last`, in order; `headers_only` without what they have.

    The broker that sends them may lag behind the others, or go away meanwhile. So `last` has to be of one of these
    subjects: all have come once it has.

    Raises:
        LogUnavailable: brokers do not send them all.
    """
    reached, tries = 0, 0
    while reached < last:
        try:
            async with aclosing(_sent(brokers, stream, subjects, reached + 1, headers_only=headers_only)) as sent:
                async for each in sent:
                    if each.sequence > reached:
                        reached, tries = each.sequence, 0
                        yield each
                    if reached >= last:
                        return
        except LogUnavailable:
            tries += 1
            if tries == _TRIES:
                raise


async def _sent(
    brokers: Brokers, stream: str, subjects: Sequence[str], first: int, *, headers_only: bool
) -> AsyncGenerator[StoredMessage]:
    """What one broker sends, without an end; there may be some from before `first`, where it lags behind.

    Raises:
        LogUnavailable: it sends no more, or has left some out.
    """
    from nats.errors import Error

    try:
        subscription = await _subscription(brokers, stream, subjects, first, headers_only=headers_only)
        try:
            count, wanted = 0, 1
            while True:
                for each in await subscription.fetch(wanted, timeout=_SECONDS):
                    count, wanted = count + 1, max(1, min(each.metadata.num_pending, _BATCH))
                    if each.metadata.sequence.consumer != count:
                        raise LogUnavailable(f"stream {stream}: a message was lost on its way")
                    yield _stored(each)
        finally:
            await subscription.unsubscribe()
    except (Error, OSError) as error:
        raise LogUnavailable(
            f"brokers do not send what stream {stream} has: {error!r}: {LOOK_AT_BROKERS}"
        ) from error


def _stored(message: "Msg") -> StoredMessage:
    headers = message.headers or {}
    size = int(headers.get("Nats-Msg-Size", len(message.data)))
    session = headers.get("Nats-Msg-Id", "").partition(".")[0]
    return StoredMessage(int(message.metadata.sequence.stream), message.subject, session, message.data, size)


async def _subscription(
    brokers: Brokers, stream: str, subjects: Sequence[str], first: int, *, headers_only: bool
) -> Any:
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        filter_subjects=list(subjects),
        headers_only=headers_only,
        inactive_threshold=60,
        mem_storage=True,
        num_replicas=1,
    )
    return await brokers.client.jetstream().pull_subscribe("", stream=stream, config=config)


# What a message has beside its payload: subject and headers.
HEADER_BYTES = 4 << 10


def pieces_of(key: bytes, payload: Sequence[Buffer], max_payload: int) -> list[bytes]:
    """A record with its checksum, in as many messages as it takes."""
    whole, most = with_checksum(key, *payload), max(1, max_payload - HEADER_BYTES)
    return [whole[start : start + most] for start in range(0, len(whole), most)]


def check_written(writes: Sequence[Future[None]]) -> None:
    """Check that none of these writes was refused; one that is under way fails with all that come after it.

    Raises:
        StorageFailed: what one was refused with.
    """
    for write in writes:
        if write.done() and (error := write.exception()):
            raise error


class Operation:
    """A write that was submitted: done once all of its messages are acknowledged. Any thread."""

    def __init__(self, submitted: Submitted, queue: WriteQueue, commits: Durations) -> None:
        self._submitted, self._queue, self._commits = submitted, queue, commits
        self._begun = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._expected, self._closed = 0, False

    @classmethod
    def nothing(cls, queue: WriteQueue, commits: Durations) -> "Operation":
        """One that is over."""
        operation = cls(Submitted(lambda _: None, Future(), 0), queue, commits)
        operation._over.set()
        return operation

    def expect(self, land: Callable[[int], None]) -> Callable[[int], None]:
        """What is to be called once a further message of it has landed: it does this before that counts."""
        with self._lock:
            self._expected += 1

        def landed(sequence: int) -> None:
            land(sequence)
            with self._lock:
                self._expected -= 1
            self._end_if_done()

        return landed

    def close(self) -> None:
        """Note that there are no further messages of it."""
        self._closed = True
        self._end_if_done()

    def refuse(self, error: Exception) -> None:
        """Fail, as far as it is not over."""
        failure = (
            error
            if isinstance(error, StorageFailed)
            else StorageFailed(f"the log could not be written: {error!r}: restart the service")
        )
        self._end(failure)

    def wait(self) -> None:
        """Wait until it is over."""
        self._over.wait()

    def _end_if_done(self) -> None:
        with self._lock:
            done = self._closed and not self._expected
        if done:
            self._end(None)

    def _end(self, error: StorageFailed | None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        self._queue.end([self._submitted])
        if error:
            self._submitted.done.set_exception(error)
        else:
            self._commits.add(time.monotonic() - self._begun)
            self._submitted.done.set_result(None)


class Purges:
    """Purges of one stream. Each names what an accepted note has said to be gone, up to that note, so that it
    removes nothing else, however late it comes.

    Attributes:
        complete: all that were asked for are done: no note is needed any more to know what is gone.
    """

    def __init__(self, brokers: Brokers, stream: str) -> None:
        self._brokers, self._stream = brokers, stream
        self._under_way = set[asyncio.Future[None]]()
        self._failed = False

    @property
    def complete(self) -> bool:
        """Whether all are done."""
        return not self._under_way and not self._failed

    def purge(self, subjects: str, before: int) -> None:
        """Have messages of some subjects removed that come before a sequence."""
        task = asyncio.ensure_future(self._purge(subjects, before))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancel(self) -> None:
        """Have none under way: who opens the log next sees from its notes what is gone."""
        for each in list(self._under_way):
            each.cancel()
        await self.settled()

    async def settled(self) -> None:
        """Wait until none is under way."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    async def _purge(self, subjects: str, before: int) -> None:
        try:
            found = await self._brokers.ask(f"STREAM.PURGE.{self._stream}", {"filter": subjects, "seq": before})
            self._failed |= "error" in found
        except StorageFailed:  # As above.
            self._failed = True


# Small records are written together again once the notes that say them are so much more than they are.
_NOTES_BYTES, _NOTES_TIMES, _CHUNK_BYTES = 4 << 20, 4, 32 << 10
_READ_AHEAD = 16
_FULL = "the log is full until a checkpoint is written; if it stays so, raise --log-max-bytes; nothing was lost"
# What to do where a record is damaged: whoever opens the log goes back to the last version that is whole.
_READ_ANEW = "restart this process, which reads its logs anew; a checkpoint and the trainer have what is lost"

# What is gone with a note that is message N: subjects, and the message up to which.
Gone = Callable[[int], list[tuple[str, int]]]


class JetStreamStore:
    """A `LogStore` of one model. What its methods do stands there.

    Attributes:
        shared: yes: another process may go on with it.
        refusing: a write was refused for want of room; cleared once there is room again.
        capacity: bytes of rows that it takes, at most.
        volume: the brokers.
        commits: how long it took until what was submitted was acknowledged.
        queue: what was submitted and is not acknowledged yet.
    """

    def __init__(self, brokers: Brokers, names: Names, index: Index, fence: Fence, volume: BrokerVolume) -> None:
        self.shared, self.refusing = True, False
        self.capacity = brokers.options.max_bytes
        self.volume: Volume = volume
        self.commits, self.queue = volume.commits, WriteQueue()
        self._brokers, self._names, self._index = brokers, names, index
        self._sender = Sender(brokers, names, fence)
        self._purges = Purges(brokers, names.stream)
        self._lock = threading.Lock()  # The index, and what is counted of it.
        self._unacknowledged = self._notes_bytes = 0
        self._compacting, self._last = False, Operation.nothing(self.queue, self.commits)
        self._running = asyncio.run_coroutine_threadsafe(self._sender.run(), brokers.loop)
        self._writer = threading.Thread(target=self._write_loop, name="log-writer", daemon=True)
        self._writer.start()

    @property
    def lost(self) -> StorageFailed | None:
        """Why it takes nothing any more; None while it does."""
        return self._sender.lost

    @property
    def trouble(self) -> str:
        """Why nothing is acknowledged now; empty if it is."""
        return self._sender.trouble

    def check(self) -> None:
        """See whether the brokers have what they have acknowledged; `lost` says if not. Blocks.

        Raises:
            StorageFailed: no broker answers.
        """
        self._brokers.run(self._sender.check())

    def close(self) -> None:
        """Wait until what was submitted is acknowledged, or lost."""
        self.queue.close()
        self._writer.join()
        self._brokers.run(self._purges.settled())
        self.abandon()

    def abandon(self) -> None:
        """Take nothing any more, and wait for nothing: what is not acknowledged may be written all the same."""
        self._brokers.loop.call_soon_threadsafe(self._sender.lose, StorageFailed("the log is closed"))
        self._running.cancel()
        with contextlib.suppress(Exception, CancelledError):  # How it ended is told to those who have written.
            self._running.result()
        self._brokers.run(self._purges.cancel())
        self.queue.close()
        self._writer.join()

    # Writing.

    def append(
        self,
        stream: str,
        number: int,
        part: int,
        index: int,
        *payload: Buffer,
        after: Sequence[Future[None]] = (),
        patient: bool = False,
    ) -> Future[None]:
        """Write a record, whose payload comes in pieces, unless a write `after` which it comes was refused."""
        address, size = Address(stream, number, part, index), sum(memoryview(each).nbytes for each in payload)

        def write(operation: Operation) -> None:
            check_written(after)
            self._check_room(size)
            self._append(operation, address, payload)

        return self.queue.submit(write, size, patient=patient)

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        """Forget the records from `number` on, or only those of one part of `number`."""
        note = drop_note(stream, number, part)

        def gone(sequence: int) -> list[tuple[str, int]]:
            numbers = {number} if part is not None else self._index.numbers(stream, number)
            return [(self._names.records(stream, each, part), sequence) for each in numbers]

        return self.queue.submit(lambda operation: self._note(operation, note, gone), 0, patient=patient)

    def truncate(self, stream: str, upto: int) -> Future[None]:
        """Forget the records up to number `upto`."""
        note = truncate_note(stream, upto)

        def gone(sequence: int) -> list[tuple[str, int]]:
            return [(self._names.records(stream), self._index.first_after(stream, upto) or sequence)]

        return self.queue.submit(lambda operation: self._note(operation, note, gone), 0)

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Keep a small record, unless a write `after` which it comes was refused; None forgets it."""

        def write(operation: Operation) -> None:
            check_written(after)
            self._note(operation, put_note({name: value}))

        return self.queue.submit(write, len(value or b""))

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        """Keep several small records, all of them or none; None forgets one."""
        note = put_note(records)
        return self.queue.submit(lambda operation: self._note(operation, note), len(note))

    # Reading.

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """The records with numbers from `first` to `last`, a few at once."""
        with self._lock:
            found = self._index.between(stream, first, last)
        for start in range(0, len(found), _READ_AHEAD):
            some = found[start : start + _READ_AHEAD]
            for (address, _), payload in zip(some, self._brokers.run(self._payloads(some)), strict=True):
                if payload is not None:
                    yield Record(*address.numbers, payload)

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, by the rest of their names."""
        with self._lock:
            found = sorted((name, value) for name, value in self._index.small.items() if name.startswith(prefix))
        return {name[len(prefix) :]: value for name, value in found}

    def streams(self) -> list[str]:
        """The names of all streams that have records."""
        with self._lock:
            return self._index.streams()

    def used_bytes(self) -> int:
        """Bytes of its records."""
        with self._lock:
            return self._index.bytes

    async def _payloads(self, records: Sequence[tuple[Address, tuple[int, ...]]]) -> list[memoryview | None]:
        return list(await asyncio.gather(*(self._payload(*each) for each in records)))

    async def _payload(self, address: Address, sequences: tuple[int, ...]) -> memoryview | None:
        """What a record has; None if it was dropped meanwhile."""
        pieces = await asyncio.gather(
            *(read_message(self._brokers, self._names.stream, each) for each in sequences)
        )
        if any(piece is None for piece in pieces):
            with self._lock:
                if not any(found == sequences for _, found in self._index.between(*_range_of(address))):
                    return None
            raise damaged(name_of(*address), _READ_ANEW)
        whole = b"".join(piece for piece in pieces if piece is not None)
        return without_checksum(key_of(*address), whole, name_of(*address), _READ_ANEW)

    # The writer's thread.

    def _write_loop(self) -> None:
        closing = False
        while not closing:
            batch, closing = self.queue.take()
            for each in batch:
                self._last = self._begin(each)
            del batch  # Not kept until the next write: closures hold rows.
        self._last.wait()  # Acknowledged in order: with it all before.

    def _begin(self, submitted: Submitted) -> Operation:
        operation = Operation(submitted, self.queue, self.commits)
        try:
            submitted.write(operation)
        except Exception as error:  # noqa: BLE001  # Whatever it is, its waiter is told, and the thread goes on.
            self.refusing |= isinstance(error, LogFull)
            operation.refuse(error)
        else:
            operation.close()
            if self.queue.full:
                operation.wait()
        return operation

    def _check_room(self, size: int) -> None:
        with self._lock:
            used = self._index.bytes + self._unacknowledged
        if used + size > self.capacity:
            raise LogFull(_FULL)

    def _append(self, operation: Operation, address: Address, payload: Sequence[Buffer]) -> None:
        messages = pieces_of(key_of(*address), payload, self._brokers.client.max_payload)
        for number, message in enumerate(messages):
            subject = self._names.piece(address, number, len(messages))

            def land(sequence: int, number: int = number, size: int = len(message)) -> None:
                with self._lock:
                    self._unacknowledged -= size
                    self._index.add_piece(sequence, address, number, len(messages), size)

            with self._lock:
                self._unacknowledged += len(message)
            self._send(operation, subject, message, land)

    def _note(self, operation: Operation, note: bytes, gone: Gone = lambda _: []) -> None:
        """Append a note, and have removed what it says to be `gone`: subjects, and up to which message."""
        if len(note) > self._brokers.client.max_payload - HEADER_BYTES:
            text = f"{len(note)} bytes of small records at once, and brokers take less: raise their max_payload"
            raise StorageFailed(text)

        def land(sequence: int) -> None:
            with self._lock:
                purged = gone(sequence)
                self._index.add_note(note)
                self._notes_bytes += len(note)
            for subjects, before in purged:
                self._purges.purge(subjects, before)
            self._compact_if_needed()

        self._send(operation, self._names.notes, note, land)

    def _send(self, operation: Operation, subject: str, payload: bytes, land: Callable[[int], None]) -> None:
        message = Message(subject, payload, operation.expect(land), failed=operation.refuse)
        self._brokers.loop.call_soon_threadsafe(self._sender.append, message)

    def _compact(self, operation: Operation) -> None:
        """Append all small records again, and have the notes before that removed, which say nothing else then."""
        self._last.wait()  # What is under way may be of small records.
        with self._lock:
            chunks = [put_note(dict(each)) for each in _chunked(self._index.small)]
            self._notes_bytes = sum(map(len, chunks))
        first = list[int]()

        def land(sequence: int) -> None:
            first.append(sequence)
            if len(first) == len(chunks):
                self._purges.purge(self._names.notes, first[0])
                self._compacting = False

        for each in chunks:
            self._send(operation, self._names.notes, each, land)

    # In the brokers' event loop.

    def _compact_if_needed(self) -> None:
        small = sum(map(len, self._index.small.values()))
        due = self._notes_bytes > max(_NOTES_BYTES, _NOTES_TIMES * small) and self._purges.complete
        if due and not self._compacting:
            self._compacting = True
            self.queue.submit(self._compact, 0)


def _chunked(records: Mapping[str, bytes]) -> Iterator[list[tuple[str, bytes]]]:
    """Small records, some at a time; none is one time without any."""
    chunk, size = list[tuple[str, bytes]](), 0
    for name, value in records.items():
        chunk.append((name, value))
        size += len(name) + len(value)
        if size > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _range_of(address: Address) -> tuple[str, int, int]:
    return address.stream, address.number, address.number
