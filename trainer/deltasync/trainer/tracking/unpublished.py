"""What a forward may read and no table holds: it must not change unseen while a model is published."""

from collections.abc import Collection

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
            (name, attribute): (module, buffer.detach().clone())
            for name, module in self._modules
            for attribute, buffer in module._buffers.items()
            if buffer is not None and attribute in module._non_persistent_buffers_set
        }

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(copy.nbytes for _, copy in self._copies.values())

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
        for (name, attribute), (module, copy) in self._copies.items():
            if not _same(module._buffers.get(attribute), copy):
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


def _same(now: torch.Tensor | None, before: torch.Tensor) -> bool:
    if now is None or (now.shape, now.dtype) != (before.shape, before.dtype):
        return False
    return torch.equal(_bits(now), _bits(before))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
