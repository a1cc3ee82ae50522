"""The log of one model, in a JetStream stream."""

import asyncio
import contextlib
import json
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from deltasync.base.clock import Durations
from deltasync.base.errors import StorageFailed
from deltasync.log.brokers import Brokers, BrokerVolume
from deltasync.log.jetstream_stream import Fence, LogSubjects, Message, Sender, read_message
from deltasync.log.log_store import (
    LAST_NUMBER,
    LAST_PART,
    Address,
    Buffer,
    LogFull,
    QueuedLog,
    Record,
    Submitted,
    WriteQueue,
)
from deltasync.log.records import damaged, key_of, name_of, pack_json, with_checksum, without_checksum
from deltasync.log.volume import Volume

# Room in a message for its subject and headers.
HEADER_BYTES = 4 << 10
# Compact the notes once they exceed this multiple of the small records.
_NOTES_TIMES = 4
_READ_AHEAD = 16
_FULL = "the log is full until a checkpoint is written; if it stays full, raise --log-max-bytes; nothing was lost"
# The remedy for a damaged record: opening the log goes back to the last complete version.
_READ_ANEW = "restart this process, which reads its logs again; a checkpoint and the trainer have the lost rows"

# For a note with sequence N: the subjects to purge, each with the sequence before which to purge.
Gone = Callable[[int], list[tuple[str, int]]]


