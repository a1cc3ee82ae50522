"""The places of tables in a torch module: a tensor, a tensor of another type, or quantised rows in a TBE.

Each place implements `torch_binding.TablePlace`.
"""

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
from deltasync.client.targets.numpy_target import Bytes, check_fit, rows_at, staged_rows
from deltasync.client.targets.target import BatchDigests
from deltasync.client.targets.torch_compiled import compiled_module_of
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.table_form import ReplicaSpec, value_type_of
from deltasync.core.tables import TableKind, TableSpec, matrix_shape
from deltasync.core.value_types import SCALE_AND_BIAS_BYTES, ValueType, of_tbe, to_tbe

_HALVES = {torch.float16: ValueType.FP16, torch.bfloat16: ValueType.BF16}


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer as the place of a table of its own type."""

    module: nn.Module
    name: str
    table: TableSpec

    @property
    def dtype(self) -> torch.dtype:
        """The type that the tensor must have."""
        return torch_type(self.table)

    @property
    def rows(self) -> torch.Tensor:
        """The live view [rows, dim], or an error: see `check`."""
        return self.check().view(self.table.rows, self.table.dim)

    def check(self) -> torch.Tensor:
        """Check that the table fits the tensor; return the tensor.

        Raises:
            Contradiction: the tensor has another shape or type, or cannot be written by rows.
        """
        table, tensor = self.table, named_tensor(self.module, self.name)
        what = f"the module has {self.name} of shape {list(tensor.shape)} and type {tensor.dtype}"
        shaped = matrix_shape(tensor.shape) == (table.rows, table.dim)
        exact = shaped and table.shape in (None, tuple(tensor.shape))
        if _for_tbe(table) or not exact or tensor.dtype != self.dtype:
            advice = self._advice(tensor, shaped=shaped)
            raise Contradiction(f"table {table.name!r} is {_form(table)}, {what}{advice}")
        if tensor.is_meta or not tensor.is_contiguous():
            where = "on the meta device" if tensor.is_meta else "that is not contiguous"
            raise Contradiction(f"table {table.name!r}: {what} {where}, which cannot be written")
        return tensor

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], BatchDigests | None]:
        """See `TablePlace`."""
        memory, compiled = self.rows, compiled_module_of(self.module, self.name)
        if compiled:
            memory = compiled[0].spare(compiled[1]).view(memory.shape)
        zeros = np.zeros((1, self.table.dim * self.dtype.itemsize), np.uint8) if reset else None
        digested = self.dtype == torch_type(self.table)
        write = TensorRows(memory).stage([(each.ids, each.values) for each in rows], zeros, digested=digested)
        if not compiled:
            return write
        with torch.inference_mode():
            digests = write()  # Spare constants have no readers until the swap.

        def swap() -> BatchDigests | None:
            compiled[0].swap()
            return digests

        return swap

    def read(self, ids: Ids) -> Values:
        """See `TablePlace`."""
        return TensorRows(self.rows).read(ids).view(self.table.dtype)

    def _advice(self, tensor: torch.Tensor, *, shaped: bool) -> str:
        if self.table.kind is TableKind.EMBEDDING and not tensor.dtype.is_floating_point:
            return ", which looks quantised: pass the whole collection to the target, not a scripted or traced one"
        if _for_tbe(self.table):
            return ": quantise the module, or set another value_type in the consumer's policy"
        if shaped and self.dtype.is_floating_point and tensor.dtype in _HALVES:
            return f": set value_type {_HALVES[tensor.dtype].value} in the consumer's policy"
        return ""


# Stored in the module, so that another target with the same module, or with a copy of it, finds them.
_ROUNDED = "_deltasync_rounded_rows"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CastTensor(Tensor):
    """A floating-point parameter or buffer as the place of a floating-point table of another type.

    The tensor has the rows in a narrower or wider type. If they are unchanged, `read` returns the original rows,
    otherwise rows with a flipped bit. For embedding tables the cast is exact. For other tables, the original rows
    are stored beside the module.

    Attributes:
        held_type: the type that the tensor must have.
    """

    held_type: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The type that the tensor must have."""
        return self.held_type

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], BatchDigests | None]:
        """See `TablePlace`."""
        cast = [each.with_values(each.table, _bits(self._cast(each.values))) for each in rows]
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
        """See `TablePlace`."""
        actual = self._held(ids)
        rows = self._exact_rows()[ids] if self._rounds else self._back(actual)
        cast, unsigned = self._cast(rows), np.dtype(f"u{rows.itemsize}")
        same = torch.from_numpy(_bits(actual) == _bits(cast)) | (actual.isnan() & cast.isnan())
        # Damage must show: flip a bit in rows that differ.
        damaged: Values = np.bitwise_xor(rows.view(unsigned), (~same).numpy(), dtype=unsigned)
        return damaged.view(rows.dtype)

    @property
    def _rounds(self) -> bool:
        """Whether the cast loses precision."""
        wider = torch.promote_types(torch_type(self.table), self.held_type) == self.held_type
        return not wider and self.table.kind is not TableKind.EMBEDDING

    def _exact_rows(self) -> Values:
        """All original rows, or the module's rows if none were written."""
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

    def _back(self, tensor: torch.Tensor) -> Values:
        rows: Values = tensor.to(torch_type(self.table)).numpy()
        return rows


