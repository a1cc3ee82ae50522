"""Modules of managed collision: their maps from raw ids to rows, whole or in shards."""

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

# The modules of a collection; those of the shards, in one that is sharded for inference.
MODULES, SHARDED = "_managed_collision_modules", "_managed_collision_modules_per_rank"
# What holds raw ids: of an `MCHManagedCollisionModule`, and the row of each; of a `HashZchManagedCollisionModule`.
SORTED, ROWS, IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"


def collision_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The managed collision modules in a module, by their FQNs, without those of shards for inference."""
    shards = {
        each
        for collection in module.modules()
        for rank in getattr(collection, SHARDED, ())
        for each in rank.values()
    }
    return {name: each for name, each in module.named_modules() if _is_map(each) and each not in shards}


def collision_prefixes(module: nn.Module) -> tuple[str, ...]:
    """How the names of parameters and buffers begin that a module's managed collision has."""
    names = [name for name, each in module.named_modules() if _is_map(each) or hasattr(each, SHARDED)]
    return tuple(f"{name}.".removeprefix(".") for name in names)


def hashes(module: nn.Module) -> bool:
    """Whether a managed collision module finds rows by hashing, and not in a sorted list of raw ids."""
    return hasattr(module, IDENTITIES)


def collision_module_of(module: nn.Module, table: TableSpec) -> tuple[str, nn.Module]:
    """The managed collision module that a map or ranges belong to, after its FQN.

    Raises:
        NotFound: no managed collision module has its name.
        Contradiction: the module has another size, is only a shard, is scripted, or is in training mode.
    """
    wanted = table.name.rpartition(".")[0]
    modules = collision_modules(module)
    plain = {name: plain_name(module, name) for name in modules}
    names = [name for name in modules if plain[name] == wanted]
    names = names or [name for name in modules if wanted.endswith(f".{plain[name]}")]
    if len(names) != 1:
        known = ", ".join(names or modules) or "none"
        raise NotFound(
            f"table {table.name!r}: no managed collision module of that name, or several; modules: {known}"
        )
    _check(names[0], modules[names[0]], table)
    _check_collection(module, names[0], table)
    return names[0], modules[names[0]]


def _is_map(module: nn.Module) -> bool:
    return hasattr(module, IDENTITIES) or (hasattr(module, SORTED) and hasattr(module, ROWS))


def _check_collection(module: nn.Module, name: str, table: TableSpec) -> None:
    path, _, _ = name.rpartition(f".{MODULES}.")
    collection: Any = module.get_submodule(path)
    if not hasattr(collection, SHARDED):
        return
    if not collection.need_preprocess:
        raise Contradiction(
            f"table {table.name!r}: the collection of module {name} is sharded for inference and does not prepare "
            "raw ids, which is where they are looked up: make it with need_preprocess=True, or serve it unsharded"
        )
    if getattr(module.get_submodule(name), "_disable_fallback", False):
        raise Contradiction(
            f"table {table.name!r}: module {name} drops unknown ids (disable_fallback), and its collection is "
            "sharded for inference: serve it unsharded"
        )


def _check(name: str, module: Any, table: TableSpec) -> None:
    if isinstance(module, torch.jit.ScriptModule) or not callable(
        getattr(module, "rebuild_with_output_id_range", None)
    ):
        raise Contradiction(
            f"table {table.name!r}: module {name} is scripted or traced; give the target the one before"
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
            f"table {table.name!r}: module {name} is in training mode, in which it would admit and evict ids by "
            "itself: call eval() of the module before the subscriber is started"
        )


Ints = NDArray[np.int64]


def id_map_of(module: nn.Module, table: TableSpec) -> "SortedIds | HashedIds":
    """The place of a map of raw ids.

    Raises:
        NotFound: no managed collision module has its name.
        Contradiction: that module cannot follow the map.
    """
    name, found = collision_module_of(module, table)
    return (HashedIds if hashes(found) else SortedIds)(name, found, table)


