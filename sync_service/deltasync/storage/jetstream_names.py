"""What a model's log is called among brokers: its stream, and the subjects of what is in it.

    PREFIX_MODEL                                           the stream; "." in a model's name is written "~"
    PREFIX.MODEL.rows.KIND/OWNER.NUMBER.PART.INDEX.PIECE.PIECES   a piece of a record
    PREFIX.MODEL.notes                                     what is said of records, and small records
    PREFIX.MODEL.fences                                    who is the owner from there on

Tokens of subjects, and names of streams, may have all characters of names but the dot.
"""

from typing import NamedTuple

from deltasync.core.errors import StorageFailed

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
