"""Parameters and buffers outside sharded modules: unsharded embedding tables, and everything else."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parameter import is_lazy
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection

from deltasync.base.errors import InvalidInput
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
# Their parameters are views of the weights that FBGEMM trains.
_FUSED = (FusedEmbeddingBagCollection, FusedEmbeddingCollection)


@dataclass(frozen=True, eq=False)
class ModuleTensor:
    """A parameter or buffer of a module, whose tensor may be replaced by another of the same shape and type."""

    name: str  # Its FQN, which is its key in the model's `state_dict`; for an embedding table, without `.weight`.
    owner: nn.Module  # Its module.
    attribute: str  # Its name in the module.
    kind: TableKind  # Embedding table, parameter or buffer.
    shape: torch.Size  # Its shape at first.
    dtype: torch.dtype  # Its type at first.
    # Other modules and attributes with the same tensor, by FQN.
    aliases: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    states: Sequence[torch.Tensor] = ()  # The states of the fused optimizer, as in `TrackedShard`.

    @property
    def table(self) -> TableSpec:
        """The table that it is published as."""
        if self.dtype not in _DTYPES:
            types = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
            raise InvalidInput(f"{self.kind.value} {self.name!r} is of type {self.dtype}, expected one of {types}")
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
        """The current tensor, as a view [rows, dim]."""
        now = _tensor_at(self.owner, self.attribute)
        if now is None or (now.shape, now.dtype) != (self.shape, self.dtype):
            state = "is gone" if now is None else f"is {list(now.shape)} of {now.dtype} now"
            raise InvalidInput(
                f"{self.kind.value} {self.name!r} {state}, and was {list(self.shape)} of {self.dtype} when it was "
                "first read: restart publishing with the changed model"
            )
        if now.layout is not torch.strided or not now.is_contiguous():
            raise InvalidInput(
                f"{self.kind.value} {self.name!r} does not lie in memory row by row: make it contiguous first"
            )
        for alias, (owner, attribute) in self.aliases.items():
            if _tensor_at(owner, attribute) is not now:
                raise InvalidInput(f"{alias!r} was the same tensor as {self.name!r}, and is another one now")
        return now.detach().view(matrix_shape(self.shape))


def module_tensors(
    model: nn.Module, *, dense: bool = True, fqns_to_skip: Collection[str] = ()
) -> list[ModuleTensor]:
    """All parameters and buffers outside sharded modules with elements that `state_dict` has, each once."""
    embeddings = {id(module): weight for _, module, weight in _embedding_modules(model)}
    tables = {id(weight) for weight in embeddings.values() if _is_table(weight)}
    states: dict[int, Sequence[torch.Tensor]] = {}
    for name, collection in fused_collections(model):
        _check_cache(name, collection, fqns_to_skip)
        states |= _fused_states(collection)
    places: dict[int, list[ModuleTensor]] = {}
    for name, module in names_outside_of_tables(model):
        for attribute, tensor, own_kind in _own(module):
            fqn = f"{name}.{attribute}" if name else attribute
            kind = TableKind.EMBEDDING if id(tensor) in tables else own_kind
            if not dense and kind is not TableKind.EMBEDDING:
                continue
            if is_lazy(tensor):
                raise InvalidInput(f"{own_kind.value} {fqn!r} has no shape yet: run the model once before this")
            if kind is TableKind.EMBEDDING and id(module) in embeddings:
                fqn = name or fqn
            if tensor.numel():
                place = ModuleTensor(fqn, module, attribute, kind, tensor.shape, tensor.dtype)
                places.setdefault(id(tensor), []).append(replace(place, states=states.get(id(tensor), ())))
    tensors = []
    for every in places.values():
        # The order of names in the model may change between runs. Names of embedding modules come before others.
        first = min(every, key=lambda each: (id(each.owner) not in embeddings, each.name))
        others = {each.name: (each.owner, each.attribute) for each in every if each is not first}
        tensors.append(replace(first, aliases=others))
    return tensors


def unranked_embeddings(model: nn.Module, *, dense: bool = True, fqns_to_skip: Collection[str] = ()) -> list[str]:
    """A warning for each unsharded embedding module whose rows no policy can rank or quantise."""
    sentences, instead = [], "which no policy ranks or quantises" if dense else "which dense=False leaves out"
    for name, _, weight in _embedding_modules(model):
        if not (_is_table(weight) or is_skipped(name, fqns_to_skip)):
            sentences.append(
                f"embedding {name!r} has {weight.shape[-1]} values of {weight.dtype} in a row: it is a parameter, "
                f"{instead}; use up to {MAX_DIM} of float32 or float16"
            )
    for name, module in modules_outside_of_tables(model):
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen) and not is_skipped(name, fqns_to_skip):
            sentences.append(
                f"module {name!r} holds its tables in one parameter, {instead}: make them an "
                "EmbeddingBagCollection or EmbeddingCollection"
            )
    return sentences


def fused_collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FQN and module of each unsharded collection of TorchRec with a fused optimizer, which acts in backward."""
    yield from ((name, module) for name, module in modules_outside_of_tables(model) if isinstance(module, _FUSED))


