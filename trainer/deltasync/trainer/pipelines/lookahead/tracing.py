"""Tracing a model's forward, and leaving the model as it was."""

import operator
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torchrec.distributed.model_parallel import ShardedModule
from torchrec.distributed.train_pipeline.tracing import Tracer

# Torch's and TorchRec's code, and ours.
_TORCH, _HERE = str(Path(torch.__file__).parents[1] / "torch"), str(Path(__file__).parent)


def trace(model: nn.Module) -> fx.Graph:
    """The graph of a model's forward, in the mode it is in; the model and random numbers are as they were."""
    # Compiled modules are traced too, whatever they are set to say to that.
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), random_states_preserved(), _preserved(model):
        graph: fx.Graph = _Tracer().trace(model)
        for node in graph.nodes:
            if node.op == "get_attr":  # Tensors that forward makes are there only while it is traced.
                node.meta["tensor"] = operator.attrgetter(node.target)(model)
        return graph


@contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Undo what forward does to modules: it does so when it is traced, too."""
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
    """A module and those within, but for compiled ones, and for sharded ones: their buffers may be very large."""
    if not isinstance(module, ShardedModule | torch.jit.ScriptModule):
        yield module
        for child in module.children():
            yield from _around_sharded(child)


class _Tracer(Tracer):  # type: ignore[misc]  # torchrec's types are not followed
    """Goes into those modules only that have sharded ones within, or are marked as TorchRec's tracer wants it."""

    def create_arg(self, argument: Any) -> Any:
        """One argument that cannot be held is no reason to trace nothing."""
        if _loses_its_type(argument):
            return OpaqueArgument(type(argument).__name__)
        try:
            return super().create_arg(argument)
        except Exception:  # noqa: BLE001  # Types can refuse to be held, each in its way.
            return OpaqueArgument(type(argument).__name__)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        goes_in = _has_sharded(module) or getattr(module, "_is_pytorch_fx_traceable", False)
        return not goes_in or bool(super().is_leaf_module(module, name))


def _loses_its_type(argument: Any) -> bool:
    """Whether torch.fx makes a plain container of this one: torch.Size becomes a tuple, OrderedDict a dict."""
    plain = type(argument) in (tuple, list, dict) or hasattr(argument, "_fields")
    return isinstance(argument, tuple | list | dict) and not plain


def _has_sharded(module: nn.Module) -> bool:
    return any(isinstance(one, ShardedModule) for one in module.modules())


@dataclass(frozen=True)
class OpaqueArgument:
    """Stands in a trace for an argument of this type, which torch.fx cannot hold."""

    kind: str


def opaque_arguments(argument: Any) -> Iterator[OpaqueArgument]:
    """All that stand within the arguments of a node."""
    if isinstance(argument, OpaqueArgument):
        yield argument
    elif isinstance(argument, dict):
        yield from opaque_arguments([*argument, *argument.values()])
    elif isinstance(argument, slice):
        yield from opaque_arguments([argument.start, argument.stop, argument.step])
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from opaque_arguments(item)


def place_of(error: Exception) -> str:
    """Where the model's own code raised an error, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _HERE))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "in torch"


def tensor_of(model: nn.Module, node: fx.Node) -> Any:
    """A tensor of the model as it is now; one that was there only while it was traced, as it was."""
    try:
        return operator.attrgetter(str(node.target))(model)
    except AttributeError:
        return node.meta["tensor"]


def random_states() -> list[Any]:
    """The states of torch's, Python's and NumPy's generators, to be compared."""
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]
    return [*(state.tolist() for state in of_torch), random.getstate(), repr(np.random.get_state())]


@contextmanager
def random_states_preserved() -> Iterator[None]:
    """Draw after this as if nothing had been drawn within."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(_gpus()):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
