"""Managed collision modules: their maps from raw ids to rows, and the rows for unknown ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltasync.base.errors import Contradiction, NotFound
from deltasync.base.words import counted
from deltasync.client.targets.torch_tensors import plain_name
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import FREE_ID, TableSpec, entries_of, raw_ids_of

# The modules of a collection, and the modules of its shards if it is sharded for inference.
MODULES, SHARDED = "_managed_collision_modules", "_managed_collision_modules_per_rank"
# Buffers: raw ids and rows of an `MCHManagedCollisionModule`; raw ids of a `HashZchManagedCollisionModule`.
SORTED, ROWS, IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
Ints = NDArray[np.int64]


def id_map_of(module: nn.Module, table: TableSpec) -> "CollisionMap":
    """The place of a map of raw ids, or an error: see `collision_module_of`."""
    name, part = collision_module_of(module, table)
    return (HashedIds if hashes(part) else SortedIds)(module, name, table)


class CollisionMap(ABC):
    """The map from raw ids to rows of the managed collision module `name`, as the place of a table."""

    def __init__(self, module: nn.Module, name: str, table: TableSpec) -> None:
        """Use the managed collision module `name` of a module."""
        self.name, self.table = name, table
        self._module: Any = module.get_submodule(name)
        self._collection: Any = _collection_of(module, name)

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `TablePlace`."""
        write_map = self._staged(rows, reset=reset)
        if not hasattr(self._collection, SHARDED):
            return write_map

        def write() -> None:
            write_map()
            self._look_up_before_sending()

        return write

    @abstractmethod
    def read(self, ids: Ids) -> Values:
        """See `TablePlace`."""

    @abstractmethod
    def _staged(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """Like `stage`, but without patching a sharded collection."""

    def _look_up_before_sending(self) -> None:
        """Patch a collection that is sharded for inference to look up raw ids before it sends rows to shards."""
        module, (_, _, table) = self._module, self.name.rpartition(".")
        vars(module).update(preprocess=MethodType(_rows_of, module), input_size=module.output_size)
        for rank in getattr(self._collection, SHARDED):
            vars(rank[table])["forward"] = _unchanged
        # The first forward makes these. A block size of 0 would send ids to shards in turn.
        for dist in self._collection._input_dists:
            dist.feature_block_sizes.clamp_(min=1)


class SortedIds(CollisionMap):
    """The map of an `MCHManagedCollisionModule`: raw ids in ascending order, and their rows."""

    def __init__(self, module: nn.Module, name: str, table: TableSpec) -> None:
        super().__init__(module, name, table)
        self._map = _SortedMap.of(*(getattr(self._module, each).cpu().numpy().copy() for each in (SORTED, ROWS)))

    def read(self, ids: Ids) -> Values:
        """See `TablePlace`. Reads the module's own buffers, so that damage shows."""
        at = torch.from_numpy(self._map.places[ids])
        raw, rows = (getattr(self._module, name)[at].cpu().numpy() for name in (SORTED, ROWS))
        lost = ~entries_of(self._map.raw[at])  # An entry that differs from the right one.
        return np.where(rows == ids, entries_of(raw), lost)[:, None]

    def _staged(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `CollisionMap`. Two rows with the same raw id are a Contradiction."""
        new = _SortedMap.empty(self.table.rows) if reset else self._map
        if rows:  # All at once, because the cost of a change grows with the rows of the map.
            ids = np.concatenate([each.ids for each in rows])
            new = new.changed(ids, np.concatenate([*map(_numbers, rows)]))
        new.check(self.table.name)
        buffers = ((SORTED, new.raw), (ROWS, new.rows))
        changes = [(name, *_changed(getattr(self._module, name), array)) for name, array in buffers]

        def write() -> None:
            self._map = new
            for name, first, tensor in changes:
                getattr(self._module, name)[first : first + len(tensor)] = tensor

        return write


@dataclass(frozen=True, eq=False)
class _SortedMap:
    """Raw ids in ascending order ([rows], free rows last), their rows, and the index of each row."""

    raw: Ints
    rows: Ints
    places: Ints

    @classmethod
    def of(cls, raw: Ints, rows: Ints) -> "_SortedMap":
        """The map in a module's buffers; an empty one if the buffers are not a valid map."""
        places = np.full(len(rows), -1)
        inside = (rows >= 0) & (rows < len(rows))
        places[rows[inside]] = np.flatnonzero(inside)
        if (places < 0).any() or ((raw[1:] <= raw[:-1]) & (raw[1:] != FREE_ID)).any():
            return cls.empty(len(rows))
        return cls(raw, rows, places)

    @classmethod
    def empty(cls, rows: int) -> "_SortedMap":
        """A map with only free rows."""
        return cls(np.full(rows, FREE_ID), np.arange(rows), np.arange(rows))

    def changed(self, ids: Ids, values: Ints) -> "_SortedMap":
        """The map with new entries `values` for the rows `ids`."""
        kept = np.ones(len(self.raw), bool)
        kept[self.places[ids]] = False
        new = raw_ids_of(values)
        order = np.argsort(new, kind="stable")
        at = np.searchsorted(self.raw[kept], new[order])
        raw = np.insert(self.raw[kept], at, new[order])
        rows = np.insert(self.rows[kept], at, ids[order])
        places = np.empty_like(rows)
        places[rows] = np.arange(len(rows))
        return _SortedMap(raw, rows, places)

    def check(self, table: str) -> None:
        """Raise Contradiction if a raw id has two rows."""
        twice = np.flatnonzero((self.raw[1:] == self.raw[:-1]) & (self.raw[1:] != FREE_ID))
        if len(twice):
            first, second = sorted(self.rows[twice[0] : twice[0] + 2].tolist())
            raise Contradiction(f"table {table!r}: raw id {self.raw[twice[0]]} has two rows, {first} and {second}")


def _changed(buffer: torch.Tensor, array: Ints) -> tuple[int, torch.Tensor]:
    """The first index where a buffer differs from an array, and the numbers up to the last difference.

    Ascending new raw ids only change the end. Others move all numbers between their old and new places.
    """
    new = torch.from_numpy(array).to(buffer.device)
    differs = (buffer != new).nonzero().flatten().cpu()
    first, end = (int(differs[0]), int(differs[-1]) + 1) if len(differs) else (0, 0)
    return first, new[first:end]


def _numbers(rows: RowBatch) -> Ints:
    return rows.values[:, 0].astype(np.int64, copy=False)


class HashedIds(CollisionMap):
    """The identities of a `HashZchManagedCollisionModule`: the raw id of each row, for lookups by hashing."""

    def read(self, ids: Ids) -> Values:
        """See `TablePlace`."""
        buffer = self._module._hash_zch_identities.data
        identities = buffer[torch.from_numpy(ids.copy())].cpu().numpy()
        return np.where(identities == -1, 0, entries_of(identities))

    def _staged(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `CollisionMap`. A raw id that the module's own hashing would not find is a Contradiction."""
        buffer = self._module._hash_zch_identities.data
        staged = torch.full_like(buffer, -1) if reset else buffer.clone()
        ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in rows)])
        values = np.concatenate([np.empty(0, np.int64), *map(_numbers, rows)])
        identities = np.where(values == 0, -1, raw_ids_of(values))
        changed, raw = (torch.from_numpy(each).to(buffer.device) for each in (ids, identities))
        staged[changed, 0] = raw
        self._check(staged, values)

        def write() -> None:
            if reset:
                buffer.copy_(staged)
            else:
                buffer[changed, 0] = raw

        return write

    def _check(self, identities: torch.Tensor, values: Ints) -> None:
        """Check that the module would find the raw ids of new entries."""
        raw = torch.from_numpy(raw_ids_of(values[values != 0])).to(identities.device)
        if lost := raw[not_found(self._module, identities, raw)].tolist():
            raise Contradiction(
                f"table {self.table.name!r}: module {self.name} hashes differently: it does not find "
                f"{counted(len(lost), 'id')}, such as {lost[0]}: total_num_buckets ({self._module._buckets}), "
                f"max_probe ({self._module._max_probe}), input_hash_size ({self._module._input_hash_size}) and "
                "the share of reserved slots must be as in the trainer"
            )


