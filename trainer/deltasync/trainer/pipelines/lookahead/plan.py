"""Which calls of a model's forward can be made ahead of it, by what its trace says."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torchrec.distributed.model_parallel import ShardedModule

from deltasync.trainer.pipelines.lookahead.tracing import opaque_arguments, place_of, tensor_of, trace

# Read something out of a batch, and leave it as it is. Named tuples are made too.
_ACCESSES = (getattr, operator.getitem)


@dataclass(frozen=True)
class LookAheadPlan:
    """What can be done ahead.

    Attributes:
        nodes: what is computed ahead, in the order of forward: accesses to the batch, and preprocessing.
        lookups: by FQN of a sharded module, the one call of it, whose arguments are among `nodes`.
        preprocessing: modules called by `nodes`, by FQN.
        reasons: why the others are not done ahead, by FQN: sharded modules, and what their arguments come from.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    lookups: dict[str, fx.Node] = field(default_factory=dict)
    preprocessing: dict[str, nn.Module] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def tensors_of(self, model: nn.Module) -> dict[fx.Node, Any]:
        """The tensors of the model that are needed."""
        return {node: tensor_of(model, node) for node in self.nodes if node.op == "get_attr"}

    def without(self, node: fx.Node, error: str) -> dict[str, str]:
        """Why what needs a node is not done ahead, by FQN: the module that it calls, or lookups."""
        if _is_call(node):
            return {str(node.target): f"it can't be called ahead: {error}"}
        needing = [name for name, lookup in self.lookups.items() if node in _inputs([lookup])]
        return dict.fromkeys(needing, f"its features can't be made ahead: {error}")


def make_plan(model: nn.Module, exclusions: Mapping[str, str]) -> LookAheadPlan:
    """Trace a model, in the mode it is in.

    Args:
        model: without what parallel training puts around modules.
        exclusions: FQNs of modules that are not to be done ahead, and why.
    """
    try:
        graph = trace(model)
    except Exception as error:  # noqa: BLE001  # The model's own code runs here, with stand-ins for its inputs.
        sharded = [name for name, module in model.named_modules() if isinstance(module, ShardedModule)]
        reason = f"the model's forward can't be traced: {place_of(error)}: {type(error).__name__}: {error}"
        return LookAheadPlan(reasons=dict.fromkeys(sharded, reason))
    return _Planner(model, graph, exclusions).plan()


