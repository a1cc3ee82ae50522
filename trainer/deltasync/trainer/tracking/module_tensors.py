"""Parameters and buffers that no sharded module holds: tables of unsharded embedding modules, and all else."""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parameter import is_lazy
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection

from deltasync.core.errors import InvalidInput
from deltasync.core.tables import MAX_DIM, VALUE_TYPES, TableKind, TableSpec, matrix_shape, sizes_of
from deltasync.trainer.tracking.modules import is_skipped, modules_outside_of_tables, names_outside_of_tables

_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype("<f4"),
    torch.float16: np.dtype("<f2"),
    torch.float64: np.dtype("<f8"),
    torch.int64: np.dtype("<i8"),
    torch.int32: np.dtype("<i4"),
    torch.int16: np.dtype("<i2"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}

# Their parameters are views of what FBGEMM trains.
_FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)


@dataclass(frozen=True, eq=False)
class ModuleTensor:
    """A parameter or a buffer, by its place: the tensor there may be replaced by another of its shape and type.

    Attributes:
        name: its FQN, which is its key in the model's `state_dict`; of an embedding table, without `.weight`.
        owner: the module it is of.
        attribute: what it is called there.
        kind: embedding table, parameter or buffer.
        shape: as it was when the place was found.
        dtype: likewise.
        aliases: other places of the same tensor, by FQN.
    """

    name: str
    owner: nn.Module
    attribute: str
    kind: TableKind
    shape: torch.Size
    dtype: torch.dtype
    aliases: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def table(self) -> TableSpec:
        """What it is published as.

        Raises:
            InvalidInput: its type is not supported.
        """
        if self.dtype not in _DTYPES:
            known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
            raise InvalidInput(f"{self.kind.value} {self.name!r} is of type {self.dtype}, expected one of {known}")
        rows, dim = matrix_shape(self.shape)
        return TableSpec(
            self.name,
            rows,
            dim,
            _DTYPES[self.dtype],
            self.kind,
            sizes=sizes_of(self.shape) if self.kind.complete else None,
            aliases=tuple(sorted(self.aliases)),
        )

    def matrix(self) -> torch.Tensor:
        """What is there now, [rows, dim] of its table: a view.

        Raises:
            InvalidInput: it has another shape or type than at first, does not lie in memory row by row, or is no
                longer the tensor that other places have, too.
        """
        now = _held(self.owner, self.attribute)
        if now is None or (now.shape, now.dtype) != (self.shape, self.dtype):
            found = "is gone" if now is None else f"is {list(now.shape)} of {now.dtype} now"
            raise InvalidInput(
                f"{self.kind.value} {self.name!r} {found}, and was {list(self.shape)} of {self.dtype} when it was "
                "first seen: restart publishing with the model as it is"
            )
        if now.layout is not torch.strided or not now.is_contiguous():
            raise InvalidInput(
                f"{self.kind.value} {self.name!r} does not lie in memory row by row: make it contiguous first"
            )
        for alias, (owner, attribute) in self.aliases.items():
            if _held(owner, attribute) is not now:
                raise InvalidInput(f"{alias!r} was the same tensor as {self.name!r}, and is another one now")
        return now.detach().view(matrix_shape(self.shape))


def module_tensors(model: nn.Module, *, dense: bool = True) -> list[ModuleTensor]:
    """Every parameter and buffer outside of sharded modules that `state_dict` has, each once.

    Those without elements are left out.

    Args:
        model: the model.
        dense: with those that are no embedding tables.

    Raises:
        InvalidInput: one has no shape yet, or the newest rows of a table lie in a cache.
    """
    embeddings = {id(module): module._parameters.get("weight") for _, module in _embedding_modules(model)}
    tables = {id(weight) for weight in embeddings.values() if weight is not None and _is_table(weight)}
    places: dict[int, dict[str, ModuleTensor]] = {}
    for name, module in names_outside_of_tables(model):
        if isinstance(module, _FUSED):
            _check_cache(name, module)
        for attribute, tensor, own_kind in _own(module):
            fqn = f"{name}.{attribute}" if name else attribute
            if is_lazy(tensor):
                raise InvalidInput(f"{own_kind.value} {fqn!r} has no shape yet: run the model once before this")
            kind = TableKind.EMBEDDING if id(tensor) in tables else own_kind
            if kind is TableKind.EMBEDDING and id(module) in embeddings:
                fqn = name or fqn
            if tensor.numel() and (dense or kind is TableKind.EMBEDDING):
                place = ModuleTensor(fqn, module, attribute, kind, tensor.shape, tensor.dtype)
                places.setdefault(id(tensor), {})[fqn] = place
    return [_of_all_places(of_one) for of_one in places.values()]


