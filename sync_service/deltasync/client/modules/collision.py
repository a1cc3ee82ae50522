"""The managed collision modules of a module.

Nothing of TorchRec is imported: they are known by what they hold.
"""

from typing import Any

import torch
from torch import nn

from deltasync.core.errors import Contradiction, NotFound
from deltasync.core.tables import TableSpec

# The modules of a collection; those of one that is sharded for inference.
_MODULES, _SHARDED = "_managed_collision_modules", "_managed_collision_modules_per_rank"
# What holds raw ids: of an `MCHManagedCollisionModule`, and the row of each; of a `HashZchManagedCollisionModule`.
SORTED, ROWS, IDENTITIES = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"


def collision_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The managed collision modules in a module, by their FQNs."""
    return {
        name: each
        for name, each in module.named_modules()
        if hasattr(each, IDENTITIES) or (hasattr(each, SORTED) and hasattr(each, ROWS))
    }


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
    names = [wanted] if wanted in modules else [name for name in modules if wanted.endswith(f".{name}")]
    if len(names) != 1:
        known = ", ".join(names or modules) or "none"
        raise NotFound(f"table {table.name!r}: no one managed collision module of that name; modules: {known}")
    _check(names[0], modules[names[0]], table)
    _check_collection(module, names[0], table)
    return names[0], modules[names[0]]


def _check_collection(module: nn.Module, name: str, table: TableSpec) -> None:
    collection, _, _ = name.rpartition(f".{_MODULES}.")
    if hasattr(module.get_submodule(collection), _SHARDED):
        raise Contradiction(
            f"table {table.name!r}: the collection of module {name} is sharded for inference, where each rank has "
            "a map of its own, and that module none that is looked up: serve managed collision unsharded"
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
        raise Contradiction(f"table {table.name!r} has {table.rows} rows, module {name} maps to {rows}{part}")
    if module.training:
        raise Contradiction(
            f"table {table.name!r}: module {name} is in training mode, in which it would admit and evict ids by "
            "itself: call eval() of the module before the subscriber is started"
        )
