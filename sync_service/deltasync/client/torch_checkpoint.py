"""Read the tables of a checkpoint written by torch."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.client.stored_copy import Rows, StoredCopy
from deltasync.core.position import NOWHERE, Position
from deltasync.core.rows import BLOCK_ROWS
from deltasync.core.tables import TableKind, TableSpec, matrix_shape

_STORED = (TableKind.EMBEDDING, TableKind.PARAMETER, TableKind.BUFFER)

Tensors: TypeAlias = Mapping[str, Callable[[], torch.Tensor]]


def checkpoint_copy(path: Path) -> StoredCopy:
    """The tables of a checkpoint, for `compare`. The copy reads one table at a time.

    The version comes from the state of `DeltaSync`, in `sync-*.pt` beside the weights. Only use checkpoints that
    you trust, because the metadata of a folder is pickled.

    Args:
        path: a folder of `torch.distributed.checkpoint`; a folder with several of these in `step-*`, to use the
            newest; or a file of `torch.save` with weights by name.

    Raises:
        InvalidInput: the path is none of these, or cannot be read.
    """
    folder = path
    if path.is_dir() and not (path / ".metadata").exists():
        folder = max(path.glob("step-*"), default=path)
    try:
        tensors = _tensors(folder)
        states = sorted((folder if folder.is_dir() else folder.parent).glob("sync-*.pt"))
        position = _position([torch.load(each, weights_only=True, mmap=True) for each in states])
    except Exception as error:  # torch raises any exception for a file of another kind.
        raise InvalidInput(f"{folder} is not a checkpoint that torch can read: {_why(error)}") from error
    name = f"checkpoint {folder}"

    def rows(table: TableSpec) -> Rows | None:
        key = _key(table, tensors)
        return _rows(name, table, _read(name, key, tensors)) if key else None

    return StoredCopy(name, position, rows)


def _tensors(path: Path) -> Tensors:
    if not path.is_dir():
        return dict(_flat(torch.load(path, map_location="cpu", weights_only=True, mmap=True), ""))
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    stored = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {key: _loader(path, key, entry) for key, entry in stored.items()}


def _loader(path: Path, key: str, entry: TensorStorageMetadata) -> Callable[[], torch.Tensor]:
    def tensor() -> torch.Tensor:
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a missing process group.
            load({key: whole}, storage_reader=FileSystemReader(path), no_dist=True)
        return whole

    return tensor


def _read(name: str, key: str, tensors: Tensors) -> torch.Tensor:
    try:
        return tensors[key]()
    except (Exception, CheckpointException) as error:  # torch raises any exception for a missing or damaged file.
        raise InvalidInput(f"{name}: {key} cannot be read: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """The first line of an error of torch; for a failed load, of the first rank's error."""
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _ in error.failures.values()), error)
    return next(iter(str(error).splitlines()), type(error).__name__)


def _flat(state: Any, prefix: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    if isinstance(state, torch.Tensor):
        yield prefix, lambda: state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))


def _position(states: Sequence[Mapping[str, Any]]) -> Position:
    """The earliest position of all ranks: the changes after it include the changes after the others."""
    positions = [Position(state["history"], state["version"], state["seal"]) for state in states]
    return min(positions, key=lambda each: each.number, default=NOWHERE)


def _key(table: TableSpec, tensors: Tensors) -> str | None:
    """The key of a table's weights: the shortest one that is its name or ends with it."""
    names = (f"{table.name}.weight", table.name) if table.kind is TableKind.EMBEDDING else (table.name,)
    keys = (key for key in tensors for name in names if f".{key}".endswith(f".{name}"))
    return min(keys, key=len, default=None) if table.kind in _STORED else None


def _rows(name: str, table: TableSpec, tensor: torch.Tensor) -> Rows:
    rows, dim = matrix_shape(tensor.shape)
    if rows > table.rows:
        raise Contradiction(f"{name} has {rows} rows of table {table.name!r}, the service {table.rows}")
    try:
        values = tensor.detach().reshape(rows, dim).numpy()
    except (TypeError, RuntimeError) as error:  # A sparse tensor, or a type that NumPy lacks.
        sparse = "sparse " if tensor.layout is not torch.strided else ""
        form = f"{sparse}rows of {dim} {str(tensor.dtype).removeprefix('torch.')} in table {table.name!r}"
        raise Contradiction(f"{name} has {form}, replicas have {table.dim} {table.dtype}") from error
    for start in range(0, rows, BLOCK_ROWS):
        some = values[start : start + BLOCK_ROWS]
        yield np.arange(start, start + len(some)), some
