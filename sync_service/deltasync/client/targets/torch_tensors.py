"""The places of tables in a torch module that are tensors, of the table's type or another one.

Each place implements `torch_binding.TablePlace`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
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
from deltasync.core.value_types import ValueType

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
        """The tensor; a Contradiction if the table does not fit, or the tensor cannot be written by rows."""
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
    """A floating-point tensor of `held_type` as the place of a floating-point table of another type.

    If the tensor's rows are unchanged, `read` returns the original rows, otherwise rows with a flipped bit. For
    embedding tables the cast is exact. For other tables, the original rows are stored beside the module.
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
    type, and for other tables if some embedding table is sent in that type, or quantised for a TBE: see `types`.
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


@dataclass(frozen=True, eq=False)
class TensorRows:
    """The rows of a tensor [rows, width] with contiguous rows."""

    held: torch.Tensor

    def stage(
        self, rows: Iterable[tuple[Ids, Values]], fill: Values | None = None, *, digested: bool = False
    ) -> Callable[[], BatchDigests | None]:
        """Prepare rows, ids [n] and values [n, width]; return a function that writes them.

        `fill` is a row [1, width] that first replaces all rows. With `digested`, the function returns digests of
        the written rows in host memory.
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


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, under each of their names."""
    parameters, buffers = module.named_parameters, module.named_buffers
    return {**dict(parameters(remove_duplicate=False)), **dict(buffers(remove_duplicate=False))}


def not_saved(module: nn.Module) -> set[str]:
    """The names of buffers that are not part of the module's state.

    `state_dict` would not do: TorchRec's fails for managed collision that is sharded for inference with 4 bits.
    """
    return {
        f"{owner}.{name}".removeprefix(".")
        for owner, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }


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