def not_found(module: Any, identities: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """A mask of the raw ids [n] that the module would not find in these identities: bool [n]."""
    try:
        values, sizes, offsets = module.input_mapper(values=raw, output_offset=module._output_global_offset_tensor)
    except (IndexError, RuntimeError):  # An id belongs to no bucket.
        return torch.ones(len(raw), dtype=torch.bool)
    rows, _ = torch.ops.fbgemm.zero_collision_hash(
        input=values,
        identities=identities,
        max_probe=module._max_probe,
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=sizes,
        offsets=offsets,
        disable_fallback=True,
        opt_in_prob=module._opt_in_prob,
        num_reserved_slots=module.get_reserved_slots_per_bucket(),
    )
    missing: torch.Tensor = rows.cpu() < 0
    return missing


def _rows_of(module: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Replaces a managed collision module's `preprocess`: returns the rows of raw ids, on the ids' device."""
    here = next(module.buffers()).device
    raw = {name: each.to(here) for name, each in features.items()}
    rows = module.remap(type(module).preprocess(module, raw))
    return {name: each.to(features[name].device()) for name, each in rows.items()}


def _unchanged(features: dict[str, Any]) -> dict[str, Any]:
    """Replaces `forward` of a shard's module, which gets rows already."""
    return features


# Stored in the module, so that another target with the same module finds them.
_RANGES = "_deltasync_id_ranges"


class IdRanges:
    """The rows for raw ids that a managed collision module does not know: one row for each rank of the trainer.

    An MCH module has one such row, its last. If the trainer has others, this class replaces the module's `remap`.
    """

    def __init__(self, module: nn.Module, table: TableSpec) -> None:
        """Find the managed collision module in `module`, or raise an error: see `collision_module_of`."""
        self.name, self._module = collision_module_of(module, table)
        self.table = table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `TablePlace`."""
        by_row = {} if reset else self._by_row
        for each in rows:  # Do not loop over all rows, because nearly all may be zeros.
            by_row = {row: span for row, span in by_row.items() if not (each.ids == row).any()}
            some = each.values.any(axis=1)
            by_row.update(zip(each.ids[some].tolist(), map(tuple, each.values[some].tolist()), strict=True))
        ranges = _Ranges.of(by_row, self.table).on(next(self._module.buffers()).device)
        by_itself = not by_row or ranges.defaults.tolist() == [self.table.rows - 1]
        if hashes(self._module) and by_row:
            raise Contradiction(
                f"table {self.table.name!r}: unknown ids get rows {ranges.defaults.tolist()} in the trainer, but "
                f"rows by hash in module {self.name}: use the trainer's kind of managed collision module"
            )

        def write() -> None:
            self._module.__dict__[_RANGES] = (by_row, ranges)
            if by_itself:
                self._module.__dict__.pop("remap", None)
            else:
                self._module.__dict__["remap"] = MethodType(_remap, self._module)

        return write

    def read(self, ids: Ids) -> Values:
        """See `TablePlace`."""
        values = np.zeros((len(ids), 3), np.int64)
        for row, each in self._by_row.items():
            values[ids == row] = each
        return values

    @property
    def _by_row(self) -> dict[int, tuple[int, ...]]:
        """The first raw id, the end, and the first row of the shard, by the row for unknown ids."""
        by_row: dict[int, tuple[int, ...]] = self._module.__dict__.get(_RANGES, ({}, None))[0]
        return by_row


@dataclass(frozen=True, eq=False)
class _Ranges:
    """The ends of the ranges of raw ids, ascending, and the row for each range's unknown ids: [ranks] each."""

    ends: torch.Tensor
    defaults: torch.Tensor

    @classmethod
    def of(cls, by_row: dict[int, tuple[int, ...]], table: TableSpec) -> "_Ranges":
        """The ranges in a table's rows; a Contradiction if they overlap, leave gaps, or leave their shard."""
        ordered = sorted((*each, row) for row, each in by_row.items())
        begin = 0
        for first, end, first_row, row in ordered:
            if first != begin or end <= first or not 0 <= first_row <= row < table.rows:
                raise Contradiction(
                    f"table {table.name!r}: unknown ids from {first} to {end} get row {row} of a shard from row "
                    f"{first_row} on; expected ranges without gaps from id 0 on, each with a row of its shard"
                )
            begin = end
        ends, defaults = [each[1] for each in ordered], [each[3] for each in ordered]
        return cls(torch.tensor(ends, dtype=torch.int64), torch.tensor(defaults, dtype=torch.int64))

    def on(self, device: torch.device) -> "_Ranges":
        """A copy on a device, to save each forward there a copy."""
        return _Ranges(self.ends.to(device), self.defaults.to(device))

    def rows(self, raw: torch.Tensor) -> torch.Tensor:
        """The rows for unknown raw ids."""
        here = self.on(raw.device)
        ends, defaults = here.ends, here.defaults
        ranks = torch.searchsorted(ends, raw, right=True)
        # Ids outside of all ranges go to ranks in turn, as unsigned numbers modulo the number of ranks.
        outside = (raw < 0) | (ranks == len(ends))
        number = len(ends)
        turn = torch.where(raw < 0, raw % number + 2**64 % number, raw) % number
        return defaults[torch.where(outside, turn, ranks)]


def _remap(module: Any, features: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Replaces `MCHManagedCollisionModule.remap` if there are several rows for unknown ids."""
    raw, rows, (_, ranges) = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping, module.__dict__[_RANGES]
    remapped = {}
    for name, feature in features.items():
        values = feature.values()
        at = torch.searchsorted(raw[:-1], values)
        remapped[name] = type(feature)(
            values=torch.where(raw[at] == values, rows[at], ranges.rows(values)),
            lengths=feature.lengths(),
            offsets=feature.offsets(),
            weights=feature.weights_or_none(),
        )
    return remapped


def collision_module_of(module: nn.Module, table: TableSpec) -> tuple[str, nn.Module]:
    """The FQN and the managed collision module for a map or ranges; an error if it cannot be used."""
    owner = table.name.rpartition(".")[0]
    modules = collision_modules(module)
    plain = {name: plain_name(module, name) for name in modules}
    names = [name for name in modules if plain[name] == owner]
    names = names or [name for name in modules if owner.endswith(f".{plain[name]}")]
    if len(names) != 1:
        choice = ", ".join(names or modules) or "none"
        raise NotFound(
            f"table {table.name!r}: no managed collision module of that name, or several; modules: {choice}"
        )
    name = names[0]
    _check(name, modules[name], table)
    collection = _collection_of(module, name)
    if hasattr(collection, SHARDED):
        if not collection.need_preprocess:
            raise Contradiction(
                f"table {table.name!r}: the collection of module {name} is sharded for inference without "
                "need_preprocess, so raw ids are not looked up: construct it with need_preprocess=True, or serve "
                "it unsharded"
            )
        if getattr(modules[name], "_disable_fallback", False):
            raise Contradiction(
                f"table {table.name!r}: module {name} drops unknown ids (disable_fallback), and its collection is "
                "sharded for inference: serve it unsharded"
            )
    return name, modules[name]


def _collection_of(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name.rpartition(f".{MODULES}.")[0])


def _check(name: str, module: Any, table: TableSpec) -> None:
    if isinstance(module, torch.jit.ScriptModule) or not callable(
        getattr(module, "rebuild_with_output_id_range", None)
    ):
        raise Contradiction(
            f"table {table.name!r}: module {name} is scripted or traced: pass the original module to the target"
        )
    hashed = hashes(module)
    rows = len(module._hash_zch_identities if hashed else module._mch_sorted_raw_ids)
    first = (module._output_global_offset_tensor is not None) if hashed else module._output_global_offset
    if rows != table.rows or first:
        part = ", one shard of several" if first else ""
        raise Contradiction(
            f"table {table.name!r} has {counted(table.rows, 'row')}, module {name} maps to {rows}{part}"
        )
    if module.training:
        raise Contradiction(
            f"table {table.name!r}: module {name} is in training mode, where it would admit and evict ids itself: "
            "call its eval() before you start the subscriber"
        )


def collision_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The managed collision modules in a module, by FQN, except the modules of shards for inference."""
    shards = {
        each
        for collection in module.modules()
        for rank in getattr(collection, SHARDED, ())
        for each in rank.values()
    }
    return {name: each for name, each in module.named_modules() if _is_map(each) and each not in shards}


def collision_prefixes(module: nn.Module) -> tuple[str, ...]:
    """The prefixes of the names of all managed collision parameters and buffers in a module."""
    names = [name for name, each in module.named_modules() if _is_map(each) or hasattr(each, SHARDED)]
    return tuple(f"{name}.".removeprefix(".") for name in names)


def hashes(module: nn.Module) -> bool:
    """Whether a managed collision module finds rows by hashing instead of in a sorted list of raw ids."""
    return hasattr(module, IDENTITIES)


def _is_map(module: nn.Module) -> bool:
    return hasattr(module, IDENTITIES) or (hasattr(module, SORTED) and hasattr(module, ROWS))
