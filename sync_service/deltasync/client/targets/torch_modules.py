"""Which tensor of a torch module has the rows of which table."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from deltasync.base.errors import Contradiction, DeltasyncError, NotFound
from deltasync.client.targets.torch_collision import (
    collision_module_of,
    collision_modules,
    collision_prefixes,
    hashes,
    sharded_map_of,
)
from deltasync.client.targets.torch_compiled import absence
from deltasync.client.targets.torch_tensors import (
    TABLES_OF,
    CastTensor,
    Piece,
    QuantisedRows,
    Tensor,
    casts,
    plain_name,
    tables_in_tbes,
    tbe_memory,
    tbe_prefixes,
    value_types_of,
)
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

# Kept with the module, so that another target over the same module knows them.
_RANGES = "_deltasync_id_ranges"


def id_ranges_of(module: nn.Module, table: TableSpec) -> "IdRanges":
    """The place of the rows that unknown raw ids take; raises what `id_map_of` does."""
    return IdRanges(*collision_module_of(module, table), table)


class IdRanges:
    """The rows that raw ids take that a managed collision module does not know: one for each rank of the trainer.

    An MCH module by itself has one such row, its last. Where the trainer has others, the module's `remap` is
    replaced by one that knows them.

    Attributes:
        name: the module's FQN.
        table: the table.
    """

    def __init__(self, name: str, module: nn.Module, table: TableSpec) -> None:
        self.name = name
        self._module = module
        self.table = table

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `binding.Place`.

        Raises:
            Contradiction: ranges that overlap or leave gaps, or rows that the module cannot give to unknown ids.
        """
        by_row = {} if reset else self._held
        for each in rows:  # Nearly all of them may be zeros: no loop over them.
            by_row = {row: held for row, held in by_row.items() if not (each.ids == row).any()}
            some = each.values.any(axis=1)
            by_row.update(zip(each.ids[some].tolist(), map(tuple, each.values[some].tolist()), strict=True))
        ranges = _Ranges.of(by_row, self.table).on(next(self._module.buffers()).device)
        by_itself = not by_row or ranges.defaults.tolist() == [self.table.rows - 1]
        if hashes(self._module) and by_row:
            raise Contradiction(
                f"table {self.table.name!r}: unknown ids take rows {ranges.defaults.tolist()} in the trainer, in "
                f"module {self.name} those that they hash to"
            )

        def write() -> None:
            self._module.__dict__[_RANGES] = (by_row, ranges)
            if by_itself:
                self._module.__dict__.pop("remap", None)
            else:
                self._module.__dict__["remap"] = MethodType(_remap, self._module)

        return write

    def read(self, ids: Ids) -> Values:
        """See `binding.Place`."""
        values = np.zeros((len(ids), 3), np.int64)
        for row, each in self._held.items():
            values[ids == row] = each
        return values

    @property
    def _held(self) -> dict[int, tuple[int, ...]]:
        """First raw id, end, and first row of the shard, by default row."""
        held: dict[int, tuple[int, ...]] = self._module.__dict__.get(_RANGES, ({}, None))[0]
        return held


@dataclass(frozen=True, eq=False)
class _Ranges:
    """The ends of the ranges of raw ids, ascending, and the row that unknown ids of each take: [ranks] each."""

    ends: torch.Tensor
    defaults: torch.Tensor

    @classmethod
    def of(cls, by_row: dict[int, tuple[int, ...]], table: TableSpec) -> "_Ranges":
        """The ranges that a table says.

        Raises:
            Contradiction: they overlap, leave gaps, or are of another shard.
        """
        ordered = sorted((*each, row) for row, each in by_row.items())
        begin = 0
        for first, end, first_row, row in ordered:
            if first != begin or end <= first or not 0 <= first_row <= row < table.rows:
                raise Contradiction(
                    f"table {table.name!r}: unknown ids from {first} to {end} take row {row}, of a shard from row "
                    f"{first_row} on; expected ranges one after another from 0 on, each with a row of its shard"
                )
            begin = end
        ends, defaults = [each[1] for each in ordered], [each[3] for each in ordered]
        return cls(torch.tensor(ends, dtype=torch.int64), torch.tensor(defaults, dtype=torch.int64))

    def on(self, device: torch.device) -> "_Ranges":
        """The same on a device: a forward there need not bring them."""
        return _Ranges(self.ends.to(device), self.defaults.to(device))

    def rows(self, raw: torch.Tensor) -> torch.Tensor:
        """The row that each of some unknown raw ids takes."""
        here = self.on(raw.device)
        ends, defaults = here.ends, here.defaults
        ranks = torch.searchsorted(ends, raw, right=True)
        # Ids outside of all ranges go to the ranks in turn, taken as unsigned numbers.
        outside = (raw < 0) | (ranks == len(ends))
        return defaults[torch.where(outside, _unsigned_modulo(raw, len(ends)), ranks)]