class JetStreamStore(QueuedLog["Operation"]):
    """A `LogStore` of one model. Records are messages; dropped ones are purged."""

    def __init__(
        self, brokers: Brokers, subjects: LogSubjects, index: "Index", fence: Fence, volume: BrokerVolume
    ) -> None:
        super().__init__()
        self.shared = True
        self.capacity = brokers.options.max_bytes
        self.volume: Volume = volume
        self.commits = volume.commits
        self.subjects, self._brokers, self._index = subjects, brokers, index
        self._sender = Sender(brokers, subjects, fence)
        self._purges = Purges(brokers, subjects.stream)
        self._lock = threading.Lock()  # Guards the index and its counters.
        self._unacknowledged = self._notes_bytes = 0
        self._compacting = False
        self._last: Operation | None = None
        self._running = asyncio.run_coroutine_threadsafe(self._sender.run(), brokers.loop)
        self._writer.start()

    @property
    def lost(self) -> StorageFailed | None:
        """Why the log no longer accepts writes; None while it does."""
        return self._sender.lost

    @property
    def trouble(self) -> str:
        """Why no write is acknowledged at present; empty if all is well."""
        return self._sender.trouble

    def check(self) -> None:
        """Check that the brokers still have all acknowledged messages; if not, set `lost`. Blocks."""
        self._brokers.run(self._sender.check())

    def close(self) -> None:
        """Wait until all writes are acknowledged or lost."""
        self.queue.close()
        self._writer.join()
        self._brokers.run(self._purges.settled())
        self.abandon()

    def abandon(self) -> None:
        """Accept no more writes, and do not wait: pending ones may still be written."""
        self._brokers.loop.call_soon_threadsafe(self._sender.lose, StorageFailed("the log is closed"))
        self._running.cancel()
        with contextlib.suppress(Exception, CancelledError):  # The writers have its error.
            self._running.result()
        self._brokers.run(self._purges.cancel())
        self.queue.close()
        self._writer.join()

    # Reading.

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        """Read the records with numbers from `first` to `last`, a few at a time."""
        with self._lock:
            records = self._index.between(stream, first, last)
        for start in range(0, len(records), _READ_AHEAD):
            some = records[start : start + _READ_AHEAD]
            for (address, _), payload in zip(some, self._brokers.run(self._payloads(some)), strict=True):
                if payload is not None:
                    yield Record(*address.numbers, payload)

    def newest(self, stream: str) -> int:
        """The largest number of a stream's records; 0 if it has none."""
        with self._lock:
            return self._index.newest(stream)

    def items(self, prefix: str) -> dict[str, bytes]:
        """The small records whose names begin with `prefix`, keyed by the rest of their names."""
        with self._lock:
            records = sorted((name, value) for name, value in self._index.small.items() if name.startswith(prefix))
        return {name[len(prefix) :]: value for name, value in records}

    def streams(self) -> list[str]:
        """The names of all streams that have records."""
        with self._lock:
            return self._index.streams()

    def used_bytes(self) -> int:
        """Size of its records in bytes."""
        with self._lock:
            return self._index.bytes

    async def _payloads(self, records: Sequence[tuple[Address, tuple[int, ...]]]) -> list[memoryview | None]:
        return list(await asyncio.gather(*(self._payload(*each) for each in records)))

    async def _payload(self, address: Address, sequences: tuple[int, ...]) -> memoryview | None:
        """The payload of a record; None if it was dropped meanwhile."""
        stream = self.subjects.stream
        pieces = await asyncio.gather(*(read_message(self._brokers, stream, each) for each in sequences))
        if any(piece is None for piece in pieces):
            with self._lock:
                if self._index.messages_of(address) != sequences:
                    return None
            raise damaged(name_of(*address), _READ_ANEW)
        whole = b"".join(piece.payload for piece in pieces if piece)
        return without_checksum(key_of(*address), whole, name_of(*address), _READ_ANEW)

    # The methods below run in the writer's thread.

    def _write_loop(self) -> None:
        super()._write_loop()
        if self._last:
            self._last.wait()  # Writes are acknowledged in order, so all earlier ones are done too.

    def _write(self, submitted: list[Submitted]) -> None:
        for each in submitted:
            self._last = self._begin(each)

    def _begin(self, submitted: Submitted) -> "Operation":
        operation = Operation(submitted, self.queue, self.commits)
        try:
            submitted.write(operation)
        except Exception as error:  # noqa: BLE001  # The waiter gets the error, and the thread continues.
            self.refusing |= isinstance(error, LogFull)
            operation.refuse(error)
        else:
            operation.close()
            if self.queue.full:
                operation.wait()
        return operation

    def _append(self, batch: "Operation", address: Address, payload: Sequence[Buffer], size: int) -> None:
        with self._lock:
            used = self._index.bytes + self._unacknowledged
        if used + size > self.capacity:
            raise LogFull(_FULL)
        whole, most = with_checksum(key_of(*address), *payload), self._brokers.client.max_payload - HEADER_BYTES
        messages = [whole[start : start + most] for start in range(0, len(whole), most)]
        for number, message in enumerate(messages):
            subject = self.subjects.piece(address, number, len(messages))

            def land(sequence: int, number: int = number, size: int = len(message)) -> None:
                with self._lock:
                    self._unacknowledged -= size
                    self._index.add_piece(sequence, address, number, len(messages), size)

            with self._lock:
                self._unacknowledged += len(message)
            self._send(batch, subject, message, land)

    def _drop(self, batch: "Operation", stream: str, number: int, part: int | None) -> None:
        def gone(sequence: int) -> list[tuple[str, int]]:
            numbers = {number} if part is not None else self._index.numbers(stream, number)
            return [(self.subjects.records(stream, each, part), sequence) for each in numbers]

        self._note(batch, pack_json({"drop": [stream, number, part]}), gone)

    def _truncate(self, batch: "Operation", stream: str, upto: int) -> None:
        def gone(sequence: int) -> list[tuple[str, int]]:
            return [(self.subjects.records(stream), self._index.first_after(stream, upto) or sequence)]

        self._note(batch, pack_json({"truncate": [stream, upto]}), gone)

    def _put(self, batch: "Operation", records: Mapping[str, bytes | None]) -> None:
        self._note(batch, put_note(records))

    def _note(self, operation: "Operation", note: bytes, gone: Gone = lambda _: []) -> None:
        """Append a note, and purge the messages that `gone` returns for it; see `Gone`."""
        if len(note) > self._brokers.client.max_payload - HEADER_BYTES:
            text = f"small records of {len(note)} bytes exceed the brokers' max_payload: raise max_payload"
            raise StorageFailed(text)

        def land(sequence: int) -> None:
            with self._lock:
                purged = gone(sequence)
                self._index.add_note(note)
                self._notes_bytes += len(note)
            for subjects, before in purged:
                self._purges.purge(subjects, before)
            self._compact_if_needed()

        self._send(operation, self.subjects.notes, note, land)

    def _send(self, operation: "Operation", subject: str, payload: bytes, land: Callable[[int], None]) -> None:
        message = Message(subject, payload, operation.expect(land), failed=operation.refuse)
        self._brokers.loop.call_soon_threadsafe(self._sender.append, message)

    def _compact(self, operation: "Operation") -> None:
        """Append all small records again, and purge the earlier notes."""
        if self._last:
            self._last.wait()  # It may still change small records.
        with self._lock:
            chunks = [
                put_note(dict(each)) for each in _chunked(self._index.small, self._brokers.options.note_bytes)
            ]
            self._notes_bytes = sum(map(len, chunks))
        first = list[int]()

        def land(sequence: int) -> None:
            first.append(sequence)
            if len(first) == len(chunks):
                self._purges.purge(self.subjects.notes, first[0])
                self._compacting = False

        for each in chunks:
            self._send(operation, self.subjects.notes, each, land)

    # The method below runs in the brokers' event loop.

    def _compact_if_needed(self) -> None:
        small = sum(map(len, self._index.small.values()))
        due = (
            self._notes_bytes > max(self._brokers.options.notes_bytes, _NOTES_TIMES * small)
            and self._purges.complete
        )
        if due and not self._compacting:
            self._compacting = True
            self.queue.submit(self._compact, 0)


