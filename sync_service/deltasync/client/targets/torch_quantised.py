"""The places of quantised tables: rows of an inference TBE, which are written in place.

`QuantisedRows` implements `torch_binding.TablePlace`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.base.errors import Contradiction
from deltasync.client.targets.numpy_target import Bytes
from deltasync.client.targets.torch_tensors import TensorRows
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.table_form import ReplicaSpec, value_type_of
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import SCALE_AND_BIAS_BYTES, ValueType, of_tbe, to_tbe

# The attributes of collections that contain the tables.
TABLES_OF = ("embedding_bags", "embeddings")
# Value types by fbgemm's name.
_TBE_TYPES = {f"int{each.tbe_bits}": each for each in ValueType if each.tbe_bits}
_PRUNING = ("index_remappings_array", "index_remapping_hash_table")
_WRITABLE = ("HOST", "DEVICE")


@dataclass(frozen=True)
class QuantisedRows:
    """The place of a table whose rows are scale, bias and codes: its `shards` in TBEs, in row order."""

    name: str
    table: TableSpec
    shards: tuple["TbeShard", ...]

    @classmethod
    def of(cls, name: str, table: TableSpec, shards: Sequence["TbeShard"]) -> "QuantisedRows":
        """The place of a table; a Contradiction if the shards do not match the table, or cannot be written."""
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
    """The rows of one table in a TBE, by the table's `index` in it, from id `row` and from `column` on."""

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
        """The rows' live memory [rows, width], without padding; a Contradiction if it cannot be written."""
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
    """One of a module's TBEs, with its name in errors."""

    name: str
    module: Any
    _views: list[torch.Tensor] = field(default_factory=list)
    _viewed: tuple[tuple[int, int], ...] = ()

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The tensors with the rows."""
        return self.module.weights_host, self.module.weights_dev, self.module.weights_uvm

    def check(self) -> None:
        """Raise Contradiction if the rows cannot be written, or lookups would not read them."""
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
        """The live memory of table `index`: uint8 [rows, bytes of a row with padding]."""
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


def tbes_of(module: nn.Module) -> list[Tbe]:
    """The TBEs of a module's quantised collections."""
    tbes = {shard.tbe.module: shard.tbe for shards in tables_in_tbes(module).values() for shard in shards}
    return list(tbes.values())


def _is_tbe(module: Any) -> bool:
    return hasattr(module, "embedding_specs") and hasattr(module, "split_embedding_weights_with_scale_bias")
