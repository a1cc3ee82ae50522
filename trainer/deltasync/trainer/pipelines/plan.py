"""Plans which calls of a model's forward to make ahead of it, from a trace of the forward."""

import operator
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torchrec.distributed.model_parallel import ShardedModule
from torchrec.distributed.train_pipeline.tracing import Tracer

# Functions that read from a batch without changing it. Creating named tuples is allowed too.
_ACCESSES = (getattr, operator.getitem)


@dataclass(frozen=True)
class LookAheadPlan:
    """The calls to make ahead of forward."""

    # Nodes to compute ahead, in the order of forward: accesses to the batch, and preprocessing.
    nodes: list[fx.Node] = field(default_factory=list)
    # The only call of each sharded module, by FQN; its arguments are among `nodes`.
    lookups: dict[str, fx.Node] = field(default_factory=dict)
    preprocessing: dict[str, nn.Module] = field(default_factory=dict)  # Modules that `nodes` call, by FQN.
    # Why other sharded modules, and modules that compute their arguments, are not called ahead, by FQN.
    reasons: dict[str, str] = field(default_factory=dict)

    def without(self, node: fx.Node, error: str) -> dict[str, str]:
        """Why a node fails ahead, by FQN of the module that it calls, or of the lookups that need it."""
        if _is_call(node):
            return {str(node.target): f"it can't be called ahead: {error}"}
        needing = [name for name, lookup in self.lookups.items() if node in _inputs([lookup])]
        return dict.fromkeys(needing, f"its features can't be made ahead: {error}")


def make_plan(model: nn.Module, exclusions: Mapping[str, str]) -> LookAheadPlan:
    """Plan the calls ahead for a model in its current mode."""
    try:
        graph = trace(model)
    except Exception as error:  # noqa: BLE001  # The model's own code runs here, with stand-ins for its inputs.
        sharded = [name for name, module in model.named_modules() if isinstance(module, ShardedModule)]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _HERE))]
        place = f"{own[-1].filename}:{own[-1].lineno}" if own else "in torch"
        reason = f"the model's forward can't be traced: {place}: {type(error).__name__}: {error}"
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
        # Make all possible calls of these modules ahead, because each of several equal calls needs its own result.
        same = [node for node in self._graph.nodes if node.target in targets and not self._why_not(node)]
        needed |= {*same, *_inputs(same)}
        nodes = [node for node in self._graph.nodes if node in needed]
        called = {str(node.target): self._module(node) for node in nodes if node.op == "call_module"}
        why_not = {str(node.target): reason for node, reason in self._reasons.items() if reason and _is_call(node)}
        preprocessing = {name: self._exclusions.get(name, reason) for name, reason in why_not.items()}
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
    """Compute the value of a node of a plan."""
    if node.op == "placeholder":  # Only the batch is passed to forward; its other arguments have defaults.
        return node.args[0] if node.prev.op == "placeholder" else batch
    if node.op == "get_attr":
        return tensor_of(model, node)
    args, kwargs = arguments(node, values)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function = modules[str(node.target)] if node.op == "call_module" else node.target
    return function(*args, **kwargs)  # type: ignore[operator]


def arguments(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node, in new containers as the traced code would make them."""
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
    """All nodes that calls need, directly or not."""
    needed, waiting = set[fx.Node](), list(calls)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - needed
        needed |= new
        waiting += new
    return needed


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_module"


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, str) else getattr(target, "__name__", str(target))


# Torch's and TorchRec's code, and ours.
_TORCH, _HERE = str(Path(torch.__file__).parents[1] / "torch"), str(Path(__file__).parent)


def trace(model: nn.Module) -> fx.Graph:
    """Trace a model's forward in its current mode, without changing the model or random states."""
    # Trace compiled modules too, even if torch.compile is configured to refuse that.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), random_states_preserved(), _preserved(model):
        graph: fx.Graph = _Tracer().trace(model)
        for node in graph.nodes:
            if node.op == "get_attr":  # Tensors that forward creates only exist until the trace ends.
                node.meta["tensor"] = operator.attrgetter(node.target)(model)
        return graph


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Undo the changes that a traced forward makes to modules."""
    around = list(_around_sharded(model))
    attributes = [(where, dict(where)) for module in around for where in (vars(module), module._buffers)]
    values = [(buffer, buffer._version, buffer.clone()) for module in around for buffer in module.buffers(False)]
    try:
        yield
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
        for buffer, version, value in values:
            if buffer._version != version:
                buffer.copy_(value)


def _around_sharded(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its submodules, except scripted ones, and sharded ones, whose buffers may be very large."""
    if not isinstance(module, ShardedModule | torch.jit.ScriptModule):
        yield module
        for child in module.children():
            yield from _around_sharded(child)


class _Tracer(Tracer):  # type: ignore[misc]  # torchrec's types are not followed
    """Traces into modules that contain sharded ones or have TorchRec's mark for tracing; others are leaves."""

    def create_arg(self, argument: Any) -> Any:
        """Replace an argument that torch.fx does not support by an `OpaqueArgument`, instead of failing."""
        plain = type(argument) in (tuple, list, dict) or hasattr(argument, "_fields")
        if isinstance(argument, tuple | list | dict) and not plain:  # torch.fx would lose its type, as torch.Size.
            return OpaqueArgument(type(argument).__name__)
        try:
            return super().create_arg(argument)
        except Exception:  # noqa: BLE001  # The argument's own type may raise anything.
            return OpaqueArgument(type(argument).__name__)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        has_sharded = any(isinstance(one, ShardedModule) for one in module.modules())
        goes_in = has_sharded or getattr(module, "_is_pytorch_fx_traceable", False)
        return not goes_in or bool(super().is_leaf_module(module, name))


@dataclass(frozen=True)
class OpaqueArgument:
    """Replaces an argument in a trace whose type torch.fx does not support."""

    kind: str


def opaque_arguments(argument: Any) -> Iterator[OpaqueArgument]:
    """The opaque arguments inside the arguments of a node."""
    if isinstance(argument, OpaqueArgument):
        yield argument
    elif isinstance(argument, dict):
        yield from opaque_arguments([*argument, *argument.values()])
    elif isinstance(argument, slice):
        yield from opaque_arguments([argument.start, argument.stop, argument.step])
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from opaque_arguments(item)


def tensor_of(model: nn.Module, node: fx.Node) -> Any:
    """The current tensor of the model, or that of the trace if it only existed then."""
    try:
        return operator.attrgetter(str(node.target))(model)
    except AttributeError:
        return node.meta["tensor"]


def random_states() -> list[Any]:
    """The states of torch's, Python's and NumPy's generators, for comparison."""
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]
    return [*(state.tolist() for state in of_torch), random.getstate(), repr(np.random.get_state())]


@contextmanager
def random_states_preserved() -> Iterator[None]:
    """Restore the states of random generators at the end."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(_gpus()):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