def _bits(tensor: torch.Tensor) -> Values:
    """The bits of a tensor's numbers as integers, since NumPy has no bf16."""
    bits: Values = tensor.view(_INTEGERS[tensor.itemsize]).numpy()
    return bits


def casts(table: TableSpec, dtype: torch.dtype, types: Collection[ValueType]) -> bool:
    """Whether a tensor of type `dtype` may be the place of a table of another type.

    A wider type is always allowed. A narrower type is allowed for an embedding table whose rows are sent in that
    type, and for other tables if some embedding table is sent in that type, or quantised for a TBE.

    Args:
        table: the table.
        dtype: the tensor's type.
        types: the value types of the consumer's embedding tables.
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


def value_types_of(tables: Sequence[TableSpec]) -> set[ValueType]:
    """The value types of embedding tables."""
    return {value_type_of(table) for table in tables if table.kind is TableKind.EMBEDDING}


def torch_type(table: TableSpec) -> torch.dtype:
    """The torch type of a table's values."""
    return torch.from_numpy(np.empty(0, table.dtype)).dtype


def _for_tbe(table: TableSpec) -> TypeGuard[ReplicaSpec]:
    return isinstance(table, ReplicaSpec) and table.value_type.tbe_bits is not None


def _form(table: TableSpec) -> str:
    if _for_tbe(table):
        return f"{table.rows} x {table.table_dim} {table.value_type.value}"
    shape = f"of shape {list(table.shape)} and type" if table.shape is not None else f"{table.rows} x {table.dim}"
    return f"{shape} {torch_type(table)}"


# The attributes of collections that contain the tables.
TABLES_OF = ("embedding_bags", "embeddings")
# Value types by fbgemm's name.
_TBE_TYPES = {f"int{each.tbe_bits}": each for each in ValueType if each.tbe_bits}
_PRUNING = ("index_remappings_array", "index_remapping_hash_table")
_WRITABLE = ("HOST", "DEVICE")


