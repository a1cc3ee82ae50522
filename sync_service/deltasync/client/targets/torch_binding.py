"""Find the tensor, TBE or map of a torch module for each table."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import nn

from deltasync.base.errors import Contradiction, DeltasyncError, NotFound
from deltasync.client.targets.target import BatchDigests
from deltasync.client.targets.torch_collision import (
    IdRanges,
    collision_modules,
    collision_prefixes,
    id_map_of,
)
from deltasync.client.targets.torch_compiled import absence, check_not_frozen
from deltasync.client.targets.torch_quantised import (
    TABLES_OF,
    QuantisedRows,
    TbeShard,
    tables_in_tbes,
    tbe_prefixes,
    tbes_of,
)
from deltasync.client.targets.torch_tensors import (
    CastTensor,
    Tensor,
    casts,
    not_saved,
    plain_name,
    tensors_of,
    value_types_of,
)
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

_COLLISIONS = "._managed_collision_collection."
# A managed collision module has its tables in this submodule, or by itself if it is quantised.
_EMBEDDINGS = ("._embedding_module.", ".")
# Parts of names in a quantised TorchRec model, by the part before quantisation.
_QUANTISED_NAMES = {
    "._embedding_module.": ".",
    "._embedding_bag_collection.": ".",
    "._feature_processors.": ".feature_processor.",
}


class TablePlace(Protocol):
    """The part of a module with the rows of a table."""

    @property
    def name(self) -> str:
        """Its FQN in the module."""

    @property
    def table(self) -> TableSpec:
        """The table."""

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], BatchDigests | None]:
        """Prepare a release's rows of the table; with `reset`, all other rows become zero.

        Returns a quick function that writes the rows and cannot fail. It returns the digests of each batch's rows
        in the module, or None if they must be read back. If the rows cannot be written: Contradiction.
        """

    def read(self, ids: Ids) -> Values:
        """Copy the rows `ids` ([n], strictly ascending) to host memory: [n, dim]."""


@dataclass(frozen=True)
class Binding:
    """The `places` of tables in a module, the `problems` of tables without one, and `stale` names of the module.

    No table updates the parameters and buffers in `stale`.
    """

    places: dict[str, TablePlace]
    problems: dict[str, DeltasyncError]
    stale: list[str]


def bind(
    module: nn.Module,
    tables: Sequence[TableSpec],
    before: Collection[str] = (),
    types: Collection[ValueType] | None = None,
) -> Binding:
    """Find the place of each table. A table, its map and its ranges all have places, or none of them has.

    If several tables fit one place, the table with the place's own name gets it, else the one that had it
    `before`. `types` are the value types of the consumer's embedding tables; None = the types of `tables`.
    """
    check_not_frozen(module)
    contents = _Contents.of(module, value_types_of(tables) if types is None else types)
    places: dict[str, TablePlace] = {}
    problems: dict[str, DeltasyncError] = {}
    for table in tables:
        try:
            places[table.name] = contents.place_of(table)
        except DeltasyncError as problem:
            problems[table.name] = problem
    _refuse_untied(contents, places, problems)
    _refuse_shared(places, problems, before)
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
        # Binding is slow, so only bind parts whose names match this table.
        fits = any(_fits(table, plain_name(parts[part], name)) for name in names[part])
        if fits and not bind(parts[part], tables, types=types).problems:
            return part
    return ""


def missing_maps(module: nn.Module, binding: Binding) -> list[str]:
    """Names of the maps of raw ids that the bound embedding tables need, but no table updates."""
    bound = {place.name for place in binding.places.values()}
    return [
        f"{name}.raw_ids"
        for name in collision_modules(module)
        if name not in bound and any(_embeds(name, parameter) for parameter in bound)
    ]


def accelerators(module: nn.Module) -> set[torch.device]:
    """The devices with asynchronous work on the module's tensors."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return set()  # Skip the search, which takes milliseconds in a large module.
    tensors = (*tensors_of(module).values(), *(each for tbe in tbes_of(module) for each in tbe.memory))
    return {tensor.device for tensor in tensors if tensor.is_cuda}


