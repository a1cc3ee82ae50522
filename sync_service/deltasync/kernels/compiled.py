"""How loops over rows are compiled: before there is work for them, and once for all processes of a machine.

    @kernel(signature(u8[:1], ...))

What is compiled is kept on disk: beside this source, or where that is read-only in the user's cache folder, or in
`NUMBA_CACHE_DIR`. A signature that was not asked for is an error, not a compilation in the middle of a cut.
"""

import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import numba
from numba import types

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# The order in which floats are added may be any, so that sums vectorise.
ANY_ORDER = {"reassoc", "contract"}

_PACKAGE = __name__.rpartition(".")[0]
_kernels: list["Kernel[Any, Any]"] = []


def readable(dtype: types.Type, dims: int = 2) -> types.Array:
    """The type of a C-contiguous array that is only read, and may be read-only."""
    return types.Array(dtype, dims, "C", readonly=True)


def writable(dtype: types.Type, dims: int = 2) -> types.Array:
    """The type of a C-contiguous array that is written."""
    return types.Array(dtype, dims, "C")


class Kernel(Generic[P, R]):
    """A compiled function. It lets other Python threads run, and compiles with its first call at the latest."""

    def __init__(self, function: Callable[P, R], signatures: Sequence[Any], any_order: bool) -> None:
        self.function = function
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._signatures = signatures
        self._options = {"nogil": True, "error_model": "numpy", "fastmath": ANY_ORDER if any_order else False}
        self._compiled: Callable[P, R] | None = None
        self._compiling = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it."""
        return (self._compiled or self.compile())(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """Compile all signatures, or read them from the disk."""
        with self._compiling:
            if self._compiled is None:
                dispatcher = self._dispatcher()
                for signature in self._signatures:
                    dispatcher.compile(signature)
                dispatcher.disable_compile()
                self._compiled = dispatcher
        return self._compiled

    def _dispatcher(self) -> Any:
        try:
            return numba.njit(cache=True, **self._options)(self.function)
        except RuntimeError as error:  # There is no folder that it could write to.
            logger.warning("%s is compiled in each process anew: %s; set NUMBA_CACHE_DIR", self.__name__, error)
            return numba.njit(**self._options)(self.function)


def kernel(*signatures: Any, any_order: bool = False) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorator: compile a function for these signatures, such as `types.void(readable(types.int64, 1))`.

    With `any_order` the order in which floats are added is the compiler's.
    """

    def decorate(function: Callable[P, R]) -> Kernel[P, R]:
        made = Kernel(function, signatures, any_order)
        _kernels.append(made)
        return made

    return decorate


# For what kernels call: compiled as a part of them.
inlined = numba.njit(inline="always", error_model="numpy")


def warm() -> int:
    """Compile every kernel there is, or read it from the disk; returns how many there are. The first time it takes
    seconds.
    """
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{_PACKAGE}."):
        importlib.import_module(module.name)
    for each in _kernels:
        each.compile()
    return len(_kernels)
