"""Loops over rows that numba compiles on first use, and caches on disk.

Types are strings in numba's notation, so that importing kernels does not import numba.
"""

import logging
import os
import pkgutil
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar


class Type(str):
    """A type. Call it with the types of arguments for the signature of a function that returns it."""

    __slots__ = ()

    def __call__(self, *arguments: str) -> str:
        """Return a signature, such as `void(int64, int64)`."""
        return f"{self}({', '.join(arguments)})"


void = Type("void")
boolean = Type("boolean")
uint8, uint16, uint32, uint64 = Type("uint8"), Type("uint16"), Type("uint32"), Type("uint64")
int32, int64 = Type("int32"), Type("int64")
float32, float64 = Type("float32"), Type("float64")


def tuple_of(*types: Type) -> Type:
    """The type of a kernel's result that consists of several numbers."""
    return Type(f"Tuple(({', '.join(types)},))")


# Permits adding floats in any order, so that sums vectorise.
ANY_ORDER = {"reassoc", "contract"}


class Callee:
    """A function that kernels call, and that may call others of its kind."""

    def __init__(self, make: Callable[[], Any], function: Callable[..., Any] | None = None) -> None:
        self._make, self._function = make, function
        self._made: Any = None

    def made(self) -> Any:
        """The function in numba's form."""
        if self._made is None:
            self._made = self._make()
            if self._function:
                link(self._function)
        return self._made


def link(function: Callable[..., Any]) -> None:
    """Replace callees by numba's form among the names that a function uses."""
    names = function.__globals__
    for name, each in list(names.items()):
        if isinstance(each, Callee):
            names[name] = each.made()


def intrinsic(module: str, name: str) -> Any:
    """An intrinsic of numba or of this package, by module and name."""
    return Callee(lambda: getattr(import_module(module), name))


def _compiled(function: Callable[..., Any], **options: Any) -> Callee:
    return Callee(lambda: import_module("numba").njit(**options)(function), function)


# Decorators of functions that are compiled into kernels. Their types are Any, because numba infers them.
inlined: Any = partial(_compiled, inline="always", error_model="numpy")
# These add floats in order, or in any order, whatever the kernel's own setting. They take arrays and return
# numbers, so reference counting is switched off: the kernel holds the arrays anyway.
in_order: Any = partial(_compiled, forceinline=True, error_model="numpy", _nrt=False)
in_any_order: Any = partial(in_order, fastmath=ANY_ORDER)
# For rare cases that would prevent vectorising the rest.
called: Any = partial(_compiled, error_model="numpy", _nrt=False)


logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.rpartition(".")[0]
_kernels: list["Kernel[Any, Any]"] = []
_told = set[type[Exception]]()
_compiling = threading.RLock()  # Numba also has a single lock for all compiling.


def _stamp(folder: Path) -> str:
    sources = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return blake2b(sources, digest_size=4).hexdigest()


SOURCES = _stamp(Path(__file__).parent)


def readable(dtype: Type, dims: int = 2) -> Type:
    """The type of a C-contiguous array that is only read, and may be read-only.

    It may begin at any byte, like rows in a message.
    """
    return Type(f"Array({dtype}, {dims}, 'C', readonly=True, aligned=False)")


def writable(dtype: Type, dims: int = 2) -> Type:
    """The type of a C-contiguous array that is written."""
    return Type(f"Array({dtype}, {dims}, 'C')")


class Kernel(Generic[P, R]):
    """A compiled function, compiled at its first call at the latest."""

    def __init__(self, function: Callable[P, R], signatures: Sequence[Any], any_order: bool, nogil: bool) -> None:
        self.function = function
        function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._signatures = signatures
        self._options = {
            "nogil": nogil,
            "error_model": "numpy",
            "fastmath": set(ANY_ORDER) if any_order else False,
        }
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the compiled function."""
        return (self._compiled or self.compile())(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """Compile all signatures, or load them from disk."""
        with _compiling:
            if self._compiled is None:
                self._compiled = self._kept()
        return self._compiled

    def _kept(self) -> Callable[P, R]:
        try:
            return self._made(keep=True)
        except Exception as error:  # noqa: BLE001  # The folder is not writable, or has no room.
            _warn(self.__name__, error)
            return self._made(keep=False)

    def _made(self, *, keep: bool) -> Callable[P, R]:
        import numba

        dispatcher: Any = numba.njit(cache=keep, **self._options)(self.function)
        if keep:
            beside = Path(self.function.__code__.co_filename).parent / "__pycache__"
            _begin_with(beside, Path(dispatcher.stats.cache_path))
        link(self.function)
        for signature in self._signatures:
            dispatcher.compile(signature)
        # If several processes save at once, numba's index may name a file that now has another signature's code.
        if len(dispatcher.overloads) < len(self._signatures):
            raise LookupError(f"{dispatcher.stats.cache_path} has the code of another signature")
        dispatcher.disable_compile()
        made: Callable[P, R] = dispatcher
        return made


@cache
def _begin_with(beside: Path, folder: Path) -> None:
    """Copy the code that was compiled beside the source, as in an image, into numba's cache folder."""
    if folder == beside:
        return
    try:
        for file in beside.glob("*.nb[ic]"):
            # An existing file may be compiled for another processor than the image's.
            if not (target := folder / file.name).exists():
                made = folder / f"{file.name}.{os.getpid()}"
                shutil.copyfile(file, made)  # The umask determines who may read it, not the mode in the image.
                made.replace(target)  # Other processes may copy the same file, or already read it.
    except OSError as error:
        logger.warning("the compiled kernels in %s cannot be used and are compiled again: %s", beside, error)


def _warn(name: str, error: Exception) -> None:
    """Log each kind of error once, because it affects all kernels."""
    if type(error) not in _told:
        _told.add(type(error))
        text = "%s and other kernels are compiled again in each process, which takes seconds: %r; "
        logger.warning(text + "set NUMBA_CACHE_DIR to an empty, writable folder", name, error)


def kernel(
    *signatures: Any, any_order: bool = False, nogil: bool = True
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorator: compile a function for these signatures, such as `void(readable(int64, 1))`.

    With `any_order` the compiler chooses the order in which floats are added. With `nogil` the kernel
    releases the GIL. Taking it back may cost 5 ms for each running thread, so keep it where others wait for the
    caller.
    """

    def decorate(function: Callable[P, R]) -> Kernel[P, R]:
        made = Kernel(function, signatures, any_order, nogil)
        _kernels.append(made)
        return made

    return decorate


def imported_kernels() -> list[Kernel[Any, Any]]:
    """The kernels in the modules imported so far, compiled or not."""
    return list(_kernels)


def warm(*modules: ModuleType) -> None:
    """Compile the kernels of some modules, or of all if none is given, or load them from disk. The first time, all
    of them take half a minute on one core.
    """
    named = {module.__name__ for module in modules}
    if not named:
        for module in pkgutil.iter_modules(import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
            if not module.name.endswith("__"):
                import_module(module.name)
    for each in imported_kernels():
        if not named or each.function.__module__ in named:
            each.compile()


def keep_in(folder: Path) -> None:
    """Cache compiled kernels in a folder of this process if numba has none and the package's is not writable.

    Call it before the first call of a kernel.
    """
    import numba

    if not numba.config.CACHE_DIR and not os.access(Path(__file__).parent, os.W_OK):
        numba.config.CACHE_DIR = str(folder)
