"""Tries a plan on copies: whether calls ahead of forward have effects beside their results."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import OptimizedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines.batches import tensors_in
from deltasync.trainer.pipelines.lookahead.calls import OF_TORCH, ModuleState, version
from deltasync.trainer.pipelines.lookahead.plan import (
    LookAheadPlan,
    compute,
    random_states,
    random_states_preserved,
)

_TENSORS = (torch.Tensor, JaggedTensor, KeyedJaggedTensor)


def why_not_early(plan: LookAheadPlan, model: nn.Module, batch: Any) -> dict[str, str]:
    """Why preprocessing modules must not be called ahead of forward, by FQN.

    Called early, they would change values that they or others still need, or draw random numbers out of turn. This
    calls each module once, with this batch; a module may still do so with a later batch.
    """
    try:
        batch = copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  # Anything can refuse to be copied, each in its way.
        return dict.fromkeys(plan.preprocessing, _no_copy(error))
    try:
        modules = copy.deepcopy(plan.preprocessing)  # Together: they may share what they have.
    except Exception as error:  # noqa: BLE001  # As above.
        return _why_not_copied(plan.preprocessing) or dict.fromkeys(plan.preprocessing, _no_copy(error))
    reasons: dict[str, str] = {}
    tensors = plan.tensors_of(model)
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


def _why_not_copied(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    reasons = {}
    for name, module in modules.items():
        try:
            copy.deepcopy(module)
        except Exception as error:  # noqa: BLE001  # As above.
            reasons[name] = _no_copy(error)
    return reasons


def _no_copy(error: Exception) -> str:
    return f"it can't be tried on a copy: {_described(error)}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _CallEffects:
    """The effects of a module's call beside its result."""

    def __init__(self, module: nn.Module | None, inputs: Any) -> None:
        self._module, self._inputs = module, [tensor for _, tensor in tensors_in(inputs)]
        self._versions, self._random = [version(tensor) for tensor in self._inputs], random_states()
        if module is not None:  # Empty containers count as false.
            self._state, self._fingerprint = ModuleState.of(module), Fingerprint(module)

    def changes(self) -> str:
        """The effect of the call in words; empty if there is none."""
        if random_states() != self._random:
            return "it draws random numbers, which others would then get instead"
        if [version(tensor) for tensor in self._inputs] != self._versions:
            return "it writes to its input"
        if self._module is None:
            return ""
        if attribute := Fingerprint(self._module).changed(self._fingerprint):
            return f"it changes its attribute {attribute!r} when it is called"
        return "" if ModuleState.of(self._module).is_same(self._state) else "it changes its attributes"


class Fingerprint:
    """Digests of each attribute and buffer of a module and its submodules, as pickling would write them.

    Of tensors, the memory and the number of writes count. Functions, classes, and objects that cannot be pickled
    always count as the same. May take as long as pickling the module.
    """

    def __init__(self, module: nn.Module) -> None:
        # Alive for as long as digests are compared, or another object could get the address of one of these.
        self._alive: list[Any] = []
        self._digests = {
            f"{prefix}.{name}".removeprefix("."): self._digest(value)
            for prefix, one in module.named_modules()
            for name, value in _attributes(one)
        }

    def changed(self, before: "Fingerprint") -> str:
        """The name of an attribute that is another one than before; empty if there is none."""
        names = {**before._digests, **self._digests}
        return next((name for name in names if self._digests.get(name) != before._digests.get(name)), "")

    def _digest(self, value: Any) -> bytes:
        digest = blake2b()
        _Pickler(digest, self._alive).dump(value)
        return digest.digest()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes and buffers, but for those that torch gives to every module."""
    if isinstance(module, torch.jit.ScriptModule):
        for name in module._concrete_type.get_attributes():
            yield name, module._c.getattr(name)
    elif not isinstance(module, OptimizedModule):  # Which has attributes of torch.compile alone.
        yield from ((name, value) for name, value in vars(module).items() if name not in OF_TORCH)
        yield from module._buffers.items()


class _Known:
    """Written by the pickler in place of an object that it does not take apart."""


class _Pickler(pickle.Pickler):
    """Writes bytes that differ between states of an object; they cannot be unpickled."""

    def __init__(self, digest: Any, alive: list[Any]) -> None:
        super().__init__(SimpleNamespace(write=digest.update), protocol=5)
        self._alive = alive

    def reducer_override(self, value: Any) -> Any:
        """How to write all that is not plain: neither a number, a string nor a plain container."""
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
        except Exception:  # noqa: BLE001  # Anything can refuse to be pickled, each in its way.
            reduced = None
        return reduced if isinstance(reduced, tuple) else (_Known, (id(value),))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype), version(tensor)
    except RuntimeError:  # Those without memory that is theirs: sparse ones, and stand-ins.
        return id(tensor), version(tensor)
