"""Rows into the parameters of a torch module."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from deltasync.client.targets import Release
from deltasync.core.errors import Contradiction, NotFound
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

__all__ = ["TorchTarget"]

logger = logging.getLogger(__name__)


class TorchTarget:
    """Writes rows into a module's parameters: an `EmbeddingBagCollection`, or a whole model that holds some.

    A table belongs to the parameter whose name, without ".weight", is the table's name or the end of it:
    table "sparse.embedding_bags.user" to "embedding_bags.user.weight" of a lone collection. Tables the module
    has no parameter for are left out, which is logged.

    Attributes:
        position: the one that the module's rows are at, and
        event_time_unix_ns: the time of the newest event that the model had been trained on there, nanoseconds
            since 1970; None where it is not known. Read both inside `reading()`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.position = Position()
        self.event_time_unix_ns: int | None = None
        self._module = module
        self._known: list[TableSpec] = []
        self._tables: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The module, with no release applied while the block runs."""
        with self._lock:
            yield self._module

    def tables(self) -> dict[str, torch.Tensor]:
        """The rows of every table received so far, as live [rows, dim] views of the parameters."""
        return dict(self._tables)

    def apply(self, release: Release) -> None:
        """Write the rows of a release into the parameters.

        Raises:
            NotFound: none of the tables has a parameter, or one has several.
            Contradiction: a parameter has another shape or type than its table, or several tables; or the
                consumer streams ids only.
        """
        release.check_values()
        if release.tables != self._known:
            self._tables, self._known = _bind(self._module, release.tables), release.tables
        with self._lock, torch.no_grad():
            for table in release.tables:
                if release.resets(table) and table.name in self._tables:
                    self._tables[table.name].zero_()
            for rows in release.rows:
                if rows.table.name in self._tables:
                    weight = self._tables[rows.table.name]
                    ids = torch.from_numpy(rows.ids.copy()).to(weight.device)
                    weight.index_copy_(0, ids, _tensor(rows.values).to(weight.device))
            self.position, self.event_time_unix_ns = release.position, release.event_time_unix_ns

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table, in host memory."""
        weight = self._tables.get(table.name) if self._known else self._weight(table)
        if weight is None:
            return None
        return weight.index_select(0, torch.from_numpy(ids.copy()).to(weight.device)).cpu().numpy()

    def _weight(self, table: TableSpec) -> torch.Tensor | None:
        """The rows of a table before any release: a module may have outlived another process."""
        parameters = dict(self._module.named_parameters())
        name = _name_of(parameters, table)
        return _rows_of(parameters[name], table) if name else None


def _tensor(values: Values) -> torch.Tensor:
    # A copy, since torch has no read-only tensors.
    return torch.from_numpy(values.copy())


def _bind(module: nn.Module, tables: list[TableSpec]) -> dict[str, torch.Tensor]:
    parameters = dict(module.named_parameters())
    names = {table.name: name for table in tables if (name := _name_of(parameters, table))}
    if not names:
        expected = ", ".join(table.name for table in tables)
        raise NotFound(f"no parameter of the module ({', '.join(parameters)}) fits a table ({expected})")
    if len(set(names.values())) < len(names):
        raise Contradiction(f"several tables fit one parameter: {names}; give the target the whole model")
    if missing := [table.name for table in tables if table.name not in names]:
        logger.warning("tables the module has no parameter for are left out: %s", ", ".join(missing))
    return {table.name: _rows_of(parameters[names[table.name]], table) for table in tables if table.name in names}


def _name_of(parameters: dict[str, nn.Parameter], table: TableSpec) -> str | None:
    names = [name for name in parameters if _fits(name.removesuffix(".weight"), table.name)]
    exact = [name for name in names if name.removesuffix(".weight") == table.name]
    if len(exact or names) > 1:
        raise NotFound(f"table {table.name!r}: {', '.join(names)} fit, expected one parameter")
    return next(iter(exact or names), None)


def _rows_of(parameter: nn.Parameter, table: TableSpec) -> torch.Tensor:
    kind = torch.from_numpy(np.empty(0, table.dtype)).dtype
    if parameter.numel() != table.rows * table.dim or parameter.dtype != kind:
        raise Contradiction(
            f"table {table.name!r} is {table.rows} x {table.dim} {kind}, the module's parameter is "
            f"{tuple(parameter.shape)} {parameter.dtype}"
        )
    return parameter.detach().view(table.rows, table.dim)


def _fits(parameter: str, table: str) -> bool:
    return table == parameter or table.endswith("." + parameter) or table == parameter + ".weight"
