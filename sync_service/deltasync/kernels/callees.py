"""What kernels call: made when the first of them is compiled."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

# The order in which floats are added may be any, so that sums vectorise.
ANY_ORDER = {"reassoc", "contract"}


class Callee:
    """A function that kernels call, or other such functions."""

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        self._make, self._function = make, function
        self._made: Any = None

    def made(self) -> Any:
        """The same, as numba takes it."""
        if self._made is None:
            self._made = self._make()
            if self._function:
                link(self._function)
        return self._made


def link(function: Callable[..., Any]) -> None:
    """Put what numba takes in the place of callees, among the names that a function knows."""
    names = function.__globals__
    for name, each in list(names.items()):
        if isinstance(each, Callee):
            names[name] = each.made()


def intrinsic(module: str, name: str) -> Any:
    """An intrinsic of numba's, or of ours, by its module and its name."""
    return Callee(lambda: getattr(import_module(module), name))


def external(name: str, signature: str) -> Any:
    """A function of the C library."""
    return Callee(lambda: _external(name, signature))


def _external(name: str, signature: str) -> Any:
    from numba.core import sigutils, types, typing

    arguments, returns = sigutils.normalize_signature(signature)
    return types.ExternalFunction(name, typing.signature(returns, *arguments))


def _compiled(function: Callable[..., Any], **options: Any) -> Callee:
    return Callee(lambda: _dispatcher(function, options), function)


def _dispatcher(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    import numba

    return numba.njit(**options)(function)


# Decorators of functions that are compiled as callees of kernels. What they make is of any type: numba finds out.
inlined: Any = partial(_compiled, inline="always", error_model="numpy")
# The same, but that floats are added in order, or in any, whatever the kernel's own order is. They take arrays and
# return numbers: the arrays' references, which a kernel holds, are not counted once more for each row.
in_order: Any = partial(_compiled, forceinline=True, error_model="numpy", _nrt=False)
in_any_order: Any = partial(in_order, fastmath=ANY_ORDER)
# For what is rare, and would be in the way of vectorising the rest.
called: Any = partial(_compiled, error_model="numpy", _nrt=False)