class SortedIds:
    """The map of an `MCHManagedCollisionModule`: its raw ids in ascending order, and the row of each.

    Attributes:
        name: the module's FQN.
        table: the table.
    """

    def __init__(self, name: str, module: nn.Module, table: TableSpec) -> None:
        self.name = name
        self._module = module
        self.table = table
        self._held = _SortedMap.of(_array(module, SORTED), _array(module, ROWS))

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`.

        Raises:
            Contradiction: two rows have one raw id; nothing was written.
        """
        held = _SortedMap.empty(self.table.rows) if reset else self._held
        if rows:  # All at once: each change costs as much as the map has rows.
            ids = np.concatenate([each.ids for each in rows])
            held = held.changed(ids, np.concatenate([*map(_numbers, rows)]))
        held.check(self.table.name)
        changes = [(name, *_changed(getattr(self._module, name), array)) for name, array in held.arrays]

        def write() -> None:
            self._held = held
            for name, first, tensor in changes:
                getattr(self._module, name)[first : first + len(tensor)] = tensor

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`: as the module has it, so that damage shows."""
        at = torch.from_numpy(self._held.places[ids])
        raw, rows = (getattr(self._module, name)[at].cpu().numpy() for name in (SORTED, ROWS))
        lost = ~entries_of(self._held.raw[at])  # Another entry than the one that it had.
        return np.where(rows == ids, entries_of(raw), lost)[:, None]


@dataclass(frozen=True, eq=False)
class _SortedMap:
    """Raw ids in ascending order ([rows], free rows last), the row of each, and the place of each row."""

    raw: Ints
    rows: Ints
    places: Ints

    @classmethod
    def of(cls, raw: Ints, rows: Ints) -> "_SortedMap":
        """A map as a module has it; an empty one where that is none."""
        places = np.full(len(rows), -1)
        inside = (rows >= 0) & (rows < len(rows))
        places[rows[inside]] = np.flatnonzero(inside)
        if (places < 0).any() or ((raw[1:] <= raw[:-1]) & (raw[1:] != FREE_ID)).any():
            return cls.empty(len(rows))
        return cls(raw, rows, places)

    @classmethod
    def empty(cls, rows: int) -> "_SortedMap":
        """A map of which every row is free."""
        return cls(np.full(rows, FREE_ID), np.arange(rows), np.arange(rows))

    def changed(self, ids: Ids, values: Ints) -> "_SortedMap":
        """The same with other raw ids in the rows `ids`: `values` holds their entries."""
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
        """Check that no raw id has two rows.

        Raises:
            Contradiction: one has.
        """
        twice = np.flatnonzero((self.raw[1:] == self.raw[:-1]) & (self.raw[1:] != FREE_ID))
        if len(twice):
            first, second = sorted(self.rows[twice[0] : twice[0] + 2].tolist())
            raise Contradiction(f"table {table!r}: raw id {self.raw[twice[0]]} has two rows, {first} and {second}")

    @property
    def arrays(self) -> list[tuple[str, Ints]]:
        """What the module's buffers are to hold, by their names."""
        return [(SORTED, self.raw), (ROWS, self.rows)]


