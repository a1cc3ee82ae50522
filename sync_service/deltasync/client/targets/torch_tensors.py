"""Rows as torch modules hold them: plain, cast, or quantised in an inference TBE."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.parallel import DataParallel, DistributedDataParallel

from deltasync.base.errors import Contradiction
from deltasync.client.targets.numpy_target import check_fit, rows_at, staged_rows
from deltasync.client.targets.torch_compiled import compiled_module_of
from deltasync.core.delivery import HeldSpec, value_type_of
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec, matrix_shape
from deltasync.core.value_types import SCALE_AND_BIAS_BYTES, ValueType, of_tbe, to_tbe

# Where the wrappers of activation checkpointing, FSDP, torch.compile and TorchRec keep what they wrap.
_INSIDE = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_dmp_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all that wraps it."""
    while name := _name_inside(module):
        module = getattr(module, name)
    return module


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of a module without the parts that wrappers add."""
    plain, each = list[str](), module
    for part in name.split("."):
        inner = getattr(each, part, None)
        if not isinstance(inner, nn.Module) or part != _name_inside(each):
            plain.append(part)
        each = inner if isinstance(inner, nn.Module) else _NOTHING
    return ".".join(plain)


_NOTHING = nn.Module()


def _name_inside(module: nn.Module) -> str:
    """The attribute in which a wrapper has what it wraps; empty where a module is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return next((name for name in _INSIDE if name in module._modules), "")


Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TensorRows:
    """The rows of a tensor [rows, width], each of which lies in one piece.

    Attributes:
        held: the tensor.
    """

    held: torch.Tensor

    def stage(self, ids: Ids, values: Values) -> Callable[[], None]:
        """Prepare rows ([n, width], of the tensor's type or of one as wide), and return what writes them.

        Raises:
            Contradiction: the tensor has no such rows; nothing was written.
        """
        if self._in_host_memory:
            return self._marked(staged_rows(self._bytes, ids, np.ascontiguousarray(values).view(np.uint8)))
        check_fit(self.held.shape[0], self.held.shape[1] * self.held.itemsize, ids, values)
        held, at, rows = self.held, torch.from_numpy(ids.copy()).to(self.held.device), self._on_device(values)

        def write() -> None:
            held.index_copy_(0, at, rows)

        return write

    def stage_fill(self, row: Values) -> Callable[[], None]:
        """The same for one row ([1, width]) that all rows become."""
        if self._in_host_memory:
            items, item = _items(self._bytes), _items(np.ascontiguousarray(row).view(np.uint8))

            def fill() -> None:
                items[:] = item

            return self._marked(fill)
        held, rows = self.held, self._on_device(row)

        def write() -> None:
            held.copy_(rows.expand_as(held))

        return write

    def read(self, ids: Ids) -> Bytes:
        """The rows `ids` ([n]) as bytes [n, width x bytes of a number], in host memory."""
        if self._in_host_memory:
            return rows_at(self._bytes, ids).view(np.uint8)
        at = torch.from_numpy(ids.copy()).to(self.held.device)
        rows: Bytes = self.held.index_select(0, at).cpu().view(torch.uint8).numpy()
        return rows

    @property
    def _in_host_memory(self) -> bool:
        return self.held.device.type == "cpu"

    def _marked(self, write: Callable[[], None]) -> Callable[[], None]:
        """What writes, and has autograd know that the tensor has changed."""
        held = self.held

        def write_and_mark() -> None:
            write()
            if not held.is_inference():
                increment_version(held)

        return write_and_mark

    @property
    def _bytes(self) -> Bytes:
        held: Bytes = self.held.view(torch.uint8).numpy()
        return held

    def _on_device(self, values: Values) -> torch.Tensor:
        # A copy, since torch has no read-only tensors.
        rows = torch.empty(len(values), self.held.shape[1], dtype=self.held.dtype)
        rows.view(torch.uint8).numpy()[:] = np.ascontiguousarray(values).view(np.uint8)
        return rows.to(self.held.device)


def _items(rows: Bytes) -> NDArray[np.void]:
    """Rows [n, width] as [n] items, which NumPy copies several times as fast as it copies rows."""
    items: NDArray[np.void] = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    return items