def _fused_states(collection: Any) -> dict[int, Sequence[torch.Tensor]]:
    """The fused optimizer's states of each table, by the `id` of its weight, which is a view of the kernel's."""
    by_address = {
        weight.data_ptr(): [state.detach() for state in states]
        for lookups in collection._emb_modules
        for weight, states in zip(
            lookups._emb_module.split_embedding_weights(),
            lookups._emb_module.split_optimizer_states() or repeat(()),
            strict=False,
        )
    }
    weights = [table.weight for _, table in _tables(collection)]
    return {id(weight): by_address.get(weight.data_ptr(), ()) for weight in weights}


def _check_cache(name: str, collection: Any, fqns_to_skip: Collection[str]) -> None:
    if all(is_skipped(f"{name}.{table}".removeprefix("."), fqns_to_skip) for table, _ in _tables(collection)):
        return
    specs = [spec for lookups in collection._emb_modules for spec in lookups._emb_module.embedding_specs]
    if any(location is EmbeddingLocation.MANAGED_CACHING for _, _, location, _ in specs):
        raise InvalidInput(
            f"module {name!r} is a {type(collection).__name__} with a cache (MANAGED_CACHING), whose newest rows "
            "cannot be read: use DEVICE or MANAGED, shard it, or leave its tables out (fqns_to_skip)"
        )


def _embedding_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """FQN, module and `weight` of each unsharded module whose `weight` is an embedding table."""
    of_fused = {id(table) for _, collection in fused_collections(model) for _, table in _tables(collection)}
    for name, module in names_outside_of_tables(model):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or id(module) in of_fused:
            weight = module._parameters.get("weight")
            if weight is not None:
                yield name, module, weight


