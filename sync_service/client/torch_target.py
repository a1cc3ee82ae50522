"""Rows into the parameters of a torch module."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from sync_service.client.targets import Delta
from sync_service.errors import Contradiction, NotFound
from sync_service.stamps import Values
from sync_service.tables import Table


class TorchTarget:
    """Writes rows into a module's parameters: an `EmbeddingBagCollection`, or a whole model that holds some.

    A table belongs to the parameter whose name, without ".weight", is the table's name or the end of it:
    table "sparse.embedding_bags.user" to "embedding_bags.user.weight" of a lone collection.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
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

    def apply(self, delta: Delta) -> None:
        """Write the rows of a release into the parameters.

        Raises:
            NotFound: a table has no parameter, or more than one.
            Contradiction: a parameter has another shape or type than its table.
        """
        for table in delta.tables:
            if table.name not in self._tables:
                self._tables[table.name] = _rows_of(self._module, table)
        with self._lock, torch.no_grad():
            if delta.resync:
                for table in delta.tables:
                    self._tables[table.name].zero_()
            for rows in delta.deltas:
                weight = self._tables[rows.table.name]
                ids = torch.from_numpy(rows.ids.copy()).to(weight.device)
                weight.index_copy_(0, ids, _tensor(rows.values).to(weight.device))


def _tensor(values: Values) -> torch.Tensor:
    # A copy, since torch has no read-only tensors.
    return torch.from_numpy(values.copy())


def _rows_of(module: nn.Module, table: Table) -> torch.Tensor:
    parameters = dict(module.named_parameters())
    names = [name for name in parameters if _fits(name.removesuffix(".weight"), table.name)]
    exact = [name for name in names if name.removesuffix(".weight") == table.name]
    if len(exact or names) != 1:
        raise NotFound(
            f"table {table.name!r}: {len(names)} parameters fit, expected one of: {', '.join(parameters)}"
        )
    parameter = parameters[(exact or names)[0]]
    kind = torch.from_numpy(np.empty(0, table.dtype)).dtype
    if parameter.numel() != table.rows * table.dim or parameter.dtype != kind:
        raise Contradiction(
            f"table {table.name!r} is {table.rows} x {table.dim} {kind}, the module's parameter is "
            f"{tuple(parameter.shape)} {parameter.dtype}"
        )
    return parameter.detach().view(table.rows, table.dim)


def _fits(parameter: str, table: str) -> bool:
    return table == parameter or table.endswith("." + parameter) or table == parameter + ".weight"
