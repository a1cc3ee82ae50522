"""The smallest possible log, which shows that the protocol's tests do not depend on LMDB."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from deltasync.base.clock import Durations
from deltasync.log.log_store import LAST_NUMBER, Buffer, LogFull, Record, WriteQueue
from deltasync.log.volume import Volume

Address = tuple[int, int, int]


@dataclass
class MemoryDisk:
    """The part of a `MemoryStore` that survives its process."""

    streams: dict[str, dict[Address, bytes]] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    """A log in memory."""

    def __init__(self, disk: MemoryDisk, max_bytes: int) -> None:
        self._disk = disk
        self._max_bytes = max_bytes
        self.shared = self.refusing = False
        self.capacity, self.volume, self.commits = max_bytes, Volume("log", Path("/")), Durations()
        self.queue = WriteQueue()  # Always empty: what is submitted is there.

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
        if error := _first_error(after):
            return _done(error)
        record = b"".join(payload)
        if self.used_bytes() + len(record) > self._max_bytes:
            self.refusing = True
            return _done(LogFull("the log is full until a checkpoint is written: raise --log-max-bytes"))
        self._disk.streams.setdefault(stream, {})[number, part, index] = record
        return _done()

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        if part is None:
            return self._keep(stream, lambda address: address[0] < number)
        return self._keep(stream, lambda address: address[:2] != (number, part))

    def truncate(self, stream: str, upto: int) -> Future[None]:
        return self._keep(stream, lambda address: address[0] > upto)

    def put(self, name: str, value: bytes | None, *, after: Sequence[Future[None]] = ()) -> Future[None]:
        if error := _first_error(after):
            return _done(error)
        return self.put_all({name: value})

    def put_all(self, records: Mapping[str, bytes | None]) -> Future[None]:
        for name, value in records.items():
            self._disk.small.pop(name, None)
            if value is not None:
                self._disk.small[name] = value
        return _done()

    def read(self, stream: str, first: int = 0, last: int = LAST_NUMBER) -> Iterator[Record]:
        for address, record in sorted(self._disk.streams.get(stream, {}).items()):
            if first <= address[0] <= last:
                yield Record(*address, memoryview(record))

    def newest(self, stream: str) -> int:
        return max((address[0] for address in self._disk.streams.get(stream, {})), default=0)

    def items(self, prefix: str) -> dict[str, bytes]:
        small = sorted(self._disk.small.items())
        return {name[len(prefix) :]: value for name, value in small if name.startswith(prefix)}

    def streams(self) -> list[str]:
        return sorted(name for name, records in self._disk.streams.items() if records)

    def used_bytes(self) -> int:
        records = [record for stream in self._disk.streams.values() for record in stream.values()]
        return sum(map(len, [*records, *self._disk.small.values()]))

    def close(self) -> None:
        pass

    def _keep(self, stream: str, wanted: Callable[[Address], bool]) -> Future[None]:
        records = self._disk.streams.get(stream, {})
        self._disk.streams[stream] = {address: record for address, record in records.items() if wanted(address)}
        return _done()


def _first_error(writes: Sequence[Future[None]]) -> BaseException | None:
    return next((error for write in writes if (error := write.exception())), None)


def _done(failure: BaseException | None = None) -> Future[None]:
    done: Future[None] = Future()
    if failure:
        done.set_exception(failure)
    else:
        done.set_result(None)
    return done
