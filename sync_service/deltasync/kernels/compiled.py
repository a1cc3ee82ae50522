"""Loops over rows that numba compiles on first use, and keeps compiled on disk."""

import importlib
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

from deltasync.kernels.types import Type

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


logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = __name__.rpartition(".")[0]
_kernels: list["Kernel[Any, Any]"] = []
_told = set[type[Exception]]()
_compiling = threading.RLock()  # As numba has one for all that it compiles.


def _stamp(folder: Path) -> str:
    sources = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    return blake2b(sources, digest_size=4).hexdigest()


SOURCES = _stamp(Path(__file__).parent)


def readable(dtype: Type, dims: int = 2) -> Type:
    """The type of a C-contiguous array that is only read, and may be read-only.

    It may begin at any byte, as rows in a message do.
    """
    return Type(f"Array({dtype}, {dims}, 'C', readonly=True, aligned=False)")


def writable(dtype: Type, dims: int = 2) -> Type:
    """The type of a C-contiguous array that is written."""
    return Type(f"Array({dtype}, {dims}, 'C')")


class Kernel(Generic[P, R]):
    """A compiled function. It compiles with its first call at the latest."""

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
        """Run it."""
        return (self._compiled or self.compile())(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """Compile all signatures, or read them from the disk."""
        with _compiling:
            if self._compiled is None:
                self._compiled = self._kept()
        return self._compiled

    def _kept(self) -> Callable[P, R]:
        try:
            return self._made(keep=True)
        except Exception as error:  # noqa: BLE001  # no folder to write to, no room in it
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
        # Where several processes save at once, numba's index may name a file that has become another signature's.
        if len(dispatcher.overloads) < len(self._signatures):
            raise LookupError(f"{dispatcher.stats.cache_path} has the code of another signature")
        dispatcher.disable_compile()
        made: Callable[P, R] = dispatcher
        return made


@cache
def _begin_with(beside: Path, folder: Path) -> None:
    """Copy what was compiled beside the source, as in an image, into the folder where numba keeps it."""
    if folder == beside:
        return
    try:
        for file in beside.glob("*.nb[ic]"):
            _copy_if_new(file, folder / file.name)
    except OSError as error:
        logger.warning("what is compiled in %s is compiled again: %s", beside, error)


def _warn(name: str, error: Exception) -> None:
    """Once for each kind of error: it will be the same for all kernels."""
    if type(error) not in _told:
        _told.add(type(error))
        text = "kernels, %s first, are compiled in each process anew, which takes seconds: %r; "
        logger.warning(text + "set NUMBA_CACHE_DIR to an empty folder that can be written to", name, error)


def kernel(
    *signatures: Any, any_order: bool = False, nogil: bool = True
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorator: compile a function for these signatures, such as `types.void(readable(types.int64, 1))`.

    With `any_order` the order in which floats are added is the compiler's. With `nogil` other Python threads run
    meanwhile, and it may have to wait for one of them afterwards, 5 ms each time: not where others wait for it.
    """

    def decorate(function: Callable[P, R]) -> Kernel[P, R]:
        made = Kernel(function, signatures, any_order, nogil)
        _kernels.append(made)
        return made

    return decorate


def imported_kernels() -> list[Kernel[Any, Any]]:
    """Those of the modules that this process has imported: all that it can call, compiled or not."""
    return list(_kernels)


def warm(*modules: ModuleType) -> None:
    """Compile every kernel of some modules, of all if none is named, or read it from the disk. The first time all
    of them take half a minute of a core.
    """
    named = {module.__name__ for module in modules}
    if not named:
        _import_all()
    for each in imported_kernels():
        if not named or each.function.__module__ in named:
            each.compile()


def _import_all() -> None:
    package = importlib.import_module(_PACKAGE)
    for module in pkgutil.iter_modules(package.__path__, f"{_PACKAGE}."):
        if not module.name.endswith("__"):
            importlib.import_module(module.name)


def keep_in(folder: Path) -> None:
    """Keep what is compiled in a folder of the process's own, if it cannot be kept where it is.

    It begins with what is there already: what was compiled when an image was built need not be compiled again.
    Before the first call of a kernel.
    """
    import numba

    named = numba.config.CACHE_DIR
    kept = Path(named) if named else Path(__file__).parent
    if os.access(kept, os.W_OK) or (named and not kept.exists()):
        return
    if named:
        try:
            for source in (kept, *kept.rglob("*")):
                _copy_if_new(source, folder / source.relative_to(kept))
        except OSError as error:
            logger.warning("what is compiled in %s is compiled again: %s", kept, error)
    numba.config.CACHE_DIR = str(folder)


def _copy_if_new(source: Path, target: Path) -> None:
    """Copy a file or make a folder, unless it is there: this process may have compiled it for another processor.

    The umask says who may read it, not the mode that it has in the image.
    """
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        partial = f"{target}.{os.getpid()}"
        shutil.copyfile(source, partial)
        os.replace(partial, target)  # Other processes copy the same, or read it already.
