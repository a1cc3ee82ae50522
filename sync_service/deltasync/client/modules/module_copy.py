"""A module that a release is written into, and copies of modules."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase

from deltasync.client.modules.binding import Binding, Place, accelerators, bind
from deltasync.client.modules.tensor import Tensor
from deltasync.client.targets import Release
from deltasync.client.torch_compiled import compiled_modules
from deltasync.core.errors import Contradiction
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType


class ModuleCopy:
    """A module, and the places of tables in it.

    Attributes:
        module: the module.
        binding: places of the tables of the last release.
    """

    def __init__(self, module: nn.Module, leaves_out: Callable[[TableSpec], bool]) -> None:
        self.module = module
        self.binding = Binding({}, {}, [])
        self._leaves_out = leaves_out
        self._followed = False
        self._owners: dict[str, nn.Module] = {}
        self._early: dict[str, Place | None] = {}

    def bind(self, tables: Iterable[TableSpec], held: Collection[str], types: Collection[ValueType]) -> Binding:
        """See `binding.bind`; nothing is followed yet."""
        return bind(self.module, [table for table in tables if not self._leaves_out(table)], held, types)

    def follow(self, binding: Binding) -> None:
        """Have releases written to these places from now on."""
        self.binding, self._followed, self._early = binding, True, {}
        self._owners = {name: _owner_of(self.module, place) for name, place in binding.places.items()}

    def stage(self, release: Release) -> Callable[[], None]:
        """See `copies.Copy`.

        Raises:
            Contradiction: a place cannot be written, or is not in the module any more.
        """
        for each in compiled_modules(self.module):
            each.discard()
        rows: dict[str, list[RowBatch]] = {table.name: [] for table in release.tables if release.resets(table)}
        for batch in release.rows:
            rows.setdefault(batch.table.name, []).append(batch)
        for place in self.binding.places.values():
            self._check_owner(place)
        writes = [
            self.binding.places[table.name].stage(rows[table.name], reset=release.resets(table))
            for table in release.tables
            if table.name in rows and table.name in self.binding.places
        ]
        devices = accelerators(self.module)

        def write() -> None:
            # Inference mode, since a module may have been made in it: what it holds can be written in no other.
            with torch.inference_mode():
                _finish(devices)  # What readers have begun there, on streams of their own.
                for write_table in writes:
                    write_table()
                _finish(devices)
            # It keeps casts of parameters until all of its blocks are left, and readers may live in one.
            torch.clear_autocast_cache()

        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `copies.Copy`.

        Raises:
            Contradiction: its place is not in the module any more.
        """
        place = self.binding.places.get(table.name) if self._followed else self._outlived(table)
        if place and self._followed:
            self._check_owner(place)
        # A table that has grown meanwhile is not the one that is held.
        return place.read(ids) if place and place.table == table else None

    def _check_owner(self, place: Place) -> None:
        """Check that a place is in the module still; those that are found by name each time always are.

        Raises:
            Contradiction: something else is where it was.
        """
        name = place.table.name
        if not isinstance(place, Tensor) and _owner_of(self.module, place) is not self._owners[name]:
            raise Contradiction(
                f"table {name!r}: what was {place.name} has been replaced in the module, and serves no more: give "
                "the module as it is now to a new target"
            )

    def _outlived(self, table: TableSpec) -> Place | None:
        """The place of a table before any release: a module may have outlived another process."""
        if table.name not in self._early:
            self._early[table.name] = self.bind([table], (), list(ValueType)).places.get(table.name)
        return self._early[table.name]


def _owner_of(module: nn.Module, place: Place) -> nn.Module:
    """The innermost module that a place is in."""
    for part in place.name.split("."):
        inner = getattr(module, part, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def copy_of(module: nn.Module) -> nn.Module:
    """A module that has nothing in common with another one but its values.

    Raises:
        Contradiction: there is none: it refuses to be copied, or tensors of its copy do not share memory with each
            other where its own do, or do where they should not.
    """
    try:
        made = copy.deepcopy(module, _memo(module))
    except Exception as error:
        raise _no_copy(f"{type(error).__name__}: {error}") from error
    tensors, copies = _tensors(module), _tensors(made)
    if tensors.keys() != copies.keys():
        raise _no_copy(f"its copy has other tensors: {sorted(tensors.keys() ^ copies.keys())}")
    storages, owners = {_storage(each) for each in tensors.values()}, dict[int, int]()
    for name, tensor in copies.items():
        if _storage(tensor) and _storage(tensor) in storages:
            raise _no_copy(f"its copy has {name} in common with it")
        if owners.setdefault(_storage(tensors[name]), _storage(tensor)) != _storage(tensor):
            raise _no_copy(f"{name} shares memory with another of its tensors, and would not in a copy")
    return made


def _memo(module: nn.Module) -> dict[int, Any]:
    """What `deepcopy` is to take as copied: sharded tensors that belong to no group of processes."""
    memo: dict[int, Any] = {}
    for each in _tensors(module).values():
        if isinstance(each, ShardedTensorBase) and not hasattr(each, "_process_group"):
            memo[id(each)] = ShardedTensorBase._init_from_local_shards_and_global_metadata(
                copy.deepcopy(each.local_shards(), memo), copy.deepcopy(each.metadata(), memo)
            )
    return memo


def _no_copy(why: str) -> Contradiction:
    return Contradiction(
        f'reads="copies": the module cannot be copied: {why}. Give the target one that can, or reads="pause"'
    )


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors that a module keeps, also in plain attributes, as quantised collections do."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, torch.Tensor):
            found[name] = value
            todo.extend((f"{name}.{key}", each) for key, each in _wrapped(value).items())
        elif id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{name}.{key}".lstrip("."), each) for key, each in _parts(value))
    return found


def _wrapped(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside of one that has no memory of its own: TorchRec's of 4 bits, torch's of several shards."""
    if isinstance(tensor, ShardedTensorBase):
        return {str(number): shard.tensor for number, shard in enumerate(tensor.local_shards())}
    names = [*getattr(type(tensor), "__slots__", ()), *vars(tensor)]
    inner = {name: getattr(tensor, name, None) for name in names}
    return {name: each for name, each in inner.items() if isinstance(each, torch.Tensor)}


def _parts(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, nn.Module):
        yield from [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        yield from value.named_children()
        yield from ((key, each) for key, each in vars(value).items() if key not in _OWN)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


# What `named_parameters` and so on tell already.
_OWN = ("_parameters", "_buffers", "_modules")


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 where it has none of its own."""
    if isinstance(tensor, ShardedTensorBase):
        return 0
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # It wraps others.
        return 0


def _finish(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