def in_training(module: nn.Module, binding: Binding) -> list[str]:
    """Names of modules in training mode whose forward may change synchronised buffers or maps."""
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
    """The parts of a module that could be places: tensors and tables of TBEs, by name.

    `plain` has the names of both without the parts of wrappers, by full name.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    tbes: dict[str, list[TbeShard]]
    plain: dict[str, str]
    types: Collection[ValueType]

    @classmethod
    def of(cls, module: nn.Module, types: Collection[ValueType]) -> "_Contents":
        """The parts of `module`."""
        tbes = tables_in_tbes(module)
        prefixes = tbe_prefixes(module, tbes)
        everything = tensors_of(module)
        in_tbes = {id(each) for name, each in everything.items() if name.startswith(prefixes)}
        tensors = {name: each for name, each in everything.items() if id(each) not in in_tbes}
        plain = {name: plain_name(module, name) for name in (*tensors, *tbes)}
        return cls(module, tensors, tbes, plain, types)

    def place_of(self, table: TableSpec) -> TablePlace:
        """The place of a table: NotFound if no tensor has its name, Contradiction if its form differs."""
        if table.kind is TableKind.ID_MAP:
            return id_map_of(self.module, table)
        if table.kind is TableKind.ID_RANGES:
            return IdRanges(self.module, table)
        name = self._one_place(table)
        if name in self.tbes:
            return QuantisedRows.of(name, table, self.tbes[name])
        dtype = self.tensors[name].dtype
        cast = casts(table, dtype, self.types)
        place = CastTensor(self.module, name, table, dtype) if cast else Tensor(self.module, name, table)
        place.check()
        return place

    def _one_place(self, table: TableSpec) -> str:
        """The name of a table's tensor. Weights that are tied in the trainer must be tied here, too."""
        # One of the table's names is enough, since a predictor may lack a part of the model.
        places = {name: own for name in table.names if (own := self._name_of(name))}
        if not places:
            raise NotFound(f"table {table.name!r}: {absence(self.module, table.name)}")
        (first, place), *others = places.items()
        for other, also in others:
            if self.identity(also) != self.identity(place):
                raise Contradiction(
                    f"table {table.name!r}: {first} and {other} are one tensor in the trainer, but two in the "
                    f"module, {place} and {also}: tie them in the module, too"
                )
        return place

    def _name_of(self, table: str) -> str:
        """The name in the module of the tensor for a table; empty if there is none."""
        names = self._names_of(table) or self._names_of(_quantised_name(table))
        if len({self.identity(each) for each in names}) > 1:
            raise NotFound(f"table {table!r}: several tensors match: {', '.join(names)}; expected one")
        return names[0] if names else ""

    def _names_of(self, table: str) -> list[str]:
        exact = [name for name, plain in self.plain.items() if table in (plain, plain.removesuffix(".weight"))]
        return exact or [name for name, plain in self.plain.items() if _ends_with(table, plain)]

    def identity(self, name: str) -> object:
        """A key that is equal for all names of one tensor."""
        return id(self.tensors[name]) if name in self.tensors else name


def _quantised_name(name: str) -> str:
    """The name of a parameter or buffer in the quantised TorchRec model."""
    return reduce(lambda each, pair: each.replace(*pair), _QUANTISED_NAMES.items(), f".{name}").removeprefix(".")


def _fits(table: TableSpec, name: str) -> bool:
    """Whether a parameter or buffer of this name may be the place of a table."""
    names = {*table.names, *map(_quantised_name, table.names)}
    return any(_ends_with(f".{each}", name) for each in names)


def _ends_with(table: str, name: str) -> bool:
    return table.endswith((f".{name}", f".{name.removesuffix('.weight')}"))


def _refuse_untied(
    contents: _Contents, places: dict[str, TablePlace], problems: dict[str, DeltasyncError]
) -> None:
    """Refuse tables that are separate tensors in the trainer, but one tensor in the module."""
    tables: dict[object, list[str]] = {}
    for table, place in places.items():
        if isinstance(place, Tensor):
            tables.setdefault(contents.identity(place.name), []).append(table)
    for several in tables.values():
        if len(names := {places[table].name for table in several}) > 1:
            for table in several:
                problems[table] = Contradiction(
                    f"table {table!r}: {' and '.join(several)} are separate in the trainer, but one tensor in the "
                    f"module, {' and '.join(sorted(names))}: tie them in the trainer, or untie them in the module"
                )
                del places[table]


def _refuse_shared(
    places: dict[str, TablePlace], problems: dict[str, DeltasyncError], before: Collection[str]
) -> None:
    """If several tables fit one place, refuse all except the place's owner."""
    tables: dict[tuple[type[TablePlace], str], list[str]] = {}
    for table, place in places.items():
        kind = Tensor if isinstance(place, Tensor) else type(place)
        tables.setdefault((kind, place.name), []).append(table)
    for (_, name), several in tables.items():
        exact = [table for table in several if name in (table, f"{table}.weight", table.rpartition(".")[0])]
        owners = exact or [table for table in several if table in before] or several
        for table in several:
            if len(owners) > 1 or table not in owners:
                text = f"tables {', '.join(several)} all fit {name}: pass the whole model to the target"
                problems[table] = Contradiction(text)
                del places[table]


def _refuse_half(
    tables: Sequence[TableSpec], places: dict[str, TablePlace], problems: dict[str, DeltasyncError]
) -> None:
    """Refuse a table, its map and its ranges if one of them has no place, since they only work together."""
    for table in tables:
        together = [each.name for each in tables if (each.of or each.name) == (table.of or table.name)]
        if table.name in places and (broken := [name for name in together if name in problems]):
            text = f"table {table.name!r} needs {broken[0]!r}, which has no place"
            problems[table.name] = type(problems[broken[0]])(text)
            del places[table.name]


def _stale(contents: _Contents, places: dict[str, TablePlace]) -> list[str]:
    bound = {contents.identity(place.name) for place in places.values()}
    collisions = collision_prefixes(contents.module)
    unsaved = not_saved(contents.module)
    tensors = [name for name in contents.tensors if name not in unsaved and not name.startswith(collisions)]
    return [name for name in (*tensors, *contents.tbes) if contents.identity(name) not in bound]
