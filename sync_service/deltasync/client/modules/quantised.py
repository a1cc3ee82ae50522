"""The rows of a table in a TBE, as TorchRec quantises them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deltasync.client.modules.tbes import Piece
from deltasync.client.modules.tensor_rows import Bytes, TensorRows
from deltasync.core.delivery import HeldSpec, value_type_of
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec
from deltasync.core.tbe import SCALE_AND_BIAS_BYTES, of_tbe, to_tbe
from deltasync.core.value_types import ValueType

_EXTRA = SCALE_AND_BIAS_BYTES
# By what fbgemm calls them.
_TYPES = {f"int{each.tbe_bits}": each for each in ValueType if each.tbe_bits}


@dataclass(frozen=True)
class QuantisedRows:
    """A table in a TBE, or in several that have some of its rows each, as its place.

    Attributes:
        name: the FQN that its weight has in the module.
        table: the table; its rows are codes, scale and bias.
        pieces: where the rows are, from the first one on.
    """

    name: str
    table: TableSpec
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, name: str, table: TableSpec, pieces: Sequence[Piece]) -> "QuantisedRows":
        """The place of a table.

        Raises:
            Contradiction: what is there is another table, or cannot be written.
        """
        place = cls(name, table, tuple(sorted(pieces, key=lambda piece: (piece.row, piece.column))))
        place._check_type()
        place._check_shape()
        for piece in place.pieces:
            place._memory(piece)
        return place

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`."""
        memories = [self._memory(piece) for piece in self.pieces]
        writes = self._staged_zeros(memories) if reset else []
        for each in rows:
            for piece, memory, some in zip(self.pieces, memories, self._parts(each.ids), strict=True):
                held = _as_held(each.values[some], piece.scale_last)
                writes.append(memory.stage(each.ids[some] - piece.row, held))

        def write_all() -> None:
            for write in writes:
                write()

        return write_all

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        rows = np.empty((len(ids), self.table.dim), np.uint8)
        for piece, some in zip(self.pieces, self._parts(ids), strict=True):
            held = self._memory(piece).read(ids[some] - piece.row)
            _put_as_sent(held, piece.scale_last, rows[some])
        return rows

    def _staged_zeros(self, memories: Sequence[TensorRows]) -> list[Callable[[], None]]:
        row = np.zeros((1, self.table.dim), np.uint8)
        return [
            memory.stage_fill(_as_held(row, piece.scale_last))
            for piece, memory in zip(self.pieces, memories, strict=True)
        ]

    def _parts(self, ids: Ids) -> list[slice]:
        """Which of some ids, in ascending order, each piece has."""
        ends = np.searchsorted(ids, [piece.row for piece in self.pieces[1:]]).tolist()
        return [slice(first, end) for first, end in zip([0, *ends], [*ends, len(ids)], strict=True)]

    def _memory(self, piece: Piece) -> TensorRows:
        try:
            return TensorRows(piece.memory(self.table.dim))
        except Contradiction as error:
            raise Contradiction(f"table {self.table.name!r}: {error}") from None

    def _check_type(self) -> None:
        held = self.pieces[0].value_type
        wanted = value_type_of(self.table)
        if _TYPES.get(held) is wanted:
            return
        advice = (
            f"let the consumer's policy say value_type {_TYPES[held].value}"
            if held in _TYPES
            else f"quantise the module to {' or '.join(_TYPES)}"
        )
        raise Contradiction(
            f"table {self.table.name!r}: rows come as {wanted.value}, the module's TBE holds {held}: {advice}"
        )

    def _check_shape(self) -> None:
        table, pieces = self.table, self.pieces
        dim = table.table_dim if isinstance(table, HeldSpec) else table.dim
        if any(piece.column for piece in pieces):
            raise Contradiction(
                f"table {table.name!r}: {self.name} is sharded by column in the module, each piece quantised "
                "apart: shard it by row or by table"
            )
        ends = [piece.row + piece.rows for piece in pieces]
        whole = [0, *ends] == [*(piece.row for piece in pieces), table.rows]
        if not whole or any(piece.dim != dim for piece in pieces):
            has = ", ".join(f"{piece.row} to {piece.row + piece.rows - 1} x {piece.dim}" for piece in pieces)
            raise Contradiction(
                f"table {table.name!r} is {table.rows} x {dim}, the module has rows {has} of {self.name}"
            )


def _as_held(rows: Values, scale_last: bool) -> Bytes:
    """Rows [n, width] that were sent, as a TBE has them."""
    if scale_last:
        return to_tbe(np.array(rows, np.uint8))
    held: Bytes = np.concatenate([rows[:, -_EXTRA:], rows[:, :-_EXTRA]], axis=1)
    to_tbe(held[:, :_EXTRA])
    return held


def _put_as_sent(held: Bytes, scale_last: bool, sent: Bytes) -> None:
    """Put rows [n, width] that a TBE has into `sent`, as they are sent."""
    first = 0 if scale_last else _EXTRA
    last = sent.shape[1] - first
    sent[:, :last], sent[:, last:] = held[:, first:], held[:, :first]
    of_tbe(sent)
