"""The managed collision modules of a module.

Nothing of TorchRec is imported: they are known by what they hold.
"""

from typing import Any

import torch
from torch import nn

from deltasync.client.modules.wrappers import plain_name
from deltasync.core.errors import Contradiction, NotFound
from deltasync.core.tables import TableSpec
from deltasync.core.words import counted

# The modules of a collection; those of the shards, in one that is sharded for inference.
MODULES, SHARDED = "_managed_collision_modules", "_managed_collision_modules_per_rank"
# What holds raw ids: of an `MCHManagedCollisionModule`, and the row of each; of a `HashZchManagedCollisionModule`.
SORTED, ROWS, IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"


def collision_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The managed collision modules in a module, by their FQNs, without those of shards for inference."""
    shards = {
        each
        for collection in module.modules()
        for rank in getattr(collection, SHARDED, ())
        for each in rank.values()
    }
    return {name: each for name, each in module.named_modules() if _is_map(each) and each not in shards}


def collision_prefixes(module: nn.Module) -> tuple[str, ...]:
    """How the names of parameters and buffers begin that a module's managed collision has."""
    names = [name for name, each in module.named_modules() if _is_map(each) or hasattr(each, SHARDED)]
    return tuple(f"{name}.".removeprefix(".") for name in names)


def hashes(module: nn.Module) -> bool:
    """Whether a managed collision module finds rows by hashing, and not in a sorted list of raw ids."""
    return hasattr(module, IDENTITIES)


def collision_module_of(module: nn.Module, table: TableSpec) -> tuple[str, nn.Module]:
    """The managed collision module that a map or ranges belong to, after its FQN.

    Raises:
        NotFound: no managed collision module has its name.
        Contradiction: the module has another size, is only a shard, is scripted, or is in training mode.
    """
    wanted = table.name.rpartition(".")[0]
    modules = collision_modules(module)
    plain = {name: plain_name(module, name) for name in modules}
    names = [name for name in modules if plain[name] == wanted]
    names = names or [name for name in modules if wanted.endswith(f".{plain[name]}")]
    if len(names) != 1:
        known = ", ".join(names or modules) or "none"
        raise NotFound(
            f"table {table.name!r}: no managed collision module of that name, or several; modules: {known}"
        )
    _check(names[0], modules[names[0]], table)
    _check_collection(module, names[0], table)
    return names[0], modules[names[0]]


def _is_map(module: nn.Module) -> bool:
    return hasattr(module, IDENTITIES) or (hasattr(module, SORTED) and hasattr(module, ROWS))


def _check_collection(module: nn.Module, name: str, table: TableSpec) -> None:
    path, _, _ = name.rpartition(f".{MODULES}.")
    collection: Any = module.get_submodule(path)
    if not hasattr(collection, SHARDED):
        return
    if not collection.need_preprocess:
        raise Contradiction(
            f"table {table.name!r}: the collection of module {name} is sharded for inference and does not prepare "
            "raw ids, which is where they are looked up: make it with need_preprocess=True, or serve it unsharded"
        )
    if getattr(module.get_submodule(name), "_disable_fallback", False):
        raise Contradiction(
            f"table {table.name!r}: module {name} drops unknown ids (disable_fallback), and its collection is "
            "sharded for inference: serve it unsharded"
        )


def _check(name: str, module: Any, table: TableSpec) -> None:
    if isinstance(module, torch.jit.ScriptModule) or not callable(
        getattr(module, "rebuild_with_output_id_range", None)
    ):
        raise Contradiction(
            f"table {table.name!r}: module {name} is scripted or traced; give the target the one before"
        )
    hashed = hashes(module)
    rows = len(module._hash_zch_identities if hashed else module._mch_sorted_raw_ids)
    first = (module._output_global_offset_tensor is not None) if hashed else module._output_global_offset
    if rows != table.rows or first:
        part = ", one shard of several" if first else ""
        raise Contradiction(
            f"table {table.name!r} has {counted(table.rows, 'row')}, module {name} maps to {rows}{part}"
        )
    if module.training:
        raise Contradiction(
            f"table {table.name!r}: module {name} is in training mode, in which it would admit and evict ids by "
            "itself: call eval() of the module before the subscriber is started"
        )
