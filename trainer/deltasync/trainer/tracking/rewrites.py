"""Hooks for changes of rows without a lookup: loads, initialisation, averages over replicas or over time.

For the training thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking.modules import sharded_modules, table_fqn
from deltasync.trainer.tracking.shards import lookups_of
from deltasync.trainer.tracking.torchrec_hooks import Hooks
from deltasync.trainer.tracking.update_rules import WholeTableUpdate, rule_of

# Methods that initialise rows, in FBGEMM's modules, TorchRec's kernels and sharded modules.
_FIRST_VALUES = ("init_embedding_weights_uniform", "init_parameters", "reset_parameters")


@dataclass(frozen=True)
class RewriteListener:
    """Functions to call around a rewrite, with the FQNs of the tables whose rows it may change.

    Attributes:
        begins: called before the rewrite.
        ends: called after it.
    """

    begins: Callable[[list[str]], None]
    ends: Callable[[list[str]], None]


def listen_to_rewrites(hooks: Hooks, model: nn.Module, listener: RewriteListener) -> None:
    """Call the listener around each rewrite of tables of sharded modules."""
    everything = []
    for name, module in sharded_modules(model):
        tables = [table_fqn(name, module, table) for table in module._table_name_to_config]
        everything += tables
        _listen_to_loads(hooks, module, listener, tables)
        _listen_to_calls(hooks, f"first values of module {name!r}", module, listener, tables)
        for lookup in lookups_of(module):
            for kernel in lookup._emb_modules:
                _listen_to_kernel(hooks, name, module, kernel, listener)
    _listen_to_averages(hooks, model, listener, everything)


def _listen_to_kernel(
    hooks: Hooks, name: str, module: ShardedEmbeddingModule, kernel: Any, listener: RewriteListener
) -> None:
    tables = [table_fqn(name, module, config.name) for config in kernel._config.embedding_tables]
    for owner in (kernel, kernel.emb_module):
        _listen_to_calls(hooks, f"first values of a kernel of module {name!r}", owner, listener, tables)
        _listen_to_loads(hooks, owner, listener, tables)
    update = rule_of(kernel).whole_table
    if update:
        begin = partial(_begin_if_due, update, kernel.emb_module, listener.begins, tables)
        hooks.listen(f"{update.method} of module {name!r}", kernel.emb_module, update.method, begin, first=True)


def _begin_if_due(
    update: WholeTableUpdate, emb_module: Any, begins: Callable[[list[str]], None], tables: list[str], *_: Any
) -> None:
    # There is no `ends`, because the backward of the same step changes the rows further.
    if update.is_due(getattr(emb_module, update.settings), int(emb_module.iter_cpu)):
        begins(tables)


def _listen_to_calls(hooks: Hooks, what: str, owner: Any, listener: RewriteListener, tables: list[str]) -> None:
    for method in _FIRST_VALUES:
        if hasattr(owner, method):
            _listen_around(hooks, what, owner, method, listener, tables)


def _listen_around(
    hooks: Hooks, what: str, owner: Any, method: str, listener: RewriteListener, tables: list[str]
) -> None:
    hooks.listen(what, owner, method, lambda *_, **__: listener.begins(tables), first=True)
    hooks.listen(what, owner, method, lambda *_, **__: listener.ends(tables))


def _listen_to_loads(hooks: Hooks, module: nn.Module, listener: RewriteListener, tables: list[str]) -> None:
    handles: list[Any] = [
        module.register_load_state_dict_pre_hook(lambda *_: listener.begins(tables)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(lambda *_: listener.ends(tables)),  # type: ignore[no-untyped-call]
    ]
    for handle in handles:
        hooks.undo_with(handle.remove)


def _listen_to_averages(hooks: Hooks, model: nn.Module, listener: RewriteListener, tables: list[str]) -> None:
    """`DMPCollection.sync` averages all rows over the replicas of the model's shards."""
    for module in model.modules():
        if isinstance(module, DMPCollection):
            _listen_around(hooks, "averages of a DMPCollection", module, "sync", listener, tables)


def check_averages(model: nn.Module) -> None:
    """Refuse a `DMPCollection` whose ranks have no complete rows between steps."""
    for module in model.modules():
        if isinstance(module, DMPCollection) and any(map(_is_fully_sharded, module._ctxs)):
            raise InvalidInput(
                "a DMPCollection with sharding_strategy FULLY_SHARDED has no complete rows between steps, which "
                "the tracker needs: use DEFAULT or PER_MODULE"
            )


def is_replica(module: ShardedEmbeddingModule) -> bool:
    """Whether this rank only has copies, in a `DMPCollection`, of shards that an earlier rank tracks."""
    environment = getattr(module, "_env", None)
    return isinstance(environment, ShardingEnv2D) and dist.get_rank(environment.replica_pg) > 0


def _is_fully_sharded(context: Any) -> bool:
    return context.sharding_strategy is ShardingStrategy.FULLY_SHARDED
