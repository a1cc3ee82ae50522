"""Where each record of a log is in its JetStream stream, by name and address."""

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deltasync.base.errors import StorageFailed
from deltasync.log.log_store import LAST_NUMBER, LAST_PART

_DOT = "~"  # In no name of a model or a consumer.


class Address(NamedTuple):
    """Where a record of the log is: number, part and index in a stream."""

    stream: str
    number: int
    part: int
    at: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Number, part and index."""
        return self[1:]


class Names:
    """The names of one model's log."""

    def __init__(self, prefix: str, model: str) -> None:
        self.stream = f"{prefix}_{_written(model)}"
        self._root = f"{prefix}.{_written(model)}"
        self.subjects = f"{self._root}.>"
        self.rows, self.notes = f"{self._root}.rows.>", f"{self._root}.notes"
        self.fences = f"{self._root}.fences"

    def piece(self, address: Address, piece: int, pieces: int) -> str:
        """The subject of one of the pieces of a record."""
        return f"{self._rows_of(address.stream)}.{'.'.join(map(str, address[1:]))}.{piece}.{pieces}"

    def records(self, stream: str, number: int | None = None, part: int | None = None) -> str:
        """The subjects of the records of a stream, of a number in it, or of a part of that."""
        found = [str(each) for each in (number, part) if each is not None]
        return ".".join([self._rows_of(stream), *found, ">"])

    def parsed(self, subject: str) -> tuple[Address, int, int]:
        """What a subject is that of: a record, which piece of it, and of how many.

        Raises:
            StorageFailed: it is none of these.
        """
        try:
            kind, *numbers = subject.removeprefix(f"{self._root}.rows.").split(".")
            number, part, index, piece, pieces = map(int, numbers)
        except ValueError as error:
            raise StorageFailed(
                f"stream {self.stream} has a message that is none of the log's: {subject}: give the service "
                "another --log-prefix"
            ) from error
        return Address(_read(kind), number, part, index), piece, pieces

    def _rows_of(self, stream: str) -> str:
        return f"{self._root}.rows.{_written(stream)}"


def model_of(prefix: str, stream: str) -> str | None:
    """The model whose log a stream is; None of a stream that is none."""
    before, _, name = stream.partition("_")
    return _read(name) if before == prefix and name else None


def _written(name: str) -> str:
    return name.replace(".", _DOT)


def _read(name: str) -> str:
    return name.replace(_DOT, ".")


Record = tuple[int, ...]  # The messages of its pieces.


def put_note(records: Mapping[str, bytes | None]) -> bytes:
    """The message that small records are these, or are no more."""
    texts = {name: None if value is None else value.decode("latin-1") for name, value in records.items()}
    return json.dumps({"put": texts}, separators=(",", ":")).encode()


def drop_note(stream: str, number: int, part: int | None) -> bytes:
    """The message that records are no more: from a number on, or of one part of it."""
    return json.dumps({"drop": [stream, number, part]}).encode()


def truncate_note(stream: str, upto: int) -> bytes:
    """The message that the records up to a number are no more."""
    return json.dumps({"truncate": [stream, upto]}).encode()


def fence_note(process: str, epoch: int) -> bytes:
    """The message that a process is the owner from here on."""
    return json.dumps({"process": process, "epoch": epoch}).encode()


@dataclass
class _Unfinished:
    sequences: list[int] = field(default_factory=list)
    bytes: int = 0


class Index:
    """The records that there are after all messages that were added to it, in their order.

    Attributes:
        bytes: of the messages of all records.
        small: the small records.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.small = dict[str, bytes]()
        self._records = dict[str, dict[tuple[int, int, int], Record]]()
        self._sizes = dict[Address, int]()
        self._order = dict[str, list[tuple[int, int, int]]]()
        self._unfinished = dict[Address, _Unfinished]()

    def add_piece(self, sequence: int, address: Address, piece: int, pieces: int, size: int) -> None:
        """Have a piece of a record: all of them are there before it is, instead of the one there was."""
        found = self._unfinished.setdefault(address, _Unfinished()) if piece else _Unfinished()
        if len(found.sequences) != piece:  # What came before it was never finished.
            self._unfinished.pop(address, None)
            return
        found.sequences.append(sequence)
        found.bytes += size
        if piece + 1 < pieces:
            self._unfinished[address] = found
            return
        self._unfinished.pop(address, None)
        self._remove(address.stream, [address.numbers])
        insort(self._order.setdefault(address.stream, []), address.numbers)
        self._records.setdefault(address.stream, {})[address.numbers] = tuple(found.sequences)
        self._sizes[address] = found.bytes
        self.bytes += found.bytes

    def add_note(self, note: bytes) -> None:
        """Have what a message says of records.

        Raises:
            StorageFailed: it says nothing that is known.
        """
        try:
            ((kind, said),) = json.loads(note).items()
            _KINDS[kind](self, said)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageFailed(
                f"the log has a note that cannot be understood ({error!r}): update deltasync, or give the service "
                "another --log-prefix"
            ) from error

    def note_fence(self) -> None:
        """Have another owner: with what was never finished nobody goes on."""
        self._unfinished.clear()

    def numbers(self, stream: str, first: int) -> set[int]:
        """The numbers from `first` on that a stream has records of, or pieces of some."""
        found = {each.number for each, _ in self.between(stream, first, LAST_NUMBER)}
        return found | {each.number for each in self._unfinished if each.stream == stream and each.number >= first}

    def between(self, stream: str, first: int, last: int) -> list[tuple[Address, Record]]:
        """The records with numbers from `first` to `last`, in the order of their addresses."""
        records = self._records.get(stream, {})
        addresses = self._between(stream, (first, 0, 0), (last, LAST_PART, LAST_PART))
        return [(Address(stream, *each), records[each]) for each in addresses]

    def first_after(self, stream: str, number: int) -> int | None:
        """The first message of the records of a stream with greater numbers; None if there are none."""
        return min((found[0] for _, found in self.between(stream, number + 1, LAST_NUMBER)), default=None)

    def streams(self) -> list[str]:
        """The streams that have records."""
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

    def _drop(self, said: list[Any]) -> None:
        stream, number, part = said
        first = (number, part or 0, 0)
        last = (number, part, LAST_PART) if part is not None else (LAST_NUMBER, LAST_PART, LAST_PART)
        self._forget(stream, first, last)

    def _truncate(self, said: list[Any]) -> None:
        stream, upto = said
        self._forget(stream, (0, 0, 0), (upto, LAST_PART, LAST_PART))

    def _forget(self, stream: str, first: tuple[int, int, int], last: tuple[int, int, int]) -> None:
        self._remove(stream, self._between(stream, first, last))
        for address in [
            each for each in self._unfinished if each.stream == stream and first <= each.numbers <= last
        ]:
            del self._unfinished[address]


_KINDS: dict[str, Callable[[Index, Any], None]] = {
    "put": Index._put,
    "drop": Index._drop,
    "truncate": Index._truncate,
}
