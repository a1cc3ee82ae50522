"""The map from raw ids to rows that a managed collision module holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from deltasync.client.modules.collision import ROWS, SORTED, collision_module_of, hashes
from deltasync.core.errors import Contradiction
from deltasync.core.raw_ids import FREE_ID, entries_of, raw_ids_of
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec

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