def _chunked(records: Mapping[str, bytes], most_bytes: int) -> Iterator[list[tuple[str, bytes]]]:
    """Split small records into chunks; without records, yield one empty chunk."""
    chunk, size = list[tuple[str, bytes]](), 0
    for name, value in records.items():
        chunk.append((name, value))
        size += len(name) + len(value)
        if size > most_bytes:
            yield chunk
            chunk, size = [], 0
    yield chunk


class Operation:
    """A submitted write, done once all its messages are acknowledged. Safe to use from any thread."""

    def __init__(self, submitted: Submitted, queue: WriteQueue, commits: Durations) -> None:
        self._submitted, self._queue, self._commits = submitted, queue, commits
        self._begun = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._expected, self._closed = 0, False

    def expect(self, land: Callable[[int], None]) -> Callable[[int], None]:
        """Expect one more message. Return the callback for its acknowledgement, which first calls `land`."""
        with self._lock:
            self._expected += 1

        def landed(sequence: int) -> None:
            land(sequence)
            with self._lock:
                self._expected -= 1
            self._end_if_done()

        return landed

    def close(self) -> None:
        """Note that no more messages follow."""
        self._closed = True
        self._end_if_done()

    def refuse(self, error: Exception) -> None:
        """Fail, unless the write has already ended."""
        failure = (
            error
            if isinstance(error, StorageFailed)
            else StorageFailed(f"the log could not be written: {error!r}: restart the service")
        )
        self._end(failure)

    def wait(self) -> None:
        """Wait until the write has ended."""
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
    """Purges of one stream. Each removes only messages dropped by an acknowledged note, up to that note, even if
    it runs late.
    """

    def __init__(self, brokers: Brokers, stream: str) -> None:
        self._brokers, self._stream = brokers, stream
        self._under_way = set[asyncio.Future[None]]()
        self._failed = False

    @property
    def complete(self) -> bool:
        """Whether all purges succeeded, so that the notes about dropped messages are no longer needed."""
        return not self._under_way and not self._failed

    def purge(self, subjects: str, before: int) -> None:
        """Start removing the messages of some subjects before a sequence."""
        task = asyncio.ensure_future(self._purge(subjects, before))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancel(self) -> None:
        """Cancel pending purges. The next owner reads from the notes which messages were dropped."""
        for each in list(self._under_way):
            each.cancel()
        await self.settled()

    async def settled(self) -> None:
        """Wait until no purge is pending."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    async def _purge(self, subjects: str, before: int) -> None:
        try:
            answer = await self._brokers.ask(f"STREAM.PURGE.{self._stream}", {"filter": subjects, "seq": before})
            self._failed |= "error" in answer
        except StorageFailed:
            self._failed = True


class Index:
    """The records of a log, with the messages of each. Add messages in the order of the stream.

    Attributes:
        bytes: size of the messages of all records.
        small: the small records.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.small = dict[str, bytes]()
        self._records = dict[str, dict[tuple[int, int, int], tuple[int, ...]]]()
        self._sizes = dict[Address, int]()
        self._order = dict[str, list[tuple[int, int, int]]]()
        self._unfinished = dict[Address, _Unfinished]()

    def add_piece(self, sequence: int, address: Address, piece: int, pieces: int, size: int) -> None:
        """Add a piece of a record. The last piece makes the record replace an earlier one at its address."""
        partial = self._unfinished.setdefault(address, _Unfinished()) if piece else _Unfinished()
        if len(partial.sequences) != piece:  # The earlier pieces are missing.
            self._unfinished.pop(address, None)
            return
        partial.sequences.append(sequence)
        partial.bytes += size
        if piece + 1 < pieces:
            self._unfinished[address] = partial
            return
        self._unfinished.pop(address, None)
        self._remove(address.stream, [address.numbers])
        insort(self._order.setdefault(address.stream, []), address.numbers)
        self._records.setdefault(address.stream, {})[address.numbers] = tuple(partial.sequences)
        self._sizes[address] = partial.bytes
        self.bytes += partial.bytes

    def add_note(self, note: bytes) -> None:
        """Apply a note, which puts, drops or truncates records."""
        try:
            ((kind, content),) = json.loads(note).items()
            if kind == "put":
                self._put(content)
            elif kind == "truncate":
                stream, upto = content
                self._forget(stream, (0, 0, 0), (upto, LAST_PART, LAST_PART))
            elif kind == "drop":
                stream, number, part = content
                last = (LAST_NUMBER, LAST_PART, LAST_PART) if part is None else (number, part, LAST_PART)
                self._forget(stream, (number, part or 0, 0), last)
            else:
                raise KeyError(kind)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageFailed(
                f"the log has an unknown note ({error!r}): update deltasync, or give the service "
                "another --log-prefix"
            ) from error

    def note_fence(self) -> None:
        """Note a change of owner: the new one does not finish records of its predecessor."""
        self._unfinished.clear()

    def numbers(self, stream: str, first: int) -> set[int]:
        """The numbers from `first` on with records or unfinished records in a stream."""
        unfinished = {each.number for each in self._unfinished if each.stream == stream and each.number >= first}
        return unfinished | {each.number for each, _ in self.between(stream, first, LAST_NUMBER)}

    def between(self, stream: str, first: int, last: int) -> list[tuple[Address, tuple[int, ...]]]:
        """The records with numbers from `first` to `last`, ordered by address."""
        records = self._records.get(stream, {})
        addresses = self._between(stream, (first, 0, 0), (last, LAST_PART, LAST_PART))
        return [(Address(stream, *each), records[each]) for each in addresses]

    def messages_of(self, address: Address) -> tuple[int, ...] | None:
        """The messages of a record; None if it does not exist."""
        return self._records.get(address.stream, {}).get(address.numbers)

    def first_after(self, stream: str, number: int) -> int | None:
        """The first message of a stream's records with greater numbers; None if there is none."""
        return min((sequences[0] for _, sequences in self.between(stream, number + 1, LAST_NUMBER)), default=None)

    def newest(self, stream: str) -> int:
        """The largest number of a stream's records; 0 if it has none."""
        order = self._order.get(stream, [])
        return order[-1][0] if order else 0

    def streams(self) -> list[str]:
        """The streams that have records, sorted."""
        return sorted(stream for stream, records in self._records.items() if records)

    def _between(
        self, stream: str, first: tuple[int, int, int], last: tuple[int, int, int]
    ) -> list[tuple[int, int, int]]:
        order = self._order.get(stream, [])
        return order[bisect_left(order, first) : bisect_left(order, (*last, 0))]

    def _remove(self, stream: str, addresses: Iterable[tuple[int, int, int]]) -> None:
        records = self._records.get(stream, {})
        gone = {each for each in addresses if records.pop(each, None)}
        if gone:
            self._order[stream] = [each for each in self._order[stream] if each not in gone]
            self.bytes -= sum(self._sizes.pop(Address(stream, *each)) for each in gone)

    def _put(self, records: dict[str, str | None]) -> None:
        for name, value in records.items():
            self.small.pop(name, None)
            if value is not None:
                self.small[name] = value.encode("latin-1")

    def _forget(self, stream: str, first: tuple[int, int, int], last: tuple[int, int, int]) -> None:
        self._remove(stream, self._between(stream, first, last))
        partial = [each for each in self._unfinished if each.stream == stream and first <= each.numbers <= last]
        for address in partial:
            del self._unfinished[address]


@dataclass
class _Unfinished:
    """The messages of a record whose last piece has not arrived."""

    sequences: list[int] = field(default_factory=list)
    bytes: int = 0


def put_note(records: Mapping[str, bytes | None]) -> bytes:
    """The note that sets small records, or drops those that are None."""
    texts = {name: None if value is None else value.decode("latin-1") for name, value in records.items()}
    return pack_json({"put": texts})