def unranked_embeddings(model: nn.Module, fqns_to_skip: Collection[str] = ()) -> list[str]:
    """A sentence for each embedding module outside of sharded ones whose rows no policy can rank or quantise."""
    sentences = []
    for name, module in _embedding_modules(model):
        weight = module._parameters.get("weight")
        if weight is not None and not (_is_table(weight) or is_skipped(name, fqns_to_skip)):
            sentences.append(
                f"embedding {name!r} has {weight.shape[-1]} values of {weight.dtype} in a row: it is published as "
                f"a parameter, which no policy ranks or quantises; use up to {MAX_DIM} of float32 or float16"
            )
    for name, module in modules_outside_of_tables(model):
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen) and not is_skipped(name, fqns_to_skip):
            sentences.append(
                f"module {name!r} holds its tables in one parameter, which is sent whole after each change, and "
                "which no policy ranks or quantises: make them an EmbeddingBagCollection or EmbeddingCollection"
            )
    return sentences


def fused_collections(model: nn.Module) -> list[Any]:
    """The unsharded collections of TorchRec whose rows change in backward, without a gradient of a parameter."""
    return [module for _, module in modules_outside_of_tables(model) if isinstance(module, _FUSED)]


def _check_cache(name: str, collection: Any) -> None:
    specs = [spec for lookups in collection._emb_modules for spec in lookups._emb_module.embedding_specs]
    if any(location is EmbeddingLocation.MANAGED_CACHING for _, _, location, _ in specs):
        raise InvalidInput(
            f"module {name!r} is a {type(collection).__name__} with a cache (MANAGED_CACHING), whose newest rows "
            "cannot be read: use DEVICE or MANAGED, or shard it"
        )


def _embedding_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside of sharded ones whose `weight` is an embedding table."""
    of_fused = {id(table) for module in model.modules() if isinstance(module, _FUSED) for table in _tables(module)}
    for name, module in names_outside_of_tables(model):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or id(module) in of_fused:
            yield name, module


def _tables(collection: nn.Module) -> Iterator[nn.Module]:
    bags = isinstance(collection, FusedEmbeddingBagCollection)
    yield from getattr(collection, "embedding_bags" if bags else "embeddings").values()


def _is_table(weight: torch.Tensor) -> bool:
    return _DTYPES.get(weight.dtype) in VALUE_TYPES and weight.shape[-1] <= MAX_DIM


def _of_all_places(places: dict[str, ModuleTensor]) -> ModuleTensor:
    """A tensor under the first of its names in the alphabet: their order in the model may change between runs."""
    first = min(places)
    others = {name: (each.owner, each.attribute) for name, each in places.items() if name != first}
    return replace(places[first], aliases=others)


def buffer_digests(model: nn.Module) -> dict[str, int]:
    """A number of 64 bits, with a sign, for what each buffer holds, by FQN: for comparisons between ranks."""
    digests = {}
    for tensor in module_tensors(model):
        held = _held(tensor.owner, tensor.attribute)
        if tensor.kind is TableKind.BUFFER and held is not None:
            content = held.detach().cpu().reshape(-1).view(torch.uint8)  # Of any type: a read refuses some.
            digest = hashlib.blake2b(content.numpy().tobytes(), digest_size=8).digest()
            digests[tensor.name] = int.from_bytes(digest, signed=True)
    return digests


def modules_with_buffers(model: nn.Module) -> list[nn.Module]:
    """The modules outside of embedding tables that have buffers which `state_dict` has.

    Those of a scripted module, which nothing can listen to, count as of the module around it.
    """
    modules = dict(modules_outside_of_tables(model))
    having = [
        name for name, module in modules.items() if any(kind is TableKind.BUFFER for _, _, kind in _own(module))
    ]
    found = {id(module): module for module in (_unscripted(name, modules) for name in having) if module}
    return list(found.values())


def _unscripted(name: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module of that name, or the innermost around it that is not scripted; None where all are."""
    while isinstance(modules[name], torch.jit.ScriptModule):
        if not name:
            return None
        name = name.rpartition(".")[0]
    return modules[name]


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, TableKind]]:
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter, TableKind.PARAMETER
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer, TableKind.BUFFER


def _held(module: nn.Module, attribute: str) -> torch.Tensor | None:
    places = (module._parameters, module._buffers)  # Of a scripted module, they are no dictionaries.
    return next((held[attribute] for held in places if attribute in held), None)
