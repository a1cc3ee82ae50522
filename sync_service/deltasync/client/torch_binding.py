"""What of a module holds which table."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import increment_version

from deltasync.client.torch_collision import collision_modules
from deltasync.client.torch_compiled import absence, compiled_module_of
from deltasync.client.torch_id_map import id_map_of
from deltasync.client.torch_id_ranges import id_ranges_of
from deltasync.core.errors import Contradiction, DeltasyncError, NotFound
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableKind, TableSpec, matrix_shape

_EMBEDDINGS = "._embedding_module."
_COLLISIONS = "._managed_collision_collection."


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
class Tensor:
    """A parameter or buffer of a module, as the place of a table."""

    module: nn.Module
    name: str
    table: TableSpec

    @property
    def rows(self) -> torch.Tensor:
        """Its live view [rows, dim].

        Raises:
            Contradiction: it has another shape or type than the table, or cannot be written by rows.
        """
        # Found by its name each time: `module.to(...)` puts other memory behind a name.
        found: Any = reduce(getattr, self.name.split("."), self.module)
        tensor: torch.Tensor = found.detach()
        self._check(tensor)
        return tensor.view(self.table.rows, self.table.dim)

    def stage(self, rows: Sequence[RowBatch], *, reset: bool) -> Callable[[], None]:
        """See `Place`."""
        held = self.rows
        compiled = compiled_module_of(self.module, self.name)
        if compiled:
            held = compiled[0].spare(compiled[1]).view(held.shape)

        def write() -> None:
            if reset:
                held.zero_()
            for each in rows:
                _write(held, each)

        if not compiled:
            return write
        with torch.inference_mode():
            write()
        return compiled[0].swap

    def read(self, ids: Ids) -> Values:
        """See `Place`."""
        held = self.rows
        return held.index_select(0, _on(held, ids)).cpu().numpy()

    def _check(self, tensor: torch.Tensor) -> None:
        table, wanted = self.table, torch.from_numpy(np.empty(0, self.table.dtype)).dtype
        what = f"the module has {self.name} of shape {list(tensor.shape)} and type {tensor.dtype}"
        if matrix_shape(tensor.shape) != (table.rows, table.dim) or tensor.dtype != wanted:
            why = (
                ", which looks quantised: quantised tables cannot follow yet" if _quantised(table, tensor) else ""
            )
            raise Contradiction(f"table {table.name!r} is {table.rows} x {table.dim} {wanted}, {what}{why}")
        if tensor.is_meta or not tensor.is_contiguous():
            where = "on the meta device" if tensor.is_meta else "that does not lie in memory row by row"
            raise Contradiction(f"table {table.name!r}: {what} {where}, which cannot be written")


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


def bind(module: nn.Module, tables: Sequence[TableSpec], held: Collection[str] = ()) -> Binding:
    """Find the place of each table. A table and its map and ranges have places together, or none has.

    Where several fit one place, the one that has its very name gets it, or else the one among `held`, tables that
    had their places before.
    """
    places: dict[str, Place] = {}
    problems: dict[str, DeltasyncError] = {}
    for table in tables:
        try:
            places[table.name] = _place(module, table)
        except DeltasyncError as problem:
            problems[table.name] = problem
    _refuse_shared(places, problems, held)
    _refuse_half(tables, places, problems)
    return Binding(places, problems, _stale(module, places))


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
    return {tensor.device for _, tensor in _tensors(module) if tensor.is_cuda}


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
    return f".{parameter}".startswith(owner + _EMBEDDINGS) and parameter.endswith(f".{table}.weight")


def _place(module: nn.Module, table: TableSpec) -> Place:
    if table.kind is TableKind.ID_MAP:
        return id_map_of(module, table)
    if table.kind is TableKind.ID_RANGES:
        return id_ranges_of(module, table)
    place = Tensor(module, _name_of(module, table), table)
    _ = place.rows  # Checked now.
    return place


def _name_of(module: nn.Module, table: TableSpec) -> str:
    names = _state(module)
    exact = [name for name in names if table.name in (name, name.removesuffix(".weight"))]
    found = exact or [name for name in names if _ends_with(table.name, name)]
    if len(found) > 1:
        raise NotFound(f"table {table.name!r}: {', '.join(found)} fit, expected one")
    if not found:
        raise NotFound(f"table {table.name!r}: {absence(module, table.name)}")
    return found[0]


def _ends_with(table: str, name: str) -> bool:
    return table.endswith((f".{name}", f".{name.removesuffix('.weight')}"))


def _refuse_shared(places: dict[str, Place], problems: dict[str, DeltasyncError], held: Collection[str]) -> None:
    tables: dict[tuple[type[Place], str], list[str]] = {}
    for table, place in places.items():
        tables.setdefault((type(place), place.name), []).append(table)
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


def _stale(module: nn.Module, places: dict[str, Place]) -> list[str]:
    bound = {place.name for place in places.values()}
    collisions = tuple(f"{name}." for name in collision_modules(module))
    saved = module.state_dict().keys()
    return [
        name for name in _state(module) if name in saved and name not in bound and not name.startswith(collisions)
    ]


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return {name: tensor for name, tensor in _tensors(module) if tensor is not None}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _quantised(table: TableSpec, tensor: torch.Tensor) -> bool:
    return table.kind is TableKind.EMBEDDING and not tensor.dtype.is_floating_point


def _write(held: torch.Tensor, rows: RowBatch) -> None:
    if held.device.type != "cpu":
        held.index_copy_(0, _on(held, rows.ids), _on(held, rows.values))
        return
    # Without a copy of them, which would be made while nobody can read.
    held.numpy()[rows.ids] = rows.values
    if not held.is_inference():
        increment_version(held)


def _on(held: torch.Tensor, values: Ids | Values) -> torch.Tensor:
    # A copy, since torch has no read-only tensors.
    return torch.from_numpy(values.copy()).to(held.device)
