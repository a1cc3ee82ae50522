"""Trying a plan on copies: whether calling modules early has effects beside their results."""

import copy
from typing import Any

from torch import fx, nn

from deltasync.trainer.pipelines.batches import tensors_in
from deltasync.trainer.pipelines.lookahead.calls import version
from deltasync.trainer.pipelines.lookahead.plan import Plan, compute
from deltasync.trainer.pipelines.lookahead.randomness import random_states, random_states_preserved


def why_not_early(plan: Plan, model: nn.Module, batch: Any) -> dict[str, str]:
    """Preprocessing modules that have to be called when forward calls them and not before, and why, by FQN.

    Called early, they would write to what others still read, or take random numbers out of their turn.
    """
    reasons: dict[str, str] = {}
    values: dict[fx.Node, Any] = {}
    try:
        batch, modules = copy.deepcopy(batch), copy.deepcopy(plan.preprocessing)
        tensors = {node: copy.deepcopy(tensor) for node, tensor in plan.tensors_of(model).items()}
    except Exception as error:  # noqa: BLE001  # Anything can refuse to be copied, each in its way.
        return dict.fromkeys(plan.preprocessing, f"it can't be tried on a copy: {_described(error)}")
    with random_states_preserved():
        for node in plan.nodes:
            effects = _CallEffects(modules.get(str(node.target)), [batch, *values.values()])
            try:
                values[node] = tensors[node] if node in tensors else compute(node, batch, model, modules, values)
            except Exception as error:  # noqa: BLE001  # Forward may never make this call with this batch.
                return reasons | plan.without(node, _described(error))
            if reason := effects.changes():
                reasons[str(node.target)] = reason
    return reasons


class _CallEffects:
    """What a call of a module does beside returning a result."""

    def __init__(self, module: nn.Module | None, inputs: Any) -> None:
        self._tensors = {"its input": [tensor for _, tensor in tensors_in(inputs)]}
        self._tensors["its buffers"] = list(module.buffers()) if module else []
        self._before, self._random = self._versions(), random_states()

    def changes(self) -> str:
        """What others could notice of the call, in words; empty if nothing."""
        if random_states() != self._random:
            return "it draws random numbers, which others would then get instead"
        now = self._versions()
        return next((f"it writes to {what}" for what in now if now[what] != self._before[what]), "")

    def _versions(self) -> dict[str, list[int]]:
        return {what: [version(tensor) for tensor in tensors] for what, tensors in self._tensors.items()}


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
