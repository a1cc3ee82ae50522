"""Modules that wrap others, and put a part of their own into the names of what is inside."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Where the wrappers of activation checkpointing, FSDP, torch.compile and TorchRec keep what they wrap.
_INSIDE = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_dmp_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all that wraps it."""
    while name := _name_inside(module):
        module = getattr(module, name)
    return module


def plain_name(module: nn.Module, name: str) -> str:
    """The name of a parameter or buffer of a module without the parts that wrappers add."""
    plain, each = list[str](), module
    for part in name.split("."):
        inner = getattr(each, part, None)
        if not isinstance(inner, nn.Module) or part != _name_inside(each):
            plain.append(part)
        each = inner if isinstance(inner, nn.Module) else _NOTHING
    return ".".join(plain)


_NOTHING = nn.Module()


def _name_inside(module: nn.Module) -> str:
    """The attribute in which a wrapper has what it wraps; empty where a module is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return next((name for name in _INSIDE if name in module._modules), "")
