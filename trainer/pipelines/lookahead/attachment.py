"""Attaching a pipeline to a model, and taking it off again."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import ShardedModule, get_unwrapped_module
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward, KJTAllToAllForward

from sync_service.errors import Contradiction
from trainer.pipelines.lookahead.forwards import (
    LookAheadContext,
    LookupArguments,
    LookupForward,
    PreprocessingForward,
)
from trainer.pipelines.lookahead.plan import Plan, compute, make_plan
from trainer.pipelines.lookahead.trial import why_not_early
from trainer.pipelines.swaps import Swaps

logger = logging.getLogger(__name__)


class LookAhead:
    """The modules of a model whose work is done ahead, by the pipeline that is attached to them.

    Attributes:
        modules: sharded modules whose ids are sent out ahead.
        preprocessing: what stands in for the forwards of preprocessing modules.
        in_forward: forward is running, of the batch whose context the forwards have.
        attached: the model's modules have other forwards than their own.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self.modules: list[ShardedModule] = []
        self.preprocessing: list[PreprocessingForward] = []
        self.in_forward = False
        self.attached = False
        self._plans: dict[bool, Plan] = {}
        self._given_up: dict[str, str] = {}
        self._swaps: dict[str, Swaps] = {}
        self._inner: nn.Module | None = None
        self._sharing_splits = False

    def attach(self, model: nn.Module, batch: Any) -> None:
        """Put other forwards in the places of the modules' own. Whoever was attached to the model is taken off.

        Raises:
            Contradiction: another kind of pipeline is attached.
        """
        inner = get_unwrapped_module(model)
        if inner is not self._inner:
            self._inner, self._plans = inner, {}
            self._given_up = {}
        plan = self._plans.get(model.training) or self._make_plan(inner, batch)
        self._plans[model.training] = plan
        for name in plan.lookups:
            self._swap_lookup(name, inner.get_submodule(name), plan)
        for name, module in plan.preprocessing.items():
            forward = PreprocessingForward(self, name, module, self._stream)
            self.preprocessing.append(forward)
            self._swap(name, module, "forward", forward)
        self._plan = plan
        self.attached, self._sharing_splits = True, False

    def detach(self) -> None:
        """Put the modules' own forwards back."""
        for swaps in self._swaps.values():
            swaps.undo()
        self._swaps.clear()
        self.modules.clear()
        self.preprocessing.clear()
        self.attached = False

    def give_up(self, name: str, reason: str) -> None:
        """No longer do a sharded module's work ahead, from the call on that it is in."""
        _log_not_ahead(name, reason)
        self._given_up[name] = reason
        self._plans.clear()
        self._swaps.pop(name).undo()
        self.modules[:] = [module for module in self.modules if isinstance(module.forward, LookupForward)]

    @property
    def outdated(self) -> bool:
        """Whether the plan that is followed is not the one to follow from now on."""
        return not self._plans

    def check(self) -> None:
        """See that the forwards are still in their places.

        Raises:
            Contradiction: others have been put there.
        """
        for name, swaps in self._swaps.items():
            if not swaps.in_place:
                raise Contradiction(
                    f"module {name!r}: something else has taken the place of this pipeline's forward; detach() "
                    f"that one first"
                )

    def compute(self, batch: Any, context: LookAheadContext) -> None:
        """Do what comes before the lookups: accesses to the batch and preprocessing."""
        assert self._inner is not None  # noqa: S101  # Attached first.
        modules = {forward.name: partial(forward.ahead, context) for forward in self.preprocessing}
        for node in self._plan.nodes:
            context.values[node] = compute(node, batch, self._inner, modules, context.values)

    def share_splits(self) -> None:
        """Have modules say together how much they are going to send. Once they have been given a batch."""
        if self._sharing_splits:
            return
        self._sharing_splits = True
        for module in self.modules:
            for dist in _all_to_alls(module):
                if not isinstance(dist.forward, KJTAllToAllForward):
                    together = KJTAllToAllForward(pg=dist._pg, splits=dist._splits, stagger=dist._stagger)
                    self._swap(module.forward.name, dist, "forward", together)

    def _make_plan(self, inner: nn.Module, batch: Any) -> Plan:
        plan = make_plan(inner, self._given_up)
        while early := why_not_early(plan, inner, batch):
            self._given_up |= early
            plan = make_plan(inner, self._given_up)
        for name, reason in plan.reasons.items():
            _log_not_ahead(name, reason)
        return plan

    def _swap_lookup(self, name: str, module: Any, plan: Plan) -> None:
        before = vars(module).get("forward")
        if isinstance(before, LookupForward):
            before.owner.detach()
        elif isinstance(before, BaseForward):
            raise Contradiction(f"module {name!r} is attached to another pipeline; detach() that one first")
        arguments = LookupArguments(name, plan.lookups[name])
        self._swap(name, module, "forward", LookupForward(self, arguments, module, self._stream))
        self._swap(name, module, "is_pipelined", True)
        self.modules.append(module)

    def _swap(self, name: str, owner: Any, attribute: str, value: Any) -> None:
        self._swaps.setdefault(name, Swaps()).put(owner, attribute, value)


def _all_to_alls(module: nn.Module) -> Iterator[Any]:
    for child in module.modules():
        for dist in getattr(child, "_input_dists", ()):
            if hasattr(dist, "_dist"):
                yield dist._dist


def _log_not_ahead(name: str, reason: str) -> None:
    logger.warning("module %r is not pipelined: %s", name, reason)
