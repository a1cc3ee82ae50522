"""Calls modules ahead of forward, with replacements for their forwards. For the training thread."""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torchrec.distributed.model_parallel import ShardedModule, get_unwrapped_module
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward, KJTAllToAllForward, PipelinedForward

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.distributed.ranks import group_of
from deltasync.trainer.pipelines.batches import record_stream
from deltasync.trainer.pipelines.calls import ModuleCall, ModuleState
from deltasync.trainer.pipelines.plan import LookAheadPlan, arguments, compute, make_plan
from deltasync.trainer.pipelines.trial import why_not_early

logger = logging.getLogger(__name__)

_MISSING = object()


class AttributePatches:
    """Attributes that were replaced on objects, with their earlier values.

    Replacing the `forward` of a module, instead of wrapping the module, keeps the names of its parameters.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`."""
        self._before.append((owner, name, value, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    @property
    def in_place(self) -> bool:
        """Whether all replacements are still in place."""
        return all(vars(owner).get(name, _MISSING) is value for owner, name, value, _ in self._before)

    def undo(self) -> None:
        """Put the earlier values back, in reverse order."""
        while self._before:
            owner, name, _, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


@dataclass
class LookAheadContext(TrainPipelineContext):  # type: ignore[misc]  # torchrec's types are not followed
    """The work done ahead for a batch in the pipeline."""

    started: bool = False  # Whether the work has started.
    values: dict[fx.Node, Any] = field(default_factory=dict)  # The values of the plan's nodes.
    # Calls of preprocessing modules that forward has not used yet, by FQN, each with the module's state before
    # the call.
    calls: dict[str, list[tuple[ModuleState, ModuleCall]]] = field(default_factory=dict)
    lookups: dict[str, ModuleCall] = field(default_factory=dict)  # Calls of sharded modules, by FQN.


@dataclass(frozen=True)
class LookupArguments:
    """Builds the arguments of a sharded module's next call ahead of forward, through TorchRec's interface."""

    name: str
    node: fx.Node

    def build_args_kwargs(self, context: LookAheadContext) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments that forward is going to use."""
        args, kwargs = arguments(self.node, context.values)
        context.lookups[self.name] = ModuleCall.of(args, kwargs)
        return args, kwargs


class LookupForward(PipelinedForward):  # type: ignore[misc]
    """Replaces the forward of a sharded module: looks up the ids that were sent out ahead."""

    def __init__(
        self, owner: "LookAhead", arguments: LookupArguments, module: ShardedModule, stream: torch.Stream | None
    ) -> None:
        super().__init__(arguments.name, arguments, module, LookAheadContext(version=1), stream)
        self.owner, self._module = owner, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look up the ids sent ahead, or run the module's own forward for other ids and outside the pipeline."""
        if not self.owner.in_forward:
            self.owner.detach()
            return self._module.forward(*args, **kwargs)
        reason = self._context.lookups[self._name].why_different(args, kwargs)
        if self.owner.goes_on(self._name, reason):
            return super().__call__(*args, **kwargs)
        return self._module.forward(*args, **kwargs)


class PreprocessingForward:
    """Replaces the forward of a preprocessing module: returns the result computed ahead for the same call."""

    def __init__(self, owner: "LookAhead", name: str, module: nn.Module, stream: torch.Stream | None) -> None:
        self._owner, self.name, self._module, self._stream = owner, name, module, stream
        self._compute: Callable[..., Any] = module.forward
        self._context = LookAheadContext(version=1)

    def set_context(self, context: LookAheadContext) -> None:
        """Switch to the batch that forward runs on next."""
        self._context = context

    def ahead(self, context: LookAheadContext, *args: Any, **kwargs: Any) -> Any:
        """Compute a result before forward needs it, and check that this changed neither arguments nor module."""
        state, before = ModuleState.of(self._module), ModuleCall.of(args, kwargs)
        result = self._compute(*args, **kwargs)
        reason = before.why_different(args, kwargs)
        if not reason and not ModuleState.of(self._module).is_same(state):
            reason = "it has changed its attributes"
        if reason:
            raise Contradiction(
                f"module {self.name!r} has been called ahead of forward, and {reason}; it cannot be pipelined: "
                f"name it in PipelineOptions.not_ahead"
            )
        context.calls.setdefault(self.name, []).append((state, ModuleCall.of(args, kwargs, result)))
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result computed ahead for these arguments, or compute it now."""
        calls = self._context.calls.get(self.name, []) if self._owner.in_forward else []
        now = ModuleState.of(self._module)
        for one in calls:
            state, call = one
            if now.is_same(state) and not call.why_different(args, kwargs):
                calls.remove(one)
                if self._stream:  # The result was made on that stream; `progress` has already waited for it.
                    record_stream(call.result, torch.get_device_module(self._stream.device).current_stream())
                return call.result
        return self._compute(*args, **kwargs)


class LookAhead:
    """The modules of a model that a pipeline calls ahead of the model's forward.

    Attributes:
        modules: sharded modules whose ids the pipeline sends out ahead.
        preprocessing: replacements for the forwards of preprocessing modules.
        in_forward: whether the model's forward is running.
        attached: whether the replacements are in place.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, stream: torch.Stream | None, not_ahead: Collection[str]
    ) -> None:
        """Check the names in `not_ahead`, without attaching. The work ahead runs on `stream`; None on a CPU."""
        self._model, self._device, self._stream = get_unwrapped_module(model), device, stream
        self._on_any_rank = partial(on_any_rank, what="a pipeline's start", group=group_of(model), device=device)
        modules = dict(self._model.named_modules())
        for name in not_ahead:
            if name not in modules:
                raise InvalidInput(f"not_ahead: the model has no module {name!r}")
        self._exclusions = dict.fromkeys(not_ahead, "it is named in not_ahead")
        self.modules: list[ShardedModule] = []
        self.preprocessing: list[PreprocessingForward] = []
        self.in_forward = False
        self.attached = False
        self._plan = LookAheadPlan()
        # By the model's mode, because its forward may differ between training and evaluation.
        self._plans: dict[bool, LookAheadPlan] = {}
        self._confirmed = set[bool]()
        self._patches: dict[str, AttributePatches] = {}
        self._sharing_splits = False
        self._logged = set[tuple[str, str]]()

    def attach(self, batch: Any) -> None:
        """Replace the modules' forwards, and detach any other pipeline. Tries a copy of the first batch."""
        for module in self._model.modules():
            if isinstance(before := vars(module).get("forward"), LookupForward):
                before.owner.detach()
        if self._stream:  # The work ahead may read tensors of the model.
            self._stream.wait_stream(torch.get_device_module(self._device).current_stream())
        mode = self._model.training
        if mode not in self._plans:
            self._plans[mode] = self._make_plan(batch)
        self._plan = self._plans[mode]
        for name in self._plan.lookups:
            sharded: Any = self._model.get_submodule(name)
            if isinstance(vars(sharded).get("forward"), BaseForward):
                raise Contradiction(f"module {name!r} is attached to another pipeline; detach() that one first")
            arguments = LookupArguments(name, self._plan.lookups[name])
            self._patch(name, sharded, "forward", LookupForward(self, arguments, sharded, self._stream))
            self._patch(name, sharded, "is_pipelined", True)
            self.modules.append(sharded)
        for name, preprocessing in self._plan.preprocessing.items():
            forward = PreprocessingForward(self, name, preprocessing, self._stream)
            self.preprocessing.append(forward)
            self._patch(name, preprocessing, "forward", forward)
        self.attached, self._sharing_splits = True, False

    def detach(self) -> None:
        """Restore the modules' own forwards."""
        self.check()
        for patches in self._patches.values():
            patches.undo()
        self._patches.clear()
        self.modules.clear()
        self.preprocessing.clear()
        self.attached = False

    def goes_on(self, name: str, reason: str) -> bool:
        """Whether to use the ids that a sharded module has sent out ahead; `reason` says how features differ.

        In the first forward with a plan, ranks decide together: if forward calls the module with other features on
        any rank, all ranks stop calling it ahead. Later, other ranks already continue, and it is an error.
        """
        if self._model.training in self._confirmed:
            if reason:
                raise Contradiction(
                    f"module {name!r} is called with other features than in the forwards before: {reason}; it "
                    f"cannot be pipelined: name it in PipelineOptions.not_ahead"
                )
            return True
        if not self._on_any_rank([bool(reason)])[0]:
            return True
        self._exclude(name, reason or "its features are not those of the traced forward on another rank")
        return False

    def confirm(self) -> None:
        """Record that a forward has run as planned."""
        if not self.outdated:
            self._confirmed.add(self._model.training)

    def _exclude(self, name: str, reason: str) -> None:
        """Stop calling a sharded module ahead, from its current call on."""
        self._log_not_ahead(name, reason)
        self._exclusions[name] = reason
        self._plans.clear()
        self._confirmed.clear()
        self._patches.pop(name).undo()
        self.modules[:] = [module for module in self.modules if isinstance(module.forward, LookupForward)]

    @property
    def outdated(self) -> bool:
        """Whether a new plan is needed."""
        return not self._plans

    def check(self) -> None:
        """Check that the replacements are still in place."""
        for name, patches in self._patches.items():
            if not patches.in_place:
                raise Contradiction(
                    f"module {name!r}: something else has taken the place of this pipeline's forward; detach() "
                    f"that one first"
                )

    def compute(self, batch: Any, context: LookAheadContext) -> None:
        """Compute the inputs of a batch's lookups: run the planned accesses to the batch and preprocessing."""
        modules = {forward.name: partial(forward.ahead, context) for forward in self.preprocessing}
        for node in self._plan.nodes:
            try:
                context.values[node] = compute(node, batch, self._model, modules, context.values)
            except Exception as error:
                by = f"module {node.target!r}" if node.op == "call_module" else f"{node.name} of the batch"
                error.add_note(
                    f"raised ahead of forward, by {by}: if forward does not do so for every batch, name "
                    f"the module in PipelineOptions.not_ahead"
                )
                raise

    def share_splits(self) -> None:
        """Make modules exchange the sizes of their messages in one collective, after their first batch."""
        if self._sharing_splits:
            return
        self._sharing_splits = True
        for module in self.modules:
            inputs = [each for child in module.modules() for each in getattr(child, "_input_dists", ())]
            for dist in (each._dist for each in inputs if hasattr(each, "_dist")):
                if not isinstance(dist.forward, KJTAllToAllForward):
                    combined = KJTAllToAllForward(pg=dist._pg, splits=dist._splits, stagger=dist._stagger)
                    self._patch(module.forward.name, dist, "forward", combined)

    def _make_plan(self, batch: Any) -> LookAheadPlan:
        plan = self._common_plan()
        while early := self._why_not_early(plan, batch):
            self._exclusions |= early
            # A module that changes state in one mode may affect the other: make that plan again without it.
            self._plans.clear()
            self._confirmed.clear()
            plan = self._common_plan()
        if plan.lookups:
            logger.info("done ahead of forward: %s", ", ".join([*plan.preprocessing, *plan.lookups]))
        for name, reason in plan.reasons.items():
            self._log_not_ahead(name, reason)
        return plan

    def _common_plan(self) -> LookAheadPlan:
        """Make the same plan on all ranks, because forward may depend on the rank, but lookups are collectives."""
        plan = make_plan(self._model, self._exclusions)
        sharded = [name for name, module in self._model.named_modules() if isinstance(module, ShardedModule)]
        missing = self._on_any_rank([name not in plan.lookups for name in sharded])
        lacking = {name for name, flag in zip(sharded, missing, strict=True) if flag} & plan.lookups.keys()
        if not lacking:
            return plan
        self._exclusions |= dict.fromkeys(lacking, "it is not called ahead on another rank")
        return make_plan(self._model, self._exclusions)

    def _why_not_early(self, plan: LookAheadPlan, batch: Any) -> dict[str, str]:
        """Combine the reasons of all ranks, each of which tries the plan on its own batch."""
        reasons = why_not_early(plan, self._model, batch)
        names = [name for name, _ in self._model.named_modules()]
        on_any_rank = self._on_any_rank([name in reasons for name in names])
        elsewhere = "another rank has found that it can't be called ahead"
        return {name: reasons.get(name, elsewhere) for name, flag in zip(names, on_any_rank, strict=True) if flag}

    def _log_not_ahead(self, name: str, reason: str) -> None:
        """Log each reason once, although several plans may repeat it."""
        if (name, reason) not in self._logged:
            self._logged.add((name, reason))
            logger.warning("module %r is not pipelined: %s", name, reason)

    def _patch(self, name: str, owner: Any, attribute: str, value: Any) -> None:
        self._patches.setdefault(name, AttributePatches()).replace(owner, attribute, value)
