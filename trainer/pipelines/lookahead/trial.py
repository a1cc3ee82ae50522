"""Trying a plan on copies, to see whether anybody could tell that modules were called early."""

import copy
from typing import Any

import torch
from torch import fx, nn

from trainer.pipelines.batches import tensors_in
from trainer.pipelines.lookahead.plan import Plan, compute


def why_not_early(plan: Plan, model: nn.Module, batch: Any) -> dict[str, str]:
    """Preprocessing modules that have to be called when forward calls them and not before, and why, by FQN.

    Called early, they would write to what others still read, or take random numbers out of their turn.
    """
    if not plan.preprocessing:
        return {}
    reasons: dict[str, str] = {}
    values: dict[fx.Node, Any] = {}
    try:
        batch, modules = copy.deepcopy(batch), copy.deepcopy(plan.preprocessing)
    except Exception as error:  # noqa: BLE001  # Anything can refuse to be copied, each in its way.
        return dict.fromkeys(plan.preprocessing, f"it can't be tried on a copy: {_described(error)}")
    with torch.random.fork_rng(_gpus()):
        for node in plan.nodes:
            watched = _Watched(modules.get(str(node.target)), batch)
            try:
                values[node] = compute(node, batch, model, modules, values)
            except Exception as error:  # noqa: BLE001  # Forward may never make this call with this batch.
                reasons |= dict.fromkeys(plan.preprocessing, f"it can't be called ahead: {_described(error)}")
                return reasons
            if reason := watched.changes():
                reasons[str(node.target)] = reason
    return reasons


class _Watched:
    """What a call of a module may not change."""

    def __init__(self, module: nn.Module | None, batch: Any) -> None:
        self._tensors = {"its input": [tensor for _, tensor in tensors_in(batch)]}
        self._tensors["its buffers"] = list(module.buffers()) if module else []
        self._before, self._random = self._versions(), _random_states()

    def changes(self) -> str:
        """What has changed since, in words; empty if nothing has."""
        if any(not torch.equal(*states) for states in zip(self._random, _random_states(), strict=True)):
            return "it draws random numbers, which others would then get instead"
        now = self._versions()
        return next((f"it writes to {what}" for what in now if now[what] != self._before[what]), "")

    def _versions(self) -> dict[str, list[int]]:
        return {what: [tensor._version for tensor in tensors] for what, tensors in self._tensors.items()}


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