class HashedIds:
    """The identities of a `HashZchManagedCollisionModule`: the raw id of each row, which is found by hashing.

    Attributes:
        name: the module's FQN.
        table: the table.
    """

    def __init__(self, name: str, module: nn.Module, table: TableSpec) -> None:
        self.name = name
        self._module: Any = module
        self.table = table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`.

        Raises:
            Contradiction: the module, which hashes in its own way, would not find a raw id; nothing was written.
        """
        held = self._module._hash_zch_identities.data
        staged = torch.full_like(held, -1) if reset else held.clone()
        ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in rows)])
        values = np.concatenate([np.empty(0, np.int64), *map(_numbers, rows)])
        identities = np.where(values == 0, -1, raw_ids_of(values))
        changed, raw = (torch.from_numpy(each).to(held.device) for each in (ids, identities))
        staged[changed, 0] = raw
        self._check(staged, values)

        def write() -> None:
            if reset:
                held.copy_(staged)
            else:
                held[changed, 0] = raw

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        held = self._module._hash_zch_identities.data
        identities = held[torch.from_numpy(ids.copy())].cpu().numpy()
        return np.where(identities == -1, 0, entries_of(identities))

    def _check(self, identities: torch.Tensor, values: Ints) -> None:
        """Check that the module finds the raw ids of some values in what it is to hold."""
        raw = torch.from_numpy(raw_ids_of(values[values != 0])).to(identities.device)
        if lost := raw[_not_found(self._module, identities, raw)].tolist():
            raise Contradiction(
                f"table {self.table.name!r}: module {self.name} hashes otherwise: it does not find id {lost[0]} "
                f"and {len(lost) - 1} others: total_num_buckets ({self._module._buckets}), max_probe "
                f"({self._module._max_probe}), input_hash_size ({self._module._input_hash_size}) and the share of "
                "reserved slots must be as in the trainer"
            )


def _not_found(module: Any, identities: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Which of the raw ids [n] the module would not find if it had these identities: bool [n]."""
    try:
        values, sizes, offsets = module.input_mapper(values=raw, output_offset=module._output_global_offset_tensor)
    except (IndexError, RuntimeError):  # One belongs to no bucket.
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


def _array(module: nn.Module, name: str) -> Ints:
    array: Ints = getattr(module, name).cpu().numpy().copy()
    return array


def _changed(held: torch.Tensor, array: Ints) -> tuple[int, torch.Tensor]:
    """From where on, and to what, a buffer changes that is to hold an array.

    Of raw ids that grow that is the end; others move all that lie between them.
    """
    new = torch.from_numpy(array).to(held.device)
    differs = (held != new).nonzero().flatten().cpu()
    first, end = (int(differs[0]), int(differs[-1]) + 1) if len(differs) else (0, 0)
    return first, new[first:end]


def _numbers(rows: RowBatch) -> Ints:
    return rows.values[:, 0].astype(np.int64, copy=False)


def sharded_map_of(module: nn.Module, table: TableSpec) -> "ShardedMap | SortedIds | HashedIds":
    """The place of a map of raw ids, of shards or not; raises what `id_map_of` does."""
    whole = id_map_of(module, table)
    path, _, _ = whole.name.rpartition(f".{MODULES}.")
    collection = module.get_submodule(path)
    return ShardedMap(whole, collection) if hasattr(collection, SHARDED) else whole


@dataclass(frozen=True, eq=False)
class ShardedMap:
    """The map of a module whose rows are sharded for inference.

    Attributes:
        whole: the map itself.
        collection: what has the module, and those of the shards.
    """

    whole: SortedIds | HashedIds
    collection: Any

    @property
    def name(self) -> str:
        """The module's FQN."""
        return self.whole.name

    @property
    def table(self) -> TableSpec:
        """The table."""
        return self.whole.table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`; raises what that of the map does."""
        write_map = self.whole.stage(rows, reset=reset)

        def write() -> None:
            write_map()
            self._look_up_before_sending()

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        return self.whole.read(ids)

    def _look_up_before_sending(self) -> None:
        _, _, table = self.name.rpartition(".")
        module = getattr(self.collection, MODULES)[table]
        vars(module).update(preprocess=MethodType(_rows_of, module), input_size=module.output_size)
        for rank in getattr(self.collection, SHARDED):
            vars(rank[table])["forward"] = _unchanged
        for dist in self.collection._input_dists:  # Made in the first forward; 0 sends ids to the shards in turn.
            dist.feature_block_sizes.clamp_(min=1)


def _rows_of(module: Any, features: dict[str, Any]) -> dict[str, Any]:
    """`preprocess` of a managed collision module: the rows of raw ids, where these are."""
    here = next(module.buffers()).device
    raw = {name: each.to(here) for name, each in features.items()}
    rows = module.remap(type(module).preprocess(module, raw))
    return {name: each.to(features[name].device()) for name, each in rows.items()}


def _unchanged(features: dict[str, Any]) -> dict[str, Any]:
    """`forward` of a shard's module: what reaches it are rows already."""
    return features
