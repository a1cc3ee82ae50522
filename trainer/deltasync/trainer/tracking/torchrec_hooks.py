"""Hooks for lookups, output dists and evictions of TorchRec, and for gradients and forwards of PyTorch.

TorchRec calls one function at each place, in the thread that trains. `Listeners` takes the place and calls several
functions, also the one that was there. `Hooks.check` finds that another function has taken the place since.

PyTorch calls any number of functions: on a gradient within backward, in autograd's threads, and before a forward.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from deltasync.base.errors import Contradiction
from deltasync.trainer.tracking.collision_modules import collision_modules
from deltasync.trainer.tracking.modules import named_modules, outside_of_tables, sharded_modules
from deltasync.trainer.tracking.shards import lookups_of

_Listener = Callable[..., None]


class Listeners:
    """Calls several functions at a place for one function, with its arguments."""

    def __init__(self, owner: Any, attribute: str) -> None:
        """Take the place `owner.attribute`."""
        self._owner, self._attribute = owner, attribute
        before = getattr(owner, attribute)
        self._listeners: list[_Listener] = [before] if before else []
        setattr(owner, attribute, self)

    @classmethod
    def at(cls, owner: Any, attribute: str) -> "Listeners":
        """The listeners of a place; they take it if they are not there yet."""
        current = getattr(owner, attribute)
        return current if isinstance(current, cls) else cls(owner, attribute)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """Call them all, in their order."""
        for listener in self._listeners:
            listener(*arguments, **named)

    def add(self, listener: _Listener, *, first: bool = False) -> None:
        """Call another function too: after the others, or before them."""
        self._listeners.insert(0 if first else len(self._listeners), listener)

    def remove(self, listener: _Listener) -> None:
        """Stop calling a function."""
        self._listeners.remove(listener)

    @property
    def in_place(self) -> bool:
        """Whether they are still called."""
        return getattr(self._owner, self._attribute) is self


class Hooks:
    """Functions at several places of a model, removed together."""

    def __init__(self) -> None:
        self._placed: dict[tuple[int, str], tuple[str, Any, str, Listeners]] = {}
        self._undo: list[Callable[[], object]] = []

    def listen(self, what: str, owner: Any, attribute: str, listener: _Listener, *, first: bool = False) -> None:
        """Call `listener` at a place, before all others if `first`. Messages call the place `what`."""
        listeners = Listeners.at(owner, attribute)
        listeners.add(listener, first=first)
        self._placed[id(owner), attribute] = (what, owner, attribute, listeners)
        self._undo.append(lambda: listeners.remove(listener))

    def undo_with(self, undo: Callable[[], object]) -> None:
        """Call `undo` when the functions are removed."""
        self._undo.append(undo)

    def check(self) -> None:
        """Check that all are still called.

        Raises:
            Contradiction: another function was put in the place of one.
        """
        for what, owner, attribute, listeners in self._placed.values():
            if getattr(owner, attribute) is not listeners:
                raise Contradiction(
                    f"{what}: another function has taken the place of the tracker's, which misses rows from then "
                    f"on; register that one first, the tracker calls it too"
                )

    def remove(self) -> None:
        """Remove all functions."""
        for undo in self._undo:
            undo()
        self._placed.clear()
        self._undo.clear()


def listen_to_lookups(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener(features, output, kernel)` after each lookup of a kernel.

    `register_post_lookup_tracker_fn` hands over the ids of all tables of a sharding type at once, without saying
    which shards they belong to, and is silent under managed collision. The hook of the single lookups
    (`register_optim_state_tracker_fn`) has the same ids together with the shards, everywhere.
    """
    for name, module in sharded_modules(model):
        for lookup in lookups_of(module):
            hooks.listen(f"lookups of module {name!r}", lookup, "optim_state_tracker_fn", listener)


def listen_to_output_dists(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener()` whenever looked-up rows go to other ranks (`register_post_odist_tracker_fn`)."""
    for name, module in sharded_modules(model):
        hooks.listen(f"output dist of module {name!r}", module, "post_odist_tracker_fn", listener)


def listen_to_evictions(hooks: Hooks, model: nn.Module, listener: _Listener) -> None:
    """Call `listener(name of the embedding module, module, evicted)` before managed collision resets rows.

    TorchRec has no hook for it. The place is the module's method that resets them, which is called after the
    listeners.
    """
    for name, module in named_modules(model):
        if hasattr(module, "_evict") and hasattr(module, "_embedding_module"):
            inside = f"{name}._embedding_module".removeprefix(".")
            evict = partial(listener, inside, module._embedding_module)
            hooks.listen(f"evictions of module {name!r}", module, "_evict", evict, first=True)


class ForwardListener:
    """Calls a function before each forward in training. In the thread that trains.

    A copy of the module, or what is loaded from a pickle of it, calls nothing; nor does a compiled one.
    """

    def __init__(self, listener: Callable[[], None] | None = None) -> None:
        self._listener = listener

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        """Called by PyTorch before a forward."""
        if not torch.compiler.is_compiling() and module.training and self._listener:
            self._listener()

    def __reduce__(self) -> tuple[type["ForwardListener"], tuple[()]]:
        """Without the function."""
        return ForwardListener, ()


def listen_to_forwards(hooks: Hooks, modules: Iterable[nn.Module], listener: Callable[[], None]) -> None:
    """Call `listener()` before each forward of some modules in training."""
    for module in modules:
        hooks.undo_with(module.register_forward_pre_hook(ForwardListener(listener)).remove)


def listen_to_maps(hooks: Hooks, model: nn.Module, listener: Callable[[], None]) -> None:
    """Call `listener()` before managed collision gives rows to other raw ids."""
    for collision in collision_modules(model):
        if collision.hashes:  # In each forward; there is no other place.
            listen_to_forwards(hooks, [collision.module.input_mapper], listener)
        elif not collision.sharded:
            listen_to_forwards(hooks, [collision.module], listener)
        else:
            hooks.listen(f"module {collision.name!r}", collision.module, "_coalesce_history", listener, first=True)


def listen_to_gradients(hooks: Hooks, model: nn.Module, listener: Callable[[torch.Tensor], None]) -> None:
    """Call `listener(parameter)` when the gradient of a parameter outside of tables is complete.

    Within backward, in a thread of autograd.
    """
    for _, parameter in outside_of_tables(model):
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(listener)  # type: ignore[no-untyped-call]
            hooks.undo_with(handle.remove)


class ReshardWatch:
    """Detects that modules have new lookups, which no hook is attached to yet.

    `DistributedModelParallel.reshard` replaces the lookups. In the thread that trains.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module, list(module._lookups), list(lookups_of(module)))
            for name, module in sharded_modules(model)
        ]

    def resharded(self) -> list[str]:
        """FQNs of the modules whose lookups were replaced since this was made."""
        # Modules are equal if they are the same. The wrappers mostly are, which each step finds out quickly.
        return [
            name
            for name, module, wrapped, lookups in self._modules
            if module._lookups != wrapped and list(lookups_of(module)) != lookups
        ]