@dataclass(frozen=True)
class QuantisedRows:
    """The place of a table in one TBE, or in several if it is sharded by row.

    Attributes:
        name: the FQN of the table's weight in the module.
        table: the table; its rows are scale, bias and codes.
        shards: the shards with its rows, in row order.
    """

    name: str
    table: TableSpec
    shards: tuple["TbeShard", ...]

    @classmethod
    def of(cls, name: str, table: TableSpec, shards: Sequence["TbeShard"]) -> "QuantisedRows":
        """The place of a table.

        Raises:
            Contradiction: the shards do not match the table, or cannot be written.
        """
        place = cls(name, table, tuple(sorted(shards, key=lambda shard: (shard.row, shard.column))))
        place._check_type()
        place._check_shape()
        for shard in place.shards:
            place._memory(shard)
        return place

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `TablePlace`."""
        slices = [self._slices(each.ids) for each in rows]
        writes = list[Callable[[], object]]()
        for number, shard in enumerate(self.shards):
            some = [
                (each.ids[part[number]] - shard.row, _to_tbe(each.values[part[number]], shard.scale_last))
                for each, part in zip(rows, slices, strict=True)
            ]
            zeros = _to_tbe(np.zeros((1, self.table.dim), np.uint8), shard.scale_last) if reset else None
            writes.append(self._memory(shard).stage(some, fill=zeros))

        def write_all() -> None:
            for write in writes:
                write()

        return write_all

    def read(self, ids: Ids) -> Values:
        """See `TablePlace`."""
        rows = np.empty((len(ids), self.table.dim), np.uint8)
        for shard, some in zip(self.shards, self._slices(ids), strict=True):
            stored = self._memory(shard).read(ids[some] - shard.row)
            rows[some] = np.roll(stored, SCALE_AND_BIAS_BYTES, axis=1) if shard.scale_last else stored
            of_tbe(rows[some])
        return rows

    def _slices(self, ids: Ids) -> list[slice]:
        """The slice of ascending ids that belongs to each shard."""
        ends = np.searchsorted(ids, [shard.row for shard in self.shards[1:]]).tolist()
        return [slice(first, end) for first, end in zip([0, *ends], [*ends, len(ids)], strict=True)]

    def _memory(self, shard: "TbeShard") -> "TensorRows":
        try:
            return TensorRows(shard.memory(self.table.dim))
        except Contradiction as error:
            raise Contradiction(f"table {self.table.name!r}: {error}") from None

    def _check_type(self) -> None:
        own, sent = self.shards[0].value_type, value_type_of(self.table)
        if _TBE_TYPES.get(own) is sent:
            return
        advice = (
            f"set value_type {_TBE_TYPES[own].value} in the consumer's policy"
            if own in _TBE_TYPES
            else f"quantise the module to {' or '.join(_TBE_TYPES)}"
        )
        raise Contradiction(
            f"table {self.table.name!r}: rows are sent as {sent.value}, the module's TBE has {own}: {advice}"
        )

    def _check_shape(self) -> None:
        table, shards = self.table, self.shards
        dim = table.table_dim if isinstance(table, ReplicaSpec) else table.dim
        if any(shard.column for shard in shards):
            raise Contradiction(
                f"table {table.name!r}: {self.name} is sharded by column in the module, so each piece is "
                "quantised separately: shard it by row or by table"
            )
        ends = [shard.row + shard.rows for shard in shards]
        whole = [0, *ends] == [*(shard.row for shard in shards), table.rows]
        if not whole or any(shard.dim != dim for shard in shards):
            has = ", ".join(f"{shard.row} to {shard.row + shard.rows - 1} x {shard.dim}" for shard in shards)
            raise Contradiction(
                f"table {table.name!r} is {table.rows} x {dim}, the module has rows {has} of {self.name}"
            )


def _to_tbe(rows: Values, scale_last: bool) -> Bytes:
    """Convert rows [n, width] from the form on the wire to the form of a TBE."""
    stored: Bytes = to_tbe(np.array(rows, np.uint8))
    return np.roll(stored, -SCALE_AND_BIAS_BYTES, axis=1) if scale_last else stored


@dataclass(frozen=True, eq=False)
class TbeShard:
    """The rows of one table in a TBE.

    Attributes:
        tbe: the TBE.
        index: the index of the table in the TBE.
        row: the id of the first row.
        column: the first column.
    """

    tbe: "Tbe"
    index: int
    row: int = 0
    column: int = 0

    @property
    def table(self) -> str:
        """The table's name in its collection."""
        return str(self._spec[0])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self._spec[1])

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return int(self._spec[2])

    @property
    def value_type(self) -> str:
        """fbgemm's name for the type of values: int8, int4, fp16 and so on."""
        return str(self._spec[3].value)

    @property
    def scale_last(self) -> bool:
        """Whether scale and bias are at the end of a row instead of the start."""
        return bool(self.tbe.module.reverse_qparam)

    def memory(self, width: int) -> torch.Tensor:
        """The rows' live memory [rows, width], without padding.

        Raises:
            Contradiction: the memory cannot be written.
        """
        self.tbe.check()
        location = self._spec[4].name
        if location not in _WRITABLE:
            raise Contradiction(
                f"{self.tbe.name} has rows in {location} memory; expected {' or '.join(_WRITABLE)}"
            )
        alignment: int = self.tbe.module.row_alignment
        view, padded = self.tbe.view(self.index), -(-width // alignment) * alignment
        if (view.shape, view.stride(), view.dtype) != ((self.rows, padded), (padded, 1), torch.uint8):
            raise Contradiction(
                f"{self.tbe.name} has rows as {view.dtype} {list(view.shape)} with strides {view.stride()}; "
                f"expected bytes [{self.rows}, {padded}]: {width} aligned to {alignment}"
            )
        return view[:, :width]

    @property
    def _spec(self) -> Any:
        return self.tbe.module.embedding_specs[self.index]


@dataclass(eq=False)
class Tbe:
    """One of a module's TBEs.

    Attributes:
        name: its name in errors.
        module: fbgemm's module.
    """

    name: str
    module: Any
    _views: list[torch.Tensor] = field(default_factory=list)
    _viewed: tuple[tuple[int, int], ...] = ()

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The tensors with the rows."""
        return self.module.weights_host, self.module.weights_dev, self.module.weights_uvm

    def check(self) -> None:
        """Check that the TBE's rows can be written, and that lookups read them.

        Raises:
            Contradiction: the TBE is of a kind that is not supported.
        """
        module = self.module
        pruned = any(getattr(module, name).numel() for name in _PRUNING)
        if pruned or module.index_remapping_hash_table_cpu is not None:
            raise Contradiction(f"{self.name} is pruned and lacks rows: quantise the model without pruning")
        if hasattr(module, "kv_embedding_cache"):
            raise Contradiction(f"{self.name} has rows by key: construct the collection without virtual tables")
        if module.scale_bias_size_in_bytes != SCALE_AND_BIAS_BYTES:
            size = module.scale_bias_size_in_bytes
            raise Contradiction(f"{self.name} has {size} bytes of scale and bias in a row, expected 4")

    def view(self, index: int) -> torch.Tensor:
        """The live memory of table `index`: uint8 [rows, bytes of a row with padding].

        Raises:
            Contradiction: there is no memory, or it cannot be written.
        """
        # Create views only after a move, because fbgemm always creates the views of all tables.
        lies = tuple((each.data_ptr(), each.numel()) for each in self.memory)
        if lies != self._viewed:
            self._views, self._viewed = self._views_now(), lies
        return self._views[index]

    def _views_now(self) -> list[torch.Tensor]:
        if not self.module.weight_initialized:
            raise Contradiction(f"{self.name} has no memory yet: call its initialize_weights()")
        if any(each.is_meta for each in self.memory):
            raise Contradiction(f"{self.name} is on the meta device, which cannot be written")
        try:
            views = [each[0] for each in self.module.split_embedding_weights_with_scale_bias(0)]
        except RuntimeError:  # fbgemm's slicing of its memory has failed.
            raise Contradiction(f"{self.name}: its memory is shorter than its tables") from None
        extents = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in views)
        if any(end > begin for (_, end), (begin, _) in pairwise(extents)):
            raise Contradiction(f"{self.name}: its tables overlap in memory")
        return views


def tables_in_tbes(module: nn.Module) -> dict[str, list[TbeShard]]:
    """The tables in the TBEs of a module's quantised collections, by the names of their weights."""
    tables: dict[str, list[TbeShard]] = {}
    for owner, collection in module.named_modules():
        kind = TABLES_OF[not hasattr(collection, "embedding_bag_configs")]
        for shard in _shards_in(owner, collection):
            name = f"{owner}.{kind}.{shard.table}.weight".removeprefix(".")
            tables.setdefault(name, []).append(shard)
    return tables


def _shards_in(owner: str, collection: Any) -> Iterator[TbeShard]:
    sharded: dict[Any, Any] = getattr(collection, "_tbes_configs", {})
    tbes = sharded or [each for each in getattr(collection, "_emb_modules", ()) if _is_tbe(each)]
    for number, module in enumerate(tbes):
        tbe = Tbe(f"TBE {number} of {owner or 'the module'}", module)
        for index in range(len(module.embedding_specs)):
            config = sharded[module].embedding_tables[index] if sharded else None
            yield TbeShard(tbe, index, *(config.local_metadata.shard_offsets if config else ()))


def tbe_prefixes(module: nn.Module, tables: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of the names of all parameters and buffers that belong to a module's TBEs or their `tables`."""
    registered = [f"{name}." for name, each in module.named_modules() if _is_tbe(each)]
    return (*registered, *(name.removesuffix("weight") for name in tables))


def tbe_memory(module: nn.Module) -> list[torch.Tensor]:
    """The tensors with the rows of a module's TBEs."""
    tbes = {shard.tbe for shards in tables_in_tbes(module).values() for shard in shards}
    return [each for tbe in tbes for each in tbe.memory]


def _is_tbe(module: Any) -> bool:
    return hasattr(module, "embedding_specs") and hasattr(module, "split_embedding_weights_with_scale_bias")


@dataclass(frozen=True, eq=False)
class TensorRows:
    """The rows of a tensor [rows, width] with contiguous rows.

    Attributes:
        held: the tensor.
    """

    held: torch.Tensor

    def stage(
        self, rows: Iterable[tuple[Ids, Values]], fill: Values | None = None, *, digested: bool = False
    ) -> Callable[[], BatchDigests | None]:
        """Prepare rows; return a function that writes them.

        Args:
            rows: ids [n] and values [n, width], of the tensor's type or another type of the same size.
            fill: a row [1, width] that first replaces all rows; None keeps other rows.
            digested: whether the function returns digests of the written rows in host memory.

        Raises:
            Contradiction: an id is out of range; nothing was written.
        """
        if self._in_host_memory:
            return self._stage_in_host_memory(rows, fill, digested=digested)
        return self._stage_on(rows, fill)

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

    @property
    def _bytes(self) -> Bytes:
        rows: Bytes = self.held.view(torch.uint8).numpy()
        return rows

    def _stage_in_host_memory(
        self, rows: Iterable[tuple[Ids, Values]], fill: Values | None, *, digested: bool
    ) -> Callable[[], BatchDigests | None]:
        tensor, memory = self.held, self._bytes
        puts = [
            staged_rows(memory.view(values.dtype), ids, values, digested=digested)
            if digested
            else staged_rows(memory, ids, np.ascontiguousarray(values).view(np.uint8))
            for ids, values in rows
        ]
        first = None if fill is None else _items(np.ascontiguousarray(fill).view(np.uint8))

        def write() -> BatchDigests | None:
            if first is not None:
                _items(memory)[:] = first
            digests = [put() for put in puts]
            if not tensor.is_inference():
                increment_version(tensor)  # Autograd must detect the change.
            return digests if digested else None

        return write

    def _stage_on(self, rows: Iterable[tuple[Ids, Values]], fill: Values | None) -> Callable[[], None]:
        """`stage` for a device other than the CPU."""
        tensor, first = self.held, None if fill is None else self._on_device(fill)
        puts = list[tuple[torch.Tensor, torch.Tensor]]()
        for ids, values in rows:
            check_fit(tensor.shape[0], tensor.shape[1] * tensor.itemsize, ids, values)
            puts.append((torch.from_numpy(ids.copy()).to(tensor.device), self._on_device(values)))

        def write() -> None:
            if first is not None:
                tensor.copy_(first.expand_as(tensor))
            for at, some in puts:
                tensor.index_copy_(0, at, some)

        return write

    def _on_device(self, values: Values) -> torch.Tensor:
        # Copy, since torch has no read-only tensors.
        rows = torch.empty(len(values), self.held.shape[1], dtype=self.held.dtype)
        rows.view(torch.uint8).numpy()[:] = np.ascontiguousarray(values).view(np.uint8)
        return rows.to(self.held.device)


def _items(rows: Bytes) -> NDArray[np.void]:
    """Rows [n, width] as [n] items, which NumPy copies several times faster."""
    items: NDArray[np.void] = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    return items


def named_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer, detached. For a compiled module, the tensor that the compiled code reads."""
    if compiled := compiled_module_of(module, name):
        return compiled[0].served(compiled[1])
    # Look the name up each time, since `module.to(...)` replaces the memory.
    attribute: Any = reduce(getattr, name.split("."), module)
    tensor: torch.Tensor = attribute.detach()
    return tensor


# Attributes for the wrapped module: activation checkpointing, FSDP, torch.compile, TorchRec.
_INSIDE = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_dmp_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all of its wrappers."""
    while name := _name_inside(module):
        module = getattr(module, name)
    return module


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a module's parameter or buffer without the parts of wrappers."""
    plain, each = list[str](), module
    for part in name.split("."):
        inner = getattr(each, part, None)
        if not isinstance(inner, nn.Module) or part != _name_inside(each):
            plain.append(part)
        each = inner if isinstance(inner, nn.Module) else _NOTHING
    return ".".join(plain)


_NOTHING = nn.Module()


def _name_inside(module: nn.Module) -> str:
    """A wrapper's attribute for the wrapped module; empty for a module that is not a wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return next((name for name in _INSIDE if name in module._modules), "")