def _unsigned_modulo(raw: torch.Tensor, number: int) -> torch.Tensor:
    return torch.where(raw < 0, raw % number + 2**64 % number, raw) % number


def _remap(module: Any, features: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """`MCHManagedCollisionModule.remap` of a module whose unknown ids take several rows."""
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


_COLLISIONS = "._managed_collision_collection."
# What managed collision wraps: itself quantised, it has the tables.
_EMBEDDINGS = ("._embedding_module.", ".")
# Names that TorchRec changes as it quantises, by what they were.
_QUANTISED_NAMES = {
    "._embedding_module.": ".",
    "._embedding_bag_collection.": ".",
    "._feature_processors.": ".feature_processor.",
}


class Place(Protocol):
    """What of a module holds a table."""

    @property
    def name(self) -> str:
        """Its FQN in the module."""

    @property
    def table(self) -> TableSpec:
        """The table."""

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """Prepare what a release brings of the table, and return what writes it, which is quick and cannot fail.

        Args:
            rows: the changed rows.
            reset: whether all other rows become zero.

        Raises:
            Contradiction: it cannot be written; nothing was.
        """

    def read(self, ids: Ids) -> Values:
        """The rows `ids` ([n], strictly ascending) as [n, dim], in host memory."""


@dataclass(frozen=True)
class Binding:
    """Which tables a module holds, and where.

    Attributes:
        places: by the table's name.
        problems: why the other tables have none, by the table's name.
        stale: names of parameters and buffers of the module's state that no table brings.
    """

    places: dict[str, Place]
    problems: dict[str, DeltasyncError]
    stale: list[str]


def bind(
    module: nn.Module,
    tables: Sequence[TableSpec],
    held: Collection[str] = (),
    types: Collection[ValueType] | None = None,
) -> Binding:
    """Find the place of each table. A table and its map and ranges have places together, or none has.

    Where several fit one place, the one that has its very name gets it, or else the one among `held`, tables that
    had their places before.

    Args:
        module: what to look in.
        tables: what to look for.
        held: see above.
        types: the value types in which the consumer's embedding tables come; None = those of `tables`.
    """
    contents = _Contents.of(module, value_types_of(tables) if types is None else types)
    places: dict[str, Place] = {}
    problems: dict[str, DeltasyncError] = {}
    for table in tables:
        try:
            places[table.name] = contents.place_of(table)
        except DeltasyncError as problem:
            problems[table.name] = problem
    _refuse_untied(contents, places, problems)
    _refuse_shared(places, problems, held)
    _refuse_half(tables, places, problems)
    return Binding(places, problems, _stale(contents, places))


def part_that_fits(module: nn.Module, tables: Sequence[TableSpec], types: Collection[ValueType]) -> str:
    """The name of the outermost part of a module in which all tables have places; empty if there is none."""
    table = next((each for each in tables if each.kind not in (TableKind.ID_MAP, TableKind.ID_RANGES)), None)
    if table is None:
        return ""
    contents, parts = _Contents.of(module, types), dict(module.named_modules())
    names: dict[str, list[str]] = {}
    for name in contents.plain:
        path = name.split(".")
        for length in range(1, len(path)):
            names.setdefault(".".join(path[:length]), []).append(".".join(path[length:]))
    for part in sorted(names.keys() & parts.keys(), key=lambda each: (each.count("."), each)):
        # The names of one table say which parts are worth to bind everything.
        fits = any(_fits(table, plain_name(parts[part], name)) for name in names[part])
        if fits and not bind(parts[part], tables, types=types).problems:
            return part
    return ""


def missing_maps(module: nn.Module, binding: Binding) -> list[str]:
    """Names of the maps of raw ids that the module's bound embedding tables need, and that no table brings."""
    bound = {place.name for place in binding.places.values()}
    return [
        f"{name}.raw_ids"
        for name in collision_modules(module)
        if name not in bound and any(_embeds(name, parameter) for parameter in bound)
    ]


def accelerators(module: nn.Module) -> set[torch.device]:
    """Where work on the module's tensors goes on after the call that began it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return set()  # To look through a module of many parts takes milliseconds.
    tensors = [tensor for _, tensor in _tensors(module)]
    return {tensor.device for tensor in (*tensors, *tbe_memory(module)) if tensor.is_cuda}


def in_training(module: nn.Module, binding: Binding) -> list[str]:
    """Names of the modules in training mode whose forward may change what tables bring."""
    changing = [
        each for each in binding.places.values() if each.table.kind in (TableKind.BUFFER, TableKind.ID_MAP)
    ]
    owners = [each.name.rpartition(".")[0] if isinstance(each, Tensor) else each.name for each in changing]
    return [name for name in dict.fromkeys(owners) if module.get_submodule(name).training]


def _embeds(collision: str, parameter: str) -> bool:
    owner, _, rest = f".{collision}".rpartition(_COLLISIONS)
    _, _, table = rest.rpartition(".")
    weights = [f"{owner}{embedding}{kind}.{table}.weight" for embedding in _EMBEDDINGS for kind in TABLES_OF]
    return f".{parameter}" in weights


@dataclass(frozen=True)
class _Contents:
    """What a module has that could hold a table.

    Attributes:
        module: the module.
        tensors: its parameters and buffers by name, without those that its TBEs have, or share with their tables.
        tbes: the tables in its TBEs, likewise.
        plain: the names of both without what wrappers add to them, by name.
        types: the value types in which the consumer's embedding tables come.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    tbes: dict[str, list[Piece]]
    plain: dict[str, str]
    types: Collection[ValueType]

    @classmethod
    def of(cls, module: nn.Module, types: Collection[ValueType]) -> "_Contents":
        """What a module has."""
        tbes = tables_in_tbes(module)
        prefixes = tbe_prefixes(module, tbes)
        everything = dict(_tensors(module))
        in_tbes = {id(each) for name, each in everything.items() if name.startswith(prefixes)}
        tensors = {name: each for name, each in everything.items() if id(each) not in in_tbes}
        plain = {name: plain_name(module, name) for name in (*tensors, *tbes)}
        return cls(module, tensors, tbes, plain, types)

    def place_of(self, table: TableSpec) -> Place:
        """The place of a table.

        Raises:
            NotFound: nothing has its name.
            Contradiction: what has its name cannot hold it.
        """
        if table.kind is TableKind.ID_MAP:
            return sharded_map_of(self.module, table)
        if table.kind is TableKind.ID_RANGES:
            return id_ranges_of(self.module, table)
        name = self._one_place(table)
        if name in self.tbes:
            return QuantisedRows.of(name, table, self.tbes[name])
        dtype = self.tensors[name].dtype
        cast = casts(table, dtype, self.types)
        place = CastTensor(self.module, name, table, dtype) if cast else Tensor(self.module, name, table)
        _ = place.rows  # Checked now.
        return place

    def _one_place(self, table: TableSpec) -> str:
        """The name of what holds a table. Weights that the trainer ties have to be tied here, too."""
        # One of its names is enough: a predictor may lack a part of the model.
        places = {name: found for name in table.names if (found := self._name_of(name))}
        if not places:
            raise NotFound(f"table {table.name!r}: {absence(self.module, table.name)}")
        (first, place), *others = places.items()
        for other, also in others:
            if self.identity(also) != self.identity(place):
                raise Contradiction(
                    f"table {table.name!r}: {first} and {other} are one tensor in the trainer, and two in the "
                    f"module, {place} and {also}: tie them there, too"
                )
        return place

    def _name_of(self, table: str) -> str:
        """The name of what has the name of a table; empty where nothing has."""
        found = self._names_of(table) or self._names_of(_quantised_name(table))
        if len({self.identity(each) for each in found}) > 1:
            raise NotFound(f"table {table!r}: {', '.join(found)} fit, expected one")
        return found[0] if found else ""

    def _names_of(self, table: str) -> list[str]:
        exact = [name for name, plain in self.plain.items() if table in (plain, plain.removesuffix(".weight"))]
        return exact or [name for name, plain in self.plain.items() if _ends_with(table, plain)]

    def identity(self, name: str) -> object:
        """The same for all names of one tensor."""
        return id(self.tensors[name]) if name in self.tensors else name


def _quantised_name(name: str) -> str:
    """What TorchRec calls a parameter or buffer of a model in the quantised model."""
    return reduce(lambda known, pair: known.replace(*pair), _QUANTISED_NAMES.items(), f".{name}").removeprefix(".")


def _fits(table: TableSpec, name: str) -> bool:
    """Whether a parameter or buffer of this name may be the place of a table."""
    names = {*table.names, *map(_quantised_name, table.names)}
    return any(_ends_with(f".{each}", name) for each in names)


def _ends_with(table: str, name: str) -> bool:
    return table.endswith((f".{name}", f".{name.removesuffix('.weight')}"))


def _refuse_untied(contents: _Contents, places: dict[str, Place], problems: dict[str, DeltasyncError]) -> None:
    """Refuse tables that are apart in the trainer, and whose places are names of one tensor of the module."""
    tables: dict[object, list[str]] = {}
    for table, place in places.items():
        if isinstance(place, Tensor):
            tables.setdefault(contents.identity(place.name), []).append(table)
    for several in tables.values():
        if len(names := {places[table].name for table in several}) > 1:
            for table in several:
                problems[table] = Contradiction(
                    f"table {table!r}: {' and '.join(several)} are apart in the trainer, and one tensor in the "
                    f"module, {' and '.join(sorted(names))}: tie them in the trainer, or untie them in the module"
                )
                del places[table]


def _refuse_shared(places: dict[str, Place], problems: dict[str, DeltasyncError], held: Collection[str]) -> None:
    tables: dict[tuple[type[Place], str], list[str]] = {}
    for table, place in places.items():
        kind = Tensor if isinstance(place, Tensor) else type(place)
        tables.setdefault((kind, place.name), []).append(table)
    for (_, name), several in tables.items():
        for table in _without_owner(several, name, held):
            text = f"tables {', '.join(several)} fit one place, {name}: give the target the whole model"
            problems[table] = Contradiction(text)
            del places[table]


def _without_owner(tables: list[str], place: str, held: Collection[str]) -> list[str]:
    """Those of some tables that fit one place which do not get it."""
    exact = [table for table in tables if place in (table, f"{table}.weight", table.rpartition(".")[0])]
    owners = exact or [table for table in tables if table in held] or tables
    return tables if len(owners) > 1 else [table for table in tables if table not in owners]


def _refuse_half(
    tables: Sequence[TableSpec], places: dict[str, Place], problems: dict[str, DeltasyncError]
) -> None:
    for table in tables:
        broken = [each.name for each in tables if each.name in problems and _together(table, each)]
        if table.name in places and broken:
            text = f"table {table.name!r} is of no use without {broken[0]!r}, which has no place"
            problems[table.name] = type(problems[broken[0]])(text)
            del places[table.name]


def _together(table: TableSpec, other: TableSpec) -> bool:
    return (table.of or table.name) == (other.of or other.name)


def _stale(contents: _Contents, places: dict[str, Place]) -> list[str]:
    bound = {contents.identity(place.name) for place in places.values()}
    collisions = collision_prefixes(contents.module)
    # TorchRec's `state_dict` of managed collision that is sharded for inference fails at 4 bits.
    not_saved = {
        f"{owner}.{name}".removeprefix(".")
        for owner, each in contents.module.named_modules()
        for name in each._non_persistent_buffers_set
    }
    tensors = [name for name in contents.tensors if name not in not_saved and not name.startswith(collisions)]
    return [name for name in (*tensors, *contents.tbes) if contents.identity(name) not in bound]


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
