"""A torch module that serves from shared memory without a copy, also with quantised tables.

model = SharedModule(module)
with reader.reading() as now:
    logits = model(now, batch)
"""

import ctypes
import warnings
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from deltasync.base.errors import Contradiction, DeltasyncError
from deltasync.base.words import listed
from deltasync.client.shared.reader import SharedReading
from deltasync.client.targets.torch_binding import bind
from deltasync.client.targets.torch_quantised import QuantisedRows, Tbe, tables_in_tbes, tbes_of
from deltasync.client.targets.torch_tensors import CastTensor, Tensor, named_tensor, torch_type
from deltasync.core.rows import Values


@dataclass(frozen=True, eq=False)
class _Binding:
    """What a module uses of the tables of one side.

    Attributes:
        tables: the tables. They keep the memory mapped, because a TBE has only addresses in it.
        tensors: tensors over them by the name of the parameter or buffer.
        quantised: TBEs, and the rows of their tables by index.
        names: names of all that is in the memory.
    """

    tables: Mapping[str, Values]
    tensors: dict[str, torch.Tensor]
    quantised: list[tuple[Any, dict[int, Values]]]
    names: frozenset[str]


class SharedModule:
    """A module on the CPU whose tables are those of a `SharedReading`.

    During a call, the shared memory replaces its parameters and buffers. An inference TBE keeps pointing to the
    memory of the last call, so do not call or copy the module itself. Tables that the mirror does not have keep
    the module's own values. Only one thread at a time may call it. Do not change the module's types or shapes.

    Attributes:
        module: the module.
        names: names of the parameters, buffers and quantised tables that are in the memory; empty before the first
            call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._current: _Binding | None = None
        self._bindings = deque[_Binding](maxlen=2)  # Of the two sides. To find one takes longer than a forward.

    @property
    def names(self) -> frozenset[str]:  # noqa: D102  # See the class.
        return self._current.names if self._current else frozenset()

    def __call__(self, reading: SharedReading, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the tables of a version, in the block of `reading`.

        Raises:
            Contradiction: the module has a table in another type or shape, or with managed collision: use a
                `TorchTarget` in this process, which keeps a copy. Or a quantised table has left the mirror.
        """
        binding = next((each for each in self._bindings if each.tables is reading.tables), None)
        if binding is None:
            binding = self._bind(reading)
            self._bindings.append(binding)
        for tbe, rows in binding.quantised:
            if getattr(tbe, _ROWS, None) is not rows:
                _point(tbe, rows)
        self._current = binding
        return functional_call(self.module, binding.tensors, args, kwargs)

    def _bind(self, reading: SharedReading) -> "_Binding":
        specs = {each.name: each for each in reading.specs}
        binding, of_table = bind(self.module, list(specs.values())), tensors(reading)
        problems: dict[str, DeltasyncError | str] = {
            name: error for name, error in binding.problems.items() if isinstance(error, Contradiction)
        }
        found, in_memory = dict[str, torch.Tensor](), defaultdict[Any, dict[int, Values]](dict)
        for name, place in binding.places.items():
            if isinstance(place, QuantisedRows):
                for shard in place.shards:
                    if shard.scale_last:
                        problems[name] = f"{shard.tbe.name} has scale and bias at the end of its rows"
                    end = shard.row + shard.rows
                    in_memory[shard.tbe.module][shard.index] = reading.tables[name][shard.row : end]
            elif isinstance(place, Tensor) and not isinstance(place, CastTensor):
                found[place.name] = of_table[name].view(named_tensor(self.module, place.name).shape)
            else:
                problems[name] = (
                    f"table {name!r} has type {torch_type(specs[name])}, and the module needs a copy of it"
                )
        if problems:
            raise Contradiction(
                f"the module cannot use the shared memory: {listed(map(str, problems.values()), 3)}"
            )
        quantised = list[tuple[Any, dict[int, Values]]]()
        for tbe in tbes_of(self.module):
            if (rows := in_memory[tbe.module]) or hasattr(tbe.module, _ROWS):
                others = set(range(len(tbe.module.embedding_specs))) - rows.keys()
                quantised.append((tbe.module, rows | {index: _own_rows(tbe, index) for index in others}))
        _drop_views(self.module, {tbe for tbe, _ in quantised})
        names = frozenset(place.name for place in binding.places.values())
        return _Binding(reading.tables, found, quantised, names)


def tensors(reading: SharedReading) -> dict[str, torch.Tensor]:
    """The tables of a version as tensors [rows, dim] over the shared memory, by table name.

    Valid in the block of `reading`. Writing to them ends the process, because the memory is read-only.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the arrays cannot be written.
        return {name: torch.from_numpy(rows) for name, rows in reading.tables.items()}


# Attributes of a TBE: the rows to which it points, which keeps their memory mapped, and its own rows.
_ROWS, _OWN_ROWS = "_deltasync_rows", "_deltasync_own_rows"


def _own_rows(tbe: Tbe, index: int) -> Values:
    """A TBE's own rows of a table that is not in the memory, without padding.

    Raises:
        Contradiction: the table was in the memory before, and the TBE has given its own rows back.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import unpadded_row_size_in_bytes

    own: dict[int, Values] = tbe.module.__dict__.setdefault(_OWN_ROWS, {})
    if index not in own:
        name, _, dim, kind, _ = tbe.module.embedding_specs[index]
        if hasattr(tbe.module, _ROWS):
            raise Contradiction(
                f"table {name!r} is no longer in the mirror, and {tbe.name} has given its own rows back: make the "
                "module anew"
            )
        own[index] = tbe.view(index).numpy()[:, : unpadded_row_size_in_bytes(dim, kind)].copy()
    return own[index]


def _drop_views(module: nn.Module, tbes: Collection[Any]) -> None:
    """Drop the collections' views of TBEs' rows, which would keep the memory that the TBEs had at first."""
    modules = dict(module.named_modules())
    for name, shards in tables_in_tbes(module).items():
        owner = modules.get(name.removesuffix(".weight"))
        if owner is not None and hasattr(owner, "weight") and all(each.tbe.module in tbes for each in shards):
            owner.weight = torch.empty(0, dtype=torch.uint8)


def _point(module: Any, tables: Mapping[int, Values]) -> None:
    """Make a TBE look up rows in these arrays, by the table's index in it.

    fbgemm adds a table's offset to the address of one tensor, and reads nothing else of that tensor. Here the
    tensor begins at the first array and extends over all of them, and over what lies between.
    """
    begins = {index: int(rows.ctypes.data) for index, rows in tables.items()}
    first = min(begins.values())
    span = max(begins[index] + rows.nbytes for index, rows in tables.items()) - first
    memory = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(first)))
    setattr(module, "weights_host" if module.host_size else "weights_dev", memory)
    module.row_alignment = 1  # Rows in shared memory have no padding.
    module.weights_physical_offsets = [begins[index] - first for index in range(len(begins))]
    module.initialize_logical_weights_placements_and_offsets()
    setattr(module, _ROWS, tables)