_HALVES = {torch.float16: ValueType.FP16, torch.bfloat16: ValueType.BF16}


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of a module, as the place of a table of its type."""

    module: nn.Module
    name: str
    table: TableSpec

    @property
    def dtype(self) -> torch.dtype:
        """The type that it must have."""
        return torch_type(self.table)

    @property
    def rows(self) -> torch.Tensor:
        """Its live view [rows, dim].

        Raises:
            Contradiction: it has another shape or type than expected, or cannot be written by rows.
        """
        tensor = named_tensor(self.module, self.name)
        self._check(tensor)
        return tensor.view(self.table.rows, self.table.dim)

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`."""
        rows_held, compiled = self.rows, compiled_module_of(self.module, self.name)
        held = TensorRows(compiled[0].spare(compiled[1]).view(rows_held.shape) if compiled else rows_held)
        zeros = np.zeros((1, self.table.dim * self.dtype.itemsize), np.uint8)
        writes = [held.stage_fill(zeros)] if reset else []
        writes += [held.stage(each.ids, each.values) for each in rows]

        def write_all() -> None:
            for write in writes:
                write()

        if not compiled:
            return write_all
        with torch.inference_mode():
            write_all()  # Into constants that are not served.
        return compiled[0].swap

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        return TensorRows(self.rows).read(ids).view(self.table.dtype)

    def _check(self, tensor: torch.Tensor) -> None:
        table = self.table
        what = f"the module has {self.name} of shape {list(tensor.shape)} and type {tensor.dtype}"
        shaped = matrix_shape(tensor.shape) == (table.rows, table.dim)
        shaped &= table.shape in (None, tuple(tensor.shape))
        if _for_tbe(table) or not shaped or tensor.dtype != self.dtype:
            raise Contradiction(f"table {table.name!r} is {_form(table)}, {what}{self._advice(tensor)}")
        if tensor.is_meta or not tensor.is_contiguous():
            where = "on the meta device" if tensor.is_meta else "that does not lie in memory row by row"
            raise Contradiction(f"table {table.name!r}: {what} {where}, which cannot be written")

    def _advice(self, tensor: torch.Tensor) -> str:
        table = self.table
        if table.kind is TableKind.EMBEDDING and not tensor.dtype.is_floating_point:
            return (
                ", which looks quantised: give the target the whole collection, as it was before it was scripted "
                "or traced"
            )
        if _for_tbe(table):
            return ": quantise the module, or let the consumer's policy say another value_type"
        same_shape = matrix_shape(tensor.shape) == (table.rows, table.dim)
        if same_shape and self.dtype.is_floating_point and tensor.dtype in _HALVES:
            return f": let the consumer's policy say value_type {_HALVES[tensor.dtype].value}"
        return ""


def named_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer, detached: of a compiled module, what the compiled code reads."""
    if compiled := compiled_module_of(module, name):
        return compiled[0].served(compiled[1])
    # Found by its name each time: `module.to(...)` puts other memory behind a name.
    found: Any = reduce(getattr, name.split("."), module)
    tensor: torch.Tensor = found.detach()
    return tensor


def torch_type(table: TableSpec) -> torch.dtype:
    """The type of a table's values, as torch calls it."""
    return torch.from_numpy(np.empty(0, table.dtype)).dtype


def value_types_of(tables: Sequence[TableSpec]) -> set[ValueType]:
    """The types in which the rows of embedding tables come."""
    return {value_type_of(table) for table in tables if table.kind is TableKind.EMBEDDING}


def casts(table: TableSpec, dtype: torch.dtype, types: Collection[ValueType]) -> bool:
    """Whether a tensor of type `dtype` may hold a table of another type.

    Always, if it is the wider one. A narrower one holds an embedding table whose rows come in its very type, and
    loses nothing; and what goes with embedding tables, if one of these comes in its type, or quantised for a TBE.

    Args:
        table: the table.
        dtype: of the tensor.
        types: in which the consumer's embedding tables come.
    """
    own = torch_type(table)
    if own == dtype or not (own.is_floating_point and dtype.is_floating_point):
        return False
    if torch.promote_types(own, dtype) == dtype:
        return True
    half = _HALVES.get(dtype)
    if table.kind is TableKind.EMBEDDING:
        return half is value_type_of(table)
    return half is not None and any(each is half or each.tbe_bits for each in types)


def _for_tbe(table: TableSpec) -> TypeGuard[HeldSpec]:
    return isinstance(table, HeldSpec) and table.value_type.tbe_bits is not None


def _form(table: TableSpec) -> str:
    if _for_tbe(table):
        return f"{table.rows} x {table.table_dim} {table.value_type.value}"
    shape = f"of shape {list(table.shape)} and type" if table.shape is not None else f"{table.rows} x {table.dim}"
    return f"{shape} {torch_type(table)}"


