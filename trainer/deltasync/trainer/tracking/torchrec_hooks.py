"""Hooks of TorchRec and PyTorch: for lookups, output dists, evictions, forwards, gradients and rewrites of rows.

TorchRec only supports one function per hook, which it calls in the training thread. `Listeners` replaces that
function, and calls it together with others. `Hooks.check` detects that other code has replaced the listeners.

PyTorch supports any number of functions per hook. It calls them before a forward, and in backward, in autograd's
threads, when a gradient is complete.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.trainer.tracking.collision_modules import collision_modules
from deltasync.trainer.tracking.modules import named_modules, outside_of_tables, sharded_modules, table_fqn
from deltasync.trainer.tracking.shards import lookups_of
from deltasync.trainer.tracking.update_rules import WholeTableUpdate, rule_of

_Listener = Callable[..., None]
_Rewrite = Callable[[list[str]], None]

# Methods that initialise rows, in FBGEMM's modules, TorchRec's kernels and sharded modules.
_FIRST_VALUES = ("init_embedding_weights_uniform", "init_parameters", "reset_parameters")


class Listeners:
    """Calls several functions in place of one, with the same arguments."""

    def __init__(self, owner: Any, attribute: str) -> None:
        """Replace the function `owner.attribute`, and keep calling it."""
        before = getattr(owner, attribute)
        self.functions: list[_Listener] = [before] if before else []
        setattr(owner, attribute, self)

    @classmethod
    def at(cls, owner: Any, attribute: str) -> "Listeners":
        """The listeners at `owner.attribute`, placed there if there are none yet."""
        current = getattr(owner, attribute)
        return current if isinstance(current, cls) else cls(owner, attribute)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Call all functions in their order."""
        for function in self.functions:
            function(*arguments, **named)


