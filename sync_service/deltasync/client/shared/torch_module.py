"""A torch module that serves from shared memory without a copy, also with quantised tables.

model = SharedModule(module)
with reader.reading() as now:
    logits = model(now, batch)
"""

import copy
import ctypes
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.base.arguments import check_type
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.base.words import listed
from deltasync.client.shared.reader import SharedReader, SharedReading
from deltasync.client.targets.torch_binding import bind
from deltasync.client.targets.torch_compiled import compiled_modules
from deltasync.client.targets.torch_quantised import QuantisedRows, TbeShard, tables_in_tbes, tbe_prefixes, tbes_of
from deltasync.client.targets.torch_target import all_tensors
from deltasync.client.targets.torch_tensors import CastTensor, Tensor, not_saved, tensors_of, torch_type
from deltasync.core.rows import Values


class SharedModule:
    """A module on the CPU over the tables of a `SharedReading`. Several threads may call it at once.

    It copies the structure of a module, without its values. Each call has a copy of its own, with tensors over the
    shared memory.
    """

    def __init__(self, module: nn.Module, *, leave_out: Sequence[str] = ()) -> None:
        """Take over the structure of `module`, which may be on the meta device.

        Args:
            module: the module. Later changes of it have no effect.
            leave_out: parameters, buffers and quantised tables that keep the module's values, as shell patterns of
                their names: "over.*". The mirror must have all others.

        Raises:
            TypeError: `module` is not a torch module.
            InvalidInput: `leave_out` is a string.
            Contradiction: the module is scripted, traced or compiled ahead of time, cannot be copied, or has no
                values for a tensor that is left out or not persistent.
        """
        check_type("SharedModule(module)", "module", module, nn.Module, remedy="the model, not its state_dict()")
        if isinstance(leave_out, str):
            raise InvalidInput(f"leave_out: a string; expected a list of patterns, [{leave_out!r}]")
        if compiled_modules(module) or any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
            raise Contradiction(
                "the module is scripted, traced or compiled ahead of time, so its tensors cannot be replaced: "
                "pass the module from which it was made"
            )
        self._structure = _Structure(module, tuple(leave_out))
        self._bindings: tuple[_Binding, ...] = ()  # Of the two sides.

    def __call__(self, reading: SharedReading, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the tables of a version, in the block of `reading`.

        Raises:
            NotFound: the mirror lacks tables of the module that are not left out.
            Contradiction: the module has a table in another type or shape, or with managed collision: use a
                `TorchTarget` in this process, which keeps a copy.
        """
        binding = self._binding(reading)
        module = binding.take()
        try:
            return module(*args, **kwargs)
        finally:
            binding.free.append(module)

    def readiness(self, reader: SharedReader) -> Decision:
        """Whether the replica behind the mirror is ready, and the module can use the tables that are served now.

        Not for use in a block of `reading`.
        """
        decision = reader.readiness
        if decision.yes:
            try:
                with reader.reading() as now:
                    self._binding(now)
            except DeltasyncError as error:
                return Decision(False, str(error))
        return decision

    def _binding(self, reading: SharedReading) -> "_Binding":
        # Without a lock, which a forked process could get locked. Two threads may both do the work.
        binding = next((each for each in self._bindings if each.tables is reading.tables), None)
        if binding is None:
            binding = self._structure.over(reading)
            self._bindings = (*self._bindings[-1:], binding)
        return binding


@dataclass(frozen=True, eq=False)
class _Binding:
    """The module over the tables of one side.

    `tables` keeps the memory mapped, because a TBE only has addresses in it. `free` has copies of the module that
    no call uses at present.
    """

    tables: Mapping[str, Values]
    module: nn.Module
    free: list[nn.Module] = field(default_factory=list)

    def take(self) -> nn.Module:
        """A copy for one call, because some modules keep state in their attributes."""
        try:
            return self.free.pop()
        except IndexError:
            return _copied(self.module, {})[0]


class _Structure:
    """A module without the values that come from the mirror."""

    def __init__(self, module: nn.Module, leave_out: tuple[str, ...]) -> None:
        self._leave_out = leave_out
        memory, own = dict[int, torch.Tensor](), dict[tuple[int, int], Values]()
        quantised = tables_in_tbes(module)
        prefixes = tbe_prefixes(module, quantised)
        transient = not_saved(module)
        for name, tensor in tensors_of(module).items():
            if name.startswith(prefixes):
                # The collections' views of rows, which would keep the memory that the TBEs had at first.
                if name in quantised:
                    memory[id(tensor)] = torch.empty(0, dtype=torch.uint8)
            elif name not in transient and not self._leaves_out(name):
                # Nobody writes to it, so it takes no memory.
                memory[id(tensor)] = _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
            elif tensor.is_meta:
                raise Contradiction(
                    f"{name} is on the meta device and would not come from the mirror: give it values before"
                )
        for tbe in tbes_of(module):
            if not any(each.is_meta for each in tbe.memory):
                memory.update((id(each), torch.empty(each.shape, dtype=each.dtype)) for each in tbe.memory)
        for name, shards in quantised.items():
            for each in shards if self._leaves_out(name) else ():
                own[id(each.tbe.module), each.index] = _compact(each.tbe.view(each.index), each)
        self.module, memo = _copied(module, memory)
        # Rows of quantised tables that are left out, by TBE and the index of the table in it.
        self._own = {(id(memo[tbe]), index): rows for (tbe, index), rows in own.items()}

    def over(self, reading: SharedReading) -> _Binding:
        """The module over the tables of a version, or an error if it cannot use them."""
        specs = {each.name: each for each in reading.specs}
        binding, of_table = bind(self.module, list(specs.values())), tensors(reading)
        known, memory = tensors_of(self.module), dict[int, torch.Tensor]()
        in_tbes = defaultdict[int, dict[int, Values]](dict)
        for (owner, index), rows in self._own.items():
            in_tbes[owner][index] = rows
        problems: list[DeltasyncError | str] = [
            error
            for name, error in binding.problems.items()
            if isinstance(error, Contradiction) and not self._leaves_out(name)
        ]
        for name, place in binding.places.items():
            if self._leaves_out(place.name):
                continue
            if isinstance(place, QuantisedRows):
                for shard in place.shards:
                    if shard.scale_last:
                        problems.append(f"{shard.tbe.name} has scale and bias at the end of its rows")
                    end = shard.row + shard.rows
                    in_tbes[id(shard.tbe.module)][shard.index] = reading.tables[name][shard.row : end]
            elif isinstance(place, Tensor) and not isinstance(place, CastTensor):
                tensor = known[place.name]
                memory[id(tensor)] = _like(tensor, of_table[name].view(tensor.shape))
            else:
                kind = torch_type(specs[name])
                problems.append(f"table {name!r} has type {kind}, and the module needs a copy of it")
        if problems:
            raise Contradiction(f"the module cannot use the shared memory: {listed(map(str, problems), 3)}")
        if lacking := [name for name in binding.stale if not self._leaves_out(name)]:
            raise NotFound(
                f"the mirror has no table for {listed(lacking)}: add them to the consumer's policy, or keep the "
                "module's values, SharedModule(module, leave_out=[...])"
            )
        module, memo = _copied(self.module, memory)
        for tbe in tbes_of(self.module):
            _point(memo[id(tbe.module)], in_tbes[id(tbe.module)])
        return _Binding(reading.tables, module)

    def _leaves_out(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._leave_out)


def _copied(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> tuple[nn.Module, dict[int, Any]]:
    """Copy a module with some tensors replaced, by identity; also return the copies of its parts, by identity."""
    memo: dict[int, Any] = {id(each): each for each in all_tensors(module).values()} | dict(tensors)
    try:
        return copy.deepcopy(module, memo), memo
    except Exception as error:
        raise Contradiction(f"the module cannot be copied: {type(error).__name__}: {error}") from error


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values as a parameter, if the tensor is one."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _compact(rows: torch.Tensor, shard: TbeShard) -> Values:
    """A copy of a TBE's rows without padding, because rows in shared memory have none."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import unpadded_row_size_in_bytes

    _, _, dim, kind, _ = shard.tbe.module.embedding_specs[shard.index]
    return rows.numpy()[:, : unpadded_row_size_in_bytes(dim, kind)].copy()


def tensors(reading: SharedReading) -> dict[str, torch.Tensor]:
    """The tables of a version as tensors [rows, dim] over the shared memory, by table name.

    Valid in the block of `reading`. Writing to them ends the process, because the memory is read-only.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the arrays cannot be written.
        return {name: torch.from_numpy(rows) for name, rows in reading.tables.items()}


def _point(module: Any, tables: Mapping[int, Values]) -> None:
    """Make a TBE look up rows in these arrays, by the index of the table in it.

    fbgemm adds a table's offset to the address of one tensor, and reads nothing else of that tensor. So this
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
