"""Finds the sharded embedding modules of a model, the modules outside them, and their FQNs."""

from collections.abc import Collection, Iterator

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.types import ShardedModule
from torchrec.modules.mc_modules import ManagedCollisionModule

from deltasync.base.errors import InvalidInput
from deltasync.client.targets.torch_tensors import unwrapped

# Feature-processed and managed-collision modules contain one of these for their lookups.
_TRACKED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
# A sharded module that maps ids to rows, but has no rows itself.
_WITHOUT_TABLES = (ShardedManagedCollisionCollection,)
# The buffers of these are published as maps, or only matter for evictions.
_COLLISIONS = (ShardedManagedCollisionCollection, ManagedCollisionModule)


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """FQN and module of every module of a model, named as in its `state_dict`.

    Names do not include the wrappers of DMP, DDP, FSDP, activation checkpointing and torch.compile. A module in
    several places appears under several names.
    """
    model = unwrapped(model)
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{name}" if prefix else name)


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, ShardedEmbeddingModule]]:
    """FQN and module of every sharded embedding module of a model, each once."""
    seen = set[int]()
    for name, module in named_modules(model):
        if isinstance(module, _TRACKED) and id(module) not in seen:
            seen.add(id(module))
            yield name, module
        elif (
            isinstance(module, ShardedModule)
            and not isinstance(module, _WITHOUT_TABLES)
            and not any(isinstance(inner, _TRACKED) for _, inner in named_modules(module))
        ):
            raise InvalidInput(f"module {name!r} is a {type(module).__name__}, whose rows cannot be tracked")


def outside_of_tables(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """FQN and tensor of every parameter outside embedding tables, each once."""
    seen = set[int]()
    for name, module in modules_outside_of_tables(model):
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{own}" if name else own, parameter


def modules_outside_of_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """FQN and module of every module outside sharded embedding modules and managed collision, each once."""
    seen = set[int]()
    for name, module in names_outside_of_tables(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module


def names_outside_of_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Like `modules_outside_of_tables`, but with each module under all of its names."""
    inside = [name for name, module in named_modules(model) if isinstance(module, (*_TRACKED, *_COLLISIONS))]
    prefixes = tuple(f"{name}." if name else "" for name in inside)
    for name, module in named_modules(model):
        if not f"{name}.".startswith(prefixes):
            yield name, module


def table_fqn(name: str, module: ShardedEmbeddingModule, table: str) -> str:
    """The FQN of a table of a sharded module: its key in the `state_dict`, without `.weight`."""
    kind = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
    return ".".join(part for part in (name, kind, table) if part)


def is_skipped(fqn: str, fqns_to_skip: Collection[str]) -> bool:
    """Whether one of `fqns_to_skip` is the FQN, its last part, one of its parents or any consecutive parts."""
    return any(f".{skip}." in f".{fqn}." for skip in fqns_to_skip)


def wrongly_divided(model: nn.Module) -> Iterator[str]:
    """A warning for each collection whose features TorchRec divides by their lengths once too often."""
    for name, module in sharded_modules(model):
        if isinstance(module, ShardedEmbeddingBagCollection) and module._has_mean_pooling_callback:
            by_row = {feature for each in module._pooling_type_to_rs_features.values() for feature in each}
            configs = module._table_name_to_config.values()
            others = [feature for config in configs for feature in config.feature_names if feature not in by_row]
            if others:
                yield (
                    f"module {name!r}: TorchRec divides features {', '.join(others)} by their lengths once too "
                    "often, because other tables of the collection are sharded by rows and use mean pooling. "
                    "Unless these features have one id each, predictors compute other outputs from the same rows: "
                    "put the tables that are sharded by rows into a separate collection"
                )