class Hooks:
    """All hooks in a model, to check and remove them together."""

    def __init__(self) -> None:
        self._placed: dict[tuple[int, str], tuple[str, Any, str, Listeners]] = {}
        self._undo: list[Callable[[], object]] = []

    def listen(self, what: str, owner: Any, attribute: str, listener: _Listener, *, first: bool = False) -> None:
        """Call `listener` whenever `owner.attribute` is called, before all others if `first`.

        Messages name the hook `what`.
        """
        listeners = Listeners.at(owner, attribute)
        listeners.functions.insert(0 if first else len(listeners.functions), listener)
        self._placed[id(owner), attribute] = (what, owner, attribute, listeners)
        self._undo.append(lambda: listeners.functions.remove(listener))

    def undo_with(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the hooks are removed."""
        self._undo.append(undo)

    def check(self) -> None:
        """Check that all hooks are still in place."""
        for what, owner, attribute, listeners in self._placed.values():
            if getattr(owner, attribute) is not listeners:
                raise Contradiction(
                    f"{what}: another function has taken the place of the tracker's, which misses rows from then "
                    f"on; register that one first, the tracker calls it too"
                )

    def remove(self) -> None:
        """Remove all hooks."""
        for undo in self._undo:
            undo()
        self._placed.clear()
        self._undo.clear()


def listen_to_lookups(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener(features, output, kernel)` after each lookup of a kernel."""
    # `register_post_lookup_tracker_fn` passes the ids of all tables of a sharding type at once, without their
    # shards, and not with managed collision. The hook of individual lookups (`register_optim_state_tracker_fn`)
    # always passes these ids, together with their shards.
    for name, module in sharded_modules(model):
        for lookup in lookups_of(module):
            hooks.listen(f"lookups of module {name!r}", lookup, "optim_state_tracker_fn", listener)


def listen_to_output_dists(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener()` whenever looked-up rows are sent to other ranks (`register_post_odist_tracker_fn`)."""
    for name, module in sharded_modules(model):
        hooks.listen(f"output dist of module {name!r}", module, "post_odist_tracker_fn", listener)


def listen_to_evictions(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener(name of the embedding module, module, evicted)` before managed collision resets rows."""
    # TorchRec has no hook for evictions, so this replaces the module's method that resets the rows.
    for name, module in named_modules(model):
        if hasattr(module, "_evict") and hasattr(module, "_embedding_module"):
            inside = f"{name}._embedding_module".removeprefix(".")
            evict = partial(listener, inside, module._embedding_module)
            hooks.listen(f"evictions of module {name!r}", module, "_evict", evict, first=True)


class ForwardListener:
    """Calls a function before each forward in training mode. For the training thread.

    Copies, pickles and compiled versions of the module do not call the function.
    """

    def __init__(self, listener: Callable[[], None] | None = None) -> None:
        self._listener = listener

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        """Called by PyTorch before a forward."""
        if not torch.compiler.is_compiling() and module.training and self._listener:
            self._listener()

    def __reduce__(self) -> tuple[type["ForwardListener"], tuple[()]]:
        """Pickle and copy the hook without its function."""
        return ForwardListener, ()


def listen_to_forwards(hooks: Hooks, modules: Iterable[nn.Module], listener: Callable[[], None]) -> None:
    """Call `listener()` before each forward of the modules in training mode."""
    for module in modules:
        hooks.undo_with(module.register_forward_pre_hook(ForwardListener(listener)).remove)


def listen_to_maps(hooks: Hooks, model: nn.Module, listener: Callable[[], None]) -> None:
    """Call `listener()` before managed collision may assign rows to other raw ids."""
    for collision in collision_modules(model):
        if collision.hashes:  # This happens in each forward, and nowhere else.
            listen_to_forwards(hooks, [collision.module.input_mapper], listener)
        elif not collision.sharded:
            listen_to_forwards(hooks, [collision.module], listener)
        else:
            hooks.listen(f"module {collision.name!r}", collision.module, "_coalesce_history", listener, first=True)


def listen_to_gradients(hooks: Hooks, model: nn.Module, listener: Callable[[torch.Tensor], None]) -> None:
    """Call `listener(parameter)` in a thread of autograd when a parameter outside tables has its gradient."""
    for _, parameter in outside_of_tables(model):
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(listener)  # type: ignore[no-untyped-call]
            hooks.undo_with(handle.remove)


# -- changes of rows without a lookup: loads, initialisation, averages over replicas or over time


def listen_to_rewrites(hooks: Hooks, model: nn.Module, begins: _Rewrite, ends: _Rewrite) -> None:
    """Call `begins(tables)` and `ends(tables)` around each rewrite of rows, with the FQNs of its tables."""

    def listen_around(what: str, owner: Any, method: str, tables: list[str]) -> None:
        hooks.listen(what, owner, method, lambda *_, **__: begins(tables), first=True)
        hooks.listen(what, owner, method, lambda *_, **__: ends(tables))

    def listen_to_owner(what: str, owner: Any, tables: list[str]) -> None:
        for method in _FIRST_VALUES:
            if hasattr(owner, method):
                listen_around(f"first values of {what}", owner, method, tables)
        hooks.undo_with(owner.register_load_state_dict_pre_hook(lambda *_: begins(tables)).remove)
        hooks.undo_with(owner.register_load_state_dict_post_hook(lambda *_: ends(tables)).remove)

    everything = []
    for name, module in sharded_modules(model):
        tables = [table_fqn(name, module, table) for table in module._table_name_to_config]
        everything += tables
        listen_to_owner(f"module {name!r}", module, tables)
        for kernel in (kernel for lookup in lookups_of(module) for kernel in lookup._emb_modules):
            of_kernel = [table_fqn(name, module, config.name) for config in kernel._config.embedding_tables]
            for owner in (kernel, kernel.emb_module):
                listen_to_owner(f"a kernel of module {name!r}", owner, of_kernel)
            if update := rule_of(kernel).whole_table:
                begin = partial(_begin_if_due, update, kernel.emb_module, begins, of_kernel)
                what = f"{update.method} of module {name!r}"
                hooks.listen(what, kernel.emb_module, update.method, begin, first=True)
    for module in model.modules():
        if isinstance(module, DMPCollection):  # Its `sync` averages all rows over the replicas of the shards.
            listen_around("averages of a DMPCollection", module, "sync", everything)


def _begin_if_due(update: WholeTableUpdate, emb_module: Any, begins: _Rewrite, tables: list[str], *_: Any) -> None:
    # There is no `ends`, because the backward of the same step changes the rows further.
    if update.is_due(getattr(emb_module, update.settings), int(emb_module.iter_cpu)):
        begins(tables)


def check_averages(model: nn.Module) -> None:
    """Refuse a `DMPCollection` whose ranks have no complete rows between steps."""
    for module in model.modules():
        if isinstance(module, DMPCollection) and any(
            context.sharding_strategy is ShardingStrategy.FULLY_SHARDED for context in module._ctxs
        ):
            raise InvalidInput(
                "a DMPCollection with sharding_strategy FULLY_SHARDED has no complete rows between steps, which "
                "the tracker needs: use DEFAULT or PER_MODULE"
            )


def is_replica(module: ShardedEmbeddingModule) -> bool:
    """Whether this rank only has copies, in a `DMPCollection`, of shards that an earlier rank tracks."""
    environment = getattr(module, "_env", None)
    return isinstance(environment, ShardingEnv2D) and dist.get_rank(environment.replica_pg) > 0


class ReshardWatch:
    """Detects that `DistributedModelParallel.reshard` has replaced lookups. For the training thread."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module, list(module._lookups), list(lookups_of(module)))
            for name, module in sharded_modules(model)
        ]

    def resharded(self) -> list[str]:
        """FQNs of the modules whose lookups were replaced since this was constructed."""
        # Modules compare by identity. Usually the wrappers are the same, so the check at each step is fast.
        return [
            name
            for name, module, wrapped, lookups in self._modules
            if module._lookups != wrapped and list(lookups_of(module)) != lookups
        ]
