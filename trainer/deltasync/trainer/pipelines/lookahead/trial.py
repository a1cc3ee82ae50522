"""Trying a plan on copies: whether calling modules early has effects beside their results."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from deltasync.trainer.pipelines.batches import tensors_in
from deltasync.trainer.pipelines.lookahead.calls import version
from deltasync.trainer.pipelines.lookahead.fingerprints import Fingerprint
from deltasync.trainer.pipelines.lookahead.module_state import ModuleState
from deltasync.trainer.pipelines.lookahead.plan import Plan, compute
from deltasync.trainer.pipelines.lookahead.randomness import random_states, random_states_preserved


def why_not_early(plan: Plan, model: nn.Module, batch: Any) -> dict[str, str]:
    """Preprocessing modules that have to be called when forward calls them and not before, and why, by FQN.

    Called early, they would change what they or others still need, or take random numbers out of their turn. Each
    is called once for this, with this batch: with a later one, a module may still turn out to do so.
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


class _CallEffects:
    """What a call of a module does beside returning a result."""

    def __init__(self, module: nn.Module | None, inputs: Any) -> None:
        self._module, self._inputs = module, [tensor for _, tensor in tensors_in(inputs)]
        self._versions, self._random = [version(tensor) for tensor in self._inputs], random_states()
        if module is not None:  # Empty containers count as false.
            self._state, self._fingerprint = ModuleState.of(module), Fingerprint(module)

    def changes(self) -> str:
        """What the module or others could notice of the call, in words; empty if nothing."""
        if random_states() != self._random:
            return "it draws random numbers, which others would then get instead"
        if [version(tensor) for tensor in self._inputs] != self._versions:
            return "it writes to its input"
        if self._module is None:
            return ""
        if attribute := Fingerprint(self._module).changed(self._fingerprint):
            return f"it changes its attribute {attribute!r} when it is called"
        return "" if ModuleState.of(self._module).is_same(self._state) else "it changes its attributes"


def _no_copy(error: Exception) -> str:
    return f"it can't be tried on a copy: {_described(error)}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
