"""What a click model holds beside its tables: buffers, and which raw id has which row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.mc_modules import MCHManagedCollisionModule

_MAP, _BUFFER = "map", "buffer"  # of keys in files
_FREE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class IdMap:
    """The raw ids of a table's rows, or of one rank's share of them.

    Attributes:
        first_row: global number of the first of these rows.
        ids: int64 [rows], raw id + 1 by row; 0 where the row is free.
    """

    first_row: int
    ids: NDArray[np.int64]

    @property
    def used(self) -> int:
        """Rows that a raw id has."""
        return int(np.count_nonzero(self.ids))


def id_maps(model: nn.Module) -> dict[str, IdMap]:
    """The map of each managed table of a model, by the table's short name: whole, or this rank's share."""
    return {
        name.rpartition(".")[2]: _id_map(module)
        for name, module in model.named_modules()
        if isinstance(module, MCHManagedCollisionModule)
    }


def _id_map(module: MCHManagedCollisionModule) -> IdMap:
    sorted_ids, rows = module._mch_sorted_raw_ids.cpu(), module._mch_remapped_ids_mapping.cpu()
    first = int(rows.min())
    ids = torch.zeros(len(rows), dtype=torch.int64)
    ids[rows - first] = torch.where(sorted_ids == _FREE, 0, sorted_ids + 1)
    return IdMap(first, ids.numpy())


def buffers(model: nn.Module) -> dict[str, NDArray[np.generic]]:
    """A copy of each buffer that belongs to no table, by its FQN."""
    model = get_unwrapped_module(model)
    return {
        f"{part}.{name}": buffer.cpu().numpy().copy()
        for part in ("bottom", "top")
        for name, buffer in model.get_submodule(part).named_buffers()
    }


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a process holds of a model beside its tables.

    Attributes:
        maps: by the table's short name: whole, or this rank's share.
        buffers: those that belong to no table, by FQN.
    """

    maps: dict[str, IdMap]
    buffers: dict[str, NDArray[np.generic]]

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """A copy of what a model holds."""
        return cls(id_maps(model), buffers(model))

    @classmethod
    def load(cls, file: Path) -> "ModelState":
        """Read what `save` wrote."""
        with np.load(file) as arrays:
            keys = [(key.split(":"), array) for key, array in arrays.items()]
        maps = {key[1]: IdMap(int(key[2]), array) for key, array in keys if key[0] == _MAP}
        return cls(maps, {key[1]: array for key, array in keys if key[0] == _BUFFER})

    def save(self, file: Path) -> None:
        """Write it to an .npz file."""
        maps = {f"{_MAP}:{name}:{its.first_row}": its.ids for name, its in self.maps.items()}
        np.savez(
            file, allow_pickle=False, **maps, **{f"{_BUFFER}:{name}": its for name, its in self.buffers.items()}
        )


class EvictionCount:
    """How many rows of a model's managed tables have changed hands: from one raw id to another.

    Attributes:
        evictions: so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = id_maps(model)
        self.evictions = 0

    def note_step(self) -> None:
        """Count the rows that have changed hands since the last call."""
        now = id_maps(self._model)
        for name, after in now.items():
            before = self._before[name].ids
            self.evictions += int(((before != after.ids) & (before != 0) & (after.ids != 0)).sum())
        self._before = now
