"""Parameters and buffers of a module as the places of tables."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from deltasync.client.modules.tensor_rows import TensorRows
from deltasync.client.torch_compiled import compiled_module_of
from deltasync.core.delivery import HeldSpec, value_type_of
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec, matrix_shape
from deltasync.core.value_types import ValueType

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
