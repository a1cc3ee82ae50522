"""Replacements for the forwards of modules that a pipeline calls ahead."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn
from torchrec.distributed.model_parallel import ShardedModule
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from deltasync.base.errors import Contradiction
from deltasync.trainer.pipelines.batches import record_stream
from deltasync.trainer.pipelines.lookahead.calls import ModuleCall, ModuleState
from deltasync.trainer.pipelines.lookahead.plan import arguments


@dataclass
class LookAheadContext(TrainPipelineContext):  # type: ignore[misc]  # torchrec's types are not followed
    """The work done ahead for a batch in the pipeline.

    Attributes:
        started: whether the work has started.
        values: the values of the plan's nodes.
        calls: calls of preprocessing modules that forward has not used yet, by FQN, each with the module's state
            before the call.
        lookups: calls of sharded modules, by FQN.
    """

    started: bool = False
    values: dict[fx.Node, Any] = field(default_factory=dict)
    calls: dict[str, list[tuple[ModuleState, ModuleCall]]] = field(default_factory=dict)
    lookups: dict[str, ModuleCall] = field(default_factory=dict)


class ForwardOwner(Protocol):
    """The object that has replaced the forwards."""

    in_forward: bool

    def detach(self) -> None:
        """Restore the modules' own forwards."""

    def goes_on(self, name: str, reason: str) -> bool:
        """Whether to use the ids that a module has sent out ahead; if not, its own forward has been restored."""


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
        self, owner: ForwardOwner, arguments: LookupArguments, module: ShardedModule, stream: torch.Stream | None
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

    def __init__(self, owner: ForwardOwner, name: str, module: nn.Module, stream: torch.Stream | None) -> None:
        self._owner, self.name, self._module, self._stream = owner, name, module, stream
        self._compute: Callable[..., Any] = module.forward
        self._context = LookAheadContext(version=1)

    def set_context(self, context: LookAheadContext) -> None:
        """Switch to the batch that forward runs on next."""
        self._context = context

    def ahead(self, context: LookAheadContext, *args: Any, **kwargs: Any) -> Any:
        """Compute a result before forward needs it.

        Raises:
            Contradiction: the module writes to its arguments, or changes its own state.
        """
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