def _tables(collection: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each table of a fused collection; the module has the table as `weight`."""
    kind = "embedding_bags" if isinstance(collection, FusedEmbeddingBagCollection) else "embeddings"
    yield from ((f"{kind}.{name}", table) for name, table in getattr(collection, kind).items())


def _is_table(weight: torch.Tensor) -> bool:
    return _DTYPES.get(weight.dtype) in VALUE_TYPES and weight.shape[-1] <= MAX_DIM


def buffer_digests(model: nn.Module, fqns_to_skip: Collection[str] = ()) -> dict[str, int]:
    """A signed 64-bit digest of each published buffer by FQN, to compare buffers between ranks."""
    digests = {}
    for tensor in module_tensors(model, fqns_to_skip=fqns_to_skip):
        buffer = _tensor_at(tensor.owner, tensor.attribute)
        left_out = tensor.kind is not TableKind.BUFFER or is_skipped(tensor.name, fqns_to_skip)
        if buffer is not None and not left_out:
            # Accept any type here; a read refuses unsupported types.
            content = buffer.detach().cpu().reshape(-1).view(torch.uint8)
            digest = hashlib.blake2b(content.numpy().tobytes(), digest_size=8).digest()
            digests[tensor.name] = int.from_bytes(digest, signed=True)
    return digests


def modules_with_buffers(model: nn.Module) -> list[nn.Module]:
    """The modules outside embedding tables that have persistent buffers.

    In place of a scripted module, which supports no hooks, this returns the module around it.
    """
    modules = dict(modules_outside_of_tables(model))
    having = [
        name for name, module in modules.items() if any(kind is TableKind.BUFFER for _, _, kind in _own(module))
    ]
    unique = {}
    for name in having:
        while name and isinstance(modules[name], torch.jit.ScriptModule):
            name = name.rpartition(".")[0]
        if not isinstance(modules[name], torch.jit.ScriptModule):
            unique[id(modules[name])] = modules[name]
    return list(unique.values())


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, TableKind]]:
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield attribute, parameter, TableKind.PARAMETER
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer, TableKind.BUFFER


def _tensor_at(module: nn.Module, attribute: str) -> torch.Tensor | None:
    places = (module._parameters, module._buffers)  # These are not dictionaries in a scripted module.
    return next((place[attribute] for place in places if attribute in place), None)


_ADVICE = "or publish embedding tables only (dense=False)"


class UnpublishedState:
    """Detects changes outside embedding tables that cannot be published.

    These are new parameters and buffers, and changes of buffers that are not in the `state_dict`. For the reading
    thread, within the gate.
    """

    def __init__(self, model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
        """Copy the current state, except in skipped modules."""
        modules = modules_outside_of_tables(model)
        self._modules = [(name, module) for name, module in modules if not is_skipped(name, fqns_to_skip)]
        self._names = [_names(module) for _, module in self._modules]
        self._copies = {
            (name, attribute): (module, (buffer, _version(buffer), _bits(buffer, copy=True)))
            for name, module in self._modules
            for attribute, buffer in module._buffers.items()
            if buffer is not None and attribute in module._non_persistent_buffers_set
        }

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(bits.nbytes for _, (*_, bits) in self._copies.values() if bits is not None)

    def check(self) -> None:
        """Check that nothing has changed."""
        for (name, module), names in zip(self._modules, self._names, strict=True):
            if more := _names(module) - names:
                new = ", ".join(map(repr, sorted(more)))
                raise InvalidInput(
                    f"module {name!r} now has {new}, which is not published: restart publishing with the changed "
                    "model"
                )
        for (name, attribute), (module, before) in self._copies.items():
            if not _is_unchanged(module._buffers.get(attribute), before):
                raise InvalidInput(
                    f"buffer {f'{name}.{attribute}'.removeprefix('.')!r} has changed but is not in the state_dict "
                    f"(persistent=False), so predictors would not get it: make it persistent, {_ADVICE}"
                )


def check_extra_state(model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
    """Check that no module outside embedding tables has extra state, except skipped modules."""
    for name, module in modules_outside_of_tables(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state and not is_skipped(name, fqns_to_skip):
            raise InvalidInput(
                f"module {name!r}, a {type(module).__name__}, has extra state (get_extra_state), which cannot be "
                f"published: keep it in buffers, {_ADVICE}"
            )


def _names(module: nn.Module) -> set[str]:
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name for name, tensor in tensors if tensor is not None}


# A buffer, PyTorch's count of its changes, and a copy of its bits; None if it is not strided, for example sparse.
_Copy = tuple[torch.Tensor, int, torch.Tensor | None]


def _is_unchanged(buffer: torch.Tensor | None, before: _Copy) -> bool:
    tensor, version, bits = before
    if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
        return False
    now = _bits(buffer)
    if now is None or bits is None:
        return buffer is tensor and _version(buffer) == version
    return torch.equal(now, bits)


def _bits(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    bits = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return bits.clone() if copy else bits


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