# Kept with the module, so that another target over the same module, or a copy of it, knows them.
_ROUNDED = "_deltasync_rounded_rows"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CastTensor(Tensor):
    """A floating parameter or buffer, as the place of a floating table of another type.

    The module has the rows rounded, or in more bits. `read` gives the very rows that were written where the module
    still has what became of them, and others where it has not. Rows of an embedding table fit; what rounding takes
    off others is kept beside the module.

    Attributes:
        held_type: the type that the tensor must have.
    """

    held_type: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The type that it must have."""
        return self.held_type

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`."""
        cast = [each.with_values(each.table, self._bits(self._cast(each.values))) for each in rows]
        write_cast = super().stage(cast, reset=reset)
        if not self._rounds:
            return write_cast
        exact = self._exact_rows().copy()
        if reset:
            exact[:] = 0
        for each in rows:
            exact[each.ids] = each.values

        def write() -> None:
            write_cast()
            self.module.__dict__.setdefault(_ROUNDED, {})[self.name] = exact

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        held = self._held(ids)
        rows = self._exact_rows()[ids] if self._rounds else self._back(held)
        cast = self._cast(rows)
        same = torch.from_numpy(self._bits(held) == self._bits(cast)) | (held.isnan() & cast.isnan())
        damaged: Values = np.bitwise_xor(rows.view(_bits_of(rows)), (~same).numpy(), dtype=_bits_of(rows))
        return damaged.view(rows.dtype)

    @property
    def _rounds(self) -> bool:
        """Whether rows lose something."""
        wider = torch.promote_types(torch_type(self.table), self.held_type) == self.held_type
        return not wider and self.table.kind is not TableKind.EMBEDDING

    def _exact_rows(self) -> Values:
        """All rows as they were written, or as the module has them where none were."""
        rounded: dict[str, Values] = self.module.__dict__.get(_ROUNDED, {})
        exact = rounded.get(self.name)
        if exact is not None and (exact.shape, exact.dtype) == (tuple(self.rows.shape), self.table.dtype):
            return exact
        return self._back(self._held(np.arange(self.table.rows)))

    def _held(self, ids: Ids) -> torch.Tensor:
        bits = TensorRows(self.rows).read(ids).view(f"i{self.held_type.itemsize}")
        return torch.from_numpy(bits).view(self.held_type)

    def _cast(self, rows: Values) -> torch.Tensor:
        return torch.from_numpy(np.array(rows)).to(self.held_type)

    def _back(self, held: torch.Tensor) -> Values:
        rows: Values = held.to(torch_type(self.table)).numpy()
        return rows

    @staticmethod
    def _bits(tensor: torch.Tensor) -> Values:
        """Its numbers' bits, since NumPy has no bf16."""
        bits: Values = tensor.view(_INTEGERS[tensor.itemsize]).numpy()
        return bits


def _bits_of(rows: Values) -> np.dtype[np.generic]:
    return np.dtype(f"u{rows.itemsize}")


_PRUNING = ("index_remappings_array", "index_remapping_hash_table")
_WRITABLE = ("HOST", "DEVICE")
# What collections call their tables.
TABLES_OF = ("embedding_bags", "embeddings")


