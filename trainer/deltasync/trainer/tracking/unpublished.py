"""What a forward may read and no table holds: it must not change unseen while a model is published."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modules import is_skipped, modules_outside_of_tables

_ADVICE = "or publish without what is outside of embedding tables (dense=False)"


class UnpublishedState:
    """State outside of embedding tables that `state_dict` does not have as tensors, and what has none of it yet.

    In whichever thread reads, within the gate.
    """

    def __init__(self, model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
        """Remember what there is, except in modules that are skipped."""
        modules = modules_outside_of_tables(model)
        self._modules = [(name, module) for name, module in modules if not is_skipped(name, fqns_to_skip)]
        self._names = [_names(module) for _, module in self._modules]
        self._copies = {
            (name, attribute): (module, _Buffer.of(buffer))
            for name, module in self._modules
            for attribute, buffer in module._buffers.items()
            if buffer is not None and attribute in module._non_persistent_buffers_set
        }

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(before.nbytes for _, before in self._copies.values())

    def check(self) -> None:
        """Check that it is as it was.

        Raises:
            InvalidInput: a buffer that is not persistent has changed, or modules have more parameters or buffers.
        """
        for (name, module), names in zip(self._modules, self._names, strict=True):
            if more := _names(module) - names:
                found = ", ".join(map(repr, sorted(more)))
                raise InvalidInput(
                    f"module {name!r} has got {found}, which is not published: restart publishing with the model "
                    "as it is"
                )
        for (name, attribute), (module, before) in self._copies.items():
            if not before.equals(module._buffers.get(attribute)):
                raise InvalidInput(
                    f"buffer {f'{name}.{attribute}'.removeprefix('.')!r} has changed and is not in the state_dict "
                    f"(persistent=False), so that no predictor would learn of it: make it persistent, {_ADVICE}"
                )


def check_extra_state(model: nn.Module, fqns_to_skip: Collection[str] = ()) -> None:
    """Check that no module outside of embedding tables, but for those that are skipped, has extra state.

    Raises:
        InvalidInput: one has.
    """
    for name, module in modules_outside_of_tables(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state and not is_skipped(name, fqns_to_skip):
            raise InvalidInput(
                f"module {name!r}, a {type(module).__name__}, has state of its own (get_extra_state), which "
                f"cannot be published: keep it in buffers, {_ADVICE}"
            )


def _names(module: nn.Module) -> set[str]:
    held = (*module._parameters.items(), *module._buffers.items())
    return {name for name, tensor in held if tensor is not None}


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer as it was.

    Attributes:
        tensor: itself.
        version: how often PyTorch had seen it change.
        bits: a copy; None where it cannot be read as an array, since it is sparse, say.
    """

    tensor: torch.Tensor
    version: int
    bits: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Buffer":
        bits = _bits(tensor)
        return cls(tensor, _version(tensor), None if bits is None else bits.clone())

    @property
    def nbytes(self) -> int:
        return 0 if self.bits is None else self.bits.nbytes

    def equals(self, now: torch.Tensor | None) -> bool:
        if now is None or (now.shape, now.dtype) != (self.tensor.shape, self.tensor.dtype):
            return False
        bits = _bits(now)
        if bits is None or self.bits is None:
            return now is self.tensor and _version(now) == self.version
        return torch.equal(bits, self.bits)


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