class _Planner:
    def __init__(self, model: nn.Module, graph: fx.Graph, exclusions: Mapping[str, str]) -> None:
        self._model, self._graph, self._exclusions = model, graph, exclusions
        self._calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self._calls.setdefault(str(node.target), []).append(node)
        self._reasons: dict[fx.Node, str] = {}

    def plan(self) -> LookAheadPlan:
        sharded = {name: nodes for name, nodes in self._calls.items() if self._is_sharded(name)}
        reasons = {name: self._why_not_looked_up(name, nodes) for name, nodes in sharded.items()}
        lookups = {name: sharded[name][0] for name, reason in reasons.items() if not reason}
        needed = _inputs(lookups.values())
        targets = {node.target for node in needed if _is_call(node)}
        # All calls of a module that can be made ahead: of equal ones, each has a result of its own.
        same = [node for node in self._graph.nodes if node.target in targets and not self._why_not(node)]
        needed |= {*same, *_inputs(same)}
        nodes = [node for node in self._graph.nodes if node in needed]
        called = {str(node.target): self._module(node) for node in nodes if node.op == "call_module"}
        found = {str(node.target): reason for node, reason in self._reasons.items() if reason and _is_call(node)}
        preprocessing = {name: self._exclusions.get(name, reason) for name, reason in found.items()}
        every = {**preprocessing, **reasons}
        return LookAheadPlan(nodes, lookups, called, {name: reason for name, reason in every.items() if reason})

    def _why_not_looked_up(self, name: str, calls: list[fx.Node]) -> str:
        if name in self._exclusions:
            return self._exclusions[name]
        if len(calls) > 1:
            return f"it is called {len(calls)} times in one forward"
        if not calls[0].all_input_nodes:
            return "it is called without anything from the batch"
        return self._why_not_inputs(calls[0])

    def _why_not(self, node: fx.Node) -> str:
        """Why a value cannot be computed ahead; empty if it can."""
        if node not in self._reasons:
            self._reasons[node] = self._find_reason(node)
        return self._reasons[node]

    def _find_reason(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return ""
        if node.op == "get_attr":
            return self._why_not_attribute(node)
        if node.op == "call_module":
            return self._why_not_module(node) or self._why_not_inputs(node)
        if node.op == "call_function" and (node.target in _ACCESSES or hasattr(node.target, "_fields")):
            return self._why_not_inputs(node)
        if node.op == "call_method" and node.target == "get":
            return self._why_not_inputs(node)
        if isinstance(node.target, type):
            return f"its input is made on the way: a {_name(node)}"
        return f"its input is changed on the way, by {_name(node)}"

    def _why_not_attribute(self, node: fx.Node) -> str:
        value = tensor_of(self._model, node)
        if isinstance(value, nn.Parameter):
            return f"its input is the parameter {node.target!r}"
        return "" if isinstance(value, torch.Tensor) else f"its input is a {type(value).__name__} of the model"

    def _why_not_inputs(self, node: fx.Node) -> str:
        for one in opaque_arguments([*node.args, node.kwargs]):
            what = f"module {node.target!r}" if _is_call(node) else _name(node)
            return (
                f"{what} is called with a value of type {one.kind}, which torch.fx cannot hold: pass a "
                f"plain dict, list or tuple, or make it an attribute of a module"
            )
        return next((reason for source in node.all_input_nodes if (reason := self._why_not(source))), "")

    def _why_not_module(self, node: fx.Node) -> str:
        name = str(node.target)
        if name in self._exclusions:
            return f"its input comes from module {name!r}: {self._exclusions[name]}"
        if self._is_sharded(name):
            return f"its input comes from the sharded module {name!r}"
        if any(True for _ in self._module(node).parameters()):
            return f"module {name!r} has parameters to train"
        if not node.args and not node.kwargs:
            return f"module {name!r} is called without arguments"
        return ""

    def _is_sharded(self, name: str) -> bool:
        return isinstance(self._model.get_submodule(name), ShardedModule)

    def _module(self, node: fx.Node) -> nn.Module:
        return self._model.get_submodule(str(node.target))


def compute(
    node: fx.Node,
    batch: Any,
    model: nn.Module,
    modules: Mapping[str, Callable[..., Any]],
    values: Mapping[fx.Node, Any],
) -> Any:
    """The value of one of a plan's nodes.

    Args:
        node: comes after all that it needs.
        batch: what forward is going to be called with.
        model: the one that was traced.
        modules: what to call for each preprocessing module, by FQN.
        values: those of the nodes before.
    """
    if node.op == "placeholder":  # Forward is called with the batch alone; the others have defaults.
        return node.args[0] if node.prev.op == "placeholder" else batch
    if node.op == "get_attr":
        return tensor_of(model, node)
    args, kwargs = arguments(node, values)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function = modules[str(node.target)] if node.op == "call_module" else node.target
    return function(*args, **kwargs)  # type: ignore[operator]


def arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[list[Any], dict[str, Any]]:
    """What a node is called with, as the traced code would make it: containers anew each time."""
    return [_argument(a, values) for a in node.args], {k: _argument(v, values) for k, v in node.kwargs.items()}


def _argument(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, list):
        return [_argument(item, values) for item in argument]
    if isinstance(argument, dict):
        return {key: _argument(item, values) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_argument(end, values) for end in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple):
        return tuple(_argument(item, values) for item in argument)
    return argument


def _inputs(calls: Iterable[fx.Node]) -> set[fx.Node]:
    """All that calls need, directly or not."""
    found, waiting = set[fx.Node](), list(calls)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_module"


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))
