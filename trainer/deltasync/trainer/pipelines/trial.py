"""Tries a plan on copies, to find calls that have side effects."""

import copy
import pickle
from collections.abc import Iterator
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import OptimizedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import tensors_in
from deltasync.trainer.pipelines.calls import OF_TORCH, ModuleState, version
from deltasync.trainer.pipelines.plan import (
    LookAheadPlan,
    compute,
    random_states,
    random_states_preserved,
    tensor_of,
)

_TENSORS = (torch.Tensor, JaggedTensor, KeyedJaggedTensor)


def why_not_early(plan: LookAheadPlan, model: nn.Module, batch: Any) -> dict[str, str]:
    """Why preprocessing modules must not be called ahead of forward, by FQN.

    A module must not change values that it or other modules still need, or draw random numbers out of turn. This
    calls each module once, with this batch, so it misses side effects that only occur with a later batch.
    """
    try:
        batch = copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  # The copied objects may raise anything.
        return dict.fromkeys(plan.preprocessing, _no_copy(error))
    try:
        modules = copy.deepcopy(plan.preprocessing)  # In one call, because modules may share objects.
    except Exception as error:  # noqa: BLE001  # As above.
        alone = {name: _why_not_copied(module) for name, module in plan.preprocessing.items()}
        reasons = {name: reason for name, reason in alone.items() if reason}
        return reasons or dict.fromkeys(plan.preprocessing, _no_copy(error))
    reasons = {}
    tensors = {node: tensor_of(model, node) for node in plan.nodes if node.op == "get_attr"}
    values: dict[fx.Node, Any] = {}
    with random_states_preserved():
        for node in plan.nodes:
            try:
                effects = _CallEffects(modules.get(str(node.target)), [batch, *values.values()])
                if node in tensors:
                    values[node] = copy.deepcopy(tensors[node])
                else:
                    values[node] = compute(node, batch, model, modules, values)
                reason = effects.changes()
            except Exception as error:  # noqa: BLE001  # Forward may never make this call with this batch.
                return reasons | plan.without(node, _described(error))
            if reason:
                reasons[str(node.target)] = reason
    return reasons


def _why_not_copied(module: nn.Module) -> str:
    try:
        copy.deepcopy(module)
    except Exception as error:  # noqa: BLE001  # As above.
        return _no_copy(error)
    return ""


def _no_copy(error: Exception) -> str:
    return f"it can't be tried on a copy: {_described(error)}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _CallEffects:
    """Detects side effects of a module's call."""

    def __init__(self, module: nn.Module | None, inputs: Any) -> None:
        self._module, self._inputs = module, [tensor for _, tensor in tensors_in(inputs)]
        self._versions, self._random = [version(tensor) for tensor in self._inputs], random_states()
        if module is not None:  # Do not test truth, because an empty container module is false.
            self._state, self._fingerprint = ModuleState.of(module), Fingerprint(module)

    def changes(self) -> str:
        """A description of the side effect; empty if there is none."""
        if random_states() != self._random:
            return "it draws random numbers, which would change those that other code gets"
        if [version(tensor) for tensor in self._inputs] != self._versions:
            return "it writes to its input"
        if self._module is None:
            return ""
        if attribute := Fingerprint(self._module).changed(self._fingerprint):
            return f"it changes its attribute {attribute!r} when it is called"
        return "" if ModuleState.of(self._module).is_same(self._state) else "it changes its attributes"


class Fingerprint:
    """Digests of each attribute and buffer of a module and its submodules, as pickling would write them.

    Tensors are compared by their memory and number of writes. Functions, classes, and objects that cannot be
    pickled are only compared by identity. May take as long as pickling the module.
    """

    def __init__(self, module: nn.Module) -> None:
        # Keep the objects alive while digests are compared, or another object could get the same address.
        self._alive: list[Any] = []
        self._digests = {
            f"{prefix}.{name}".removeprefix("."): self._digest(value)
            for prefix, one in module.named_modules()
            for name, value in _attributes(one)
        }

    def changed(self, before: "Fingerprint") -> str:
        """The name of an attribute that has changed since an earlier fingerprint; empty if there is none."""
        names = {**before._digests, **self._digests}
        return next((name for name in names if self._digests.get(name) != before._digests.get(name)), "")

    def _digest(self, value: Any) -> bytes:
        digest = blake2b()
        _Pickler(digest, self._alive).dump(value)
        return digest.digest()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes and buffers, except the attributes that torch gives to every module."""
    if isinstance(module, torch.jit.ScriptModule):
        for name in module._concrete_type.get_attributes():
            yield name, module._c.getattr(name)
    elif not isinstance(module, OptimizedModule):  # Its only attributes are those of torch.compile.
        yield from ((name, value) for name, value in vars(module).items() if name not in OF_TORCH)
        yield from module._buffers.items()


class _Known:
    """Replaces an object whose parts the pickler does not write."""


class _Pickler(pickle.Pickler):
    """Writes bytes that differ between states of an object, but cannot be unpickled."""

    def __init__(self, digest: Any, alive: list[Any]) -> None:
        super().__init__(SimpleNamespace(write=digest.update), protocol=5)
        self._alive = alive

    def reducer_override(self, value: Any) -> Any:
        """Say how to write an object that is not a number, a string or a plain container."""
        if value is _Known:
            return NotImplemented
        self._alive.append(value)
        if isinstance(value, nn.Module):
            return _Known, (), [*_attributes(value), *value.named_children()]
        if isinstance(value, _TENSORS):
            return _Known, tuple(_memory(tensor) for _, tensor in tensors_in(value))
        if isinstance(value, torch.Generator):
            return _Known, tuple(value.get_state().tolist())
        try:
            reduced = value.__reduce_ex__(5)
        except Exception:  # noqa: BLE001  # The object may raise anything.
            reduced = None
        return reduced if isinstance(reduced, tuple) else (_Known, (id(value),))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype), version(tensor)
    except RuntimeError:  # The tensor has no memory of its own, for example a sparse or a fake tensor.
        return id(tensor), version(tensor)