@dataclass(eq=False)
class Tbe:
    """One of a module's TBEs.

    Attributes:
        name: what to call it in a sentence.
        module: fbgemm's module.
    """

    name: str
    module: Any
    _views: list[torch.Tensor] = field(default_factory=list)
    _found: tuple[tuple[int, int], ...] = ()

    def view(self, index: int) -> torch.Tensor:
        """The live memory of table number `index`: uint8 [rows, bytes of a row and what it is padded with].

        Raises:
            Contradiction: there is none, or none that may be written.
        """
        # Found anew where it has moved; not each time, since those of all tables are found together.
        found = tuple((each.data_ptr(), each.numel()) for each in self.memory)
        if found != self._found:
            self._views, self._found = self._views_now(), found
        return self._views[index]

    def check(self) -> None:
        """Check that its rows are those that are looked up, and lie where they can be written.

        Raises:
            Contradiction: they are not, or do not.
        """
        module = self.module
        pruned = [name for name in _PRUNING if getattr(module, name).numel()]
        if pruned or module.index_remapping_hash_table_cpu is not None:
            raise Contradiction(f"{self.name} is pruned: it has only some rows; quantise the model unpruned")
        if hasattr(module, "kv_embedding_cache"):
            raise Contradiction(f"{self.name} keeps rows by key: make the collection without virtual tables")
        if module.scale_bias_size_in_bytes != SCALE_AND_BIAS_BYTES:
            size = module.scale_bias_size_in_bytes
            raise Contradiction(f"{self.name} has {size} bytes of scale and bias in a row, expected 4")

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What it keeps rows in."""
        return self.module.weights_host, self.module.weights_dev, self.module.weights_uvm

    def _views_now(self) -> list[torch.Tensor]:
        if not self.module.weight_initialized:
            raise Contradiction(f"{self.name} has no memory yet: call its initialize_weights()")
        if any(each.is_meta for each in self.memory):
            raise Contradiction(f"{self.name} is on the meta device, which cannot be written")
        try:
            views = [each[0] for each in self.module.split_embedding_weights_with_scale_bias(0)]
        except RuntimeError:  # It cuts them out of its memory, and shapes what it has cut.
            raise Contradiction(f"{self.name}: its memory is not as long as its tables") from None
        extents = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in views)
        if any(end > begin for (_, end), (begin, _) in pairwise(extents)):
            raise Contradiction(f"{self.name}: its tables lie in one another's memory")
        return views


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a table, in a TBE.

    Attributes:
        tbe: the TBE.
        index: the table's number in it.
        row: the id of the first one.
        column: the first column.
    """

    tbe: Tbe
    index: int
    row: int = 0
    column: int = 0

    @property
    def table(self) -> str:
        """The table's name in its collection."""
        return str(self._spec[0])

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._spec[1])

    @property
    def dim(self) -> int:
        """Values of a row."""
        return int(self._spec[2])

    @property
    def value_type(self) -> str:
        """The type of values as fbgemm calls it: int8, int4, fp16 and so on."""
        return str(self._spec[3].value)

    def memory(self, width: int) -> torch.Tensor:
        """Their live memory [rows, width], without padding.

        Raises:
            Contradiction: they have none that could be written.
        """
        self.tbe.check()
        location = self._spec[4].name
        if location not in _WRITABLE:
            raise Contradiction(
                f"{self.tbe.name} keeps rows in {location} memory; expected {' or '.join(_WRITABLE)}"
            )
        view, padded = self.tbe.view(self.index), self._padded(width)
        if (view.shape, view.stride(), view.dtype) != ((self.rows, padded), (padded, 1), torch.uint8):
            raise Contradiction(
                f"{self.tbe.name} holds rows as {view.dtype} {list(view.shape)}, {view.stride()} apart; expected "
                f"bytes [{self.rows}, {padded}]: {width} aligned to {self.tbe.module.row_alignment}"
            )
        return view[:, :width]

    @property
    def scale_last(self) -> bool:
        """Whether scale and bias come at the end of a row, and not first."""
        return bool(self.tbe.module.reverse_qparam)

    @property
    def _spec(self) -> Any:
        return self.tbe.module.embedding_specs[self.index]

    def _padded(self, width: int) -> int:
        alignment: int = self.tbe.module.row_alignment
        return -(-width // alignment) * alignment


def tables_in_tbes(module: nn.Module) -> dict[str, list[Piece]]:
    """The tables in the TBEs of a module's quantised collections, by the names that their weights have there."""
    tables: dict[str, list[Piece]] = {}
    for owner, collection in module.named_modules():
        kind = TABLES_OF[not hasattr(collection, "embedding_bag_configs")]
        for piece in _pieces(owner, collection):
            name = f"{owner}.{kind}.{piece.table}.weight".removeprefix(".")
            tables.setdefault(name, []).append(piece)
    return tables


def tbe_prefixes(module: nn.Module, tables: Iterable[str]) -> tuple[str, ...]:
    """How the names of parameters and buffers begin that a module's TBEs have, or share with their `tables`."""
    registered = [f"{name}." for name, each in module.named_modules() if _is_tbe(each)]
    return (*registered, *(name.removesuffix("weight") for name in tables))


def tbe_memory(module: nn.Module) -> list[torch.Tensor]:
    """What a module's TBEs keep rows in."""
    tbes = {piece.tbe for pieces in tables_in_tbes(module).values() for piece in pieces}
    return [each for tbe in tbes for each in tbe.memory]


def _pieces(owner: str, collection: Any) -> Iterator[Piece]:
    sharded: dict[Any, Any] = getattr(collection, "_tbes_configs", {})
    tbes = sharded or [each for each in getattr(collection, "_emb_modules", ()) if _is_tbe(each)]
    for number, module in enumerate(tbes):
        tbe = Tbe(f"TBE {number} of {owner or 'the module'}", module)
        for index in range(len(module.embedding_specs)):
            config = sharded[module].embedding_tables[index] if sharded else None
            yield Piece(tbe, index, *(config.local_metadata.shard_offsets if config else ()))


def _is_tbe(module: Any) -> bool:
    return hasattr(module, "embedding_specs") and hasattr(module, "split_embedding_weights_with_scale_bias")


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
