"""A module compiled by torch.export and AOTInductor, whose constants can follow a trainer."""

import copy
import json
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any, Self
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import nn
from torch._C._aoti import AOTIModelContainerRunnerCpu
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from deltasync.base.arguments import check_type
from deltasync.base.errors import Contradiction, InvalidInput, NotFound

__all__ = ["CompiledModule"]

_CODE_CONSTANT = "_tensor_constant"  # torch.export's name for a tensor in the code.
# Attributes of a `CompiledModule` that `_load` sets.
_LOADED = (
    *("_library", "_runner", "_inputs", "_outputs", "_served", "_spare", "_staged"),
    *("_modules", "_buffers", "_parameters", "_non_persistent_buffers_set"),
)
_KEEP = 'inductor_configs={"always_keep_tensor_constants": True}'


class CompiledModule(nn.Module):
    """Runs a package from `torch._inductor.aoti_compile_and_package` in place of the original module.

    The original parameters and buffers are its buffers, with the same names, so a `TorchTarget` can update them.
    Each exists twice: a target writes a release into one set while the other is served, and then swaps the sets.
    Checksums read the memory that forwards read.

    Compile with `inductor_configs={"always_keep_tensor_constants": True}`. Otherwise the compiler writes small
    constants, such as biases of one element, into the code. Packages with folded constants, or with constants
    outside of the compiled library, are refused. A parameter with several names keeps one of them.

    Call it with the same arguments as for the export; AOTInductor does not check shapes and types. `copy.deepcopy`
    loads the package again. `to()`, `half()` and similar methods raise an error if they would change anything.
    """

    _library: "_Library"
    _runner: AOTIModelContainerRunnerCpu
    _served: dict[str, torch.Tensor]
    _spare: dict[str, torch.Tensor]
    _staged = False

    def __init__(self, package: str | PathLike[str], *, name: str = "model") -> None:
        """Load a package.

        Args:
            package: path of the `.pt2` file, which you may delete afterwards.
            name: name of the model in the package.

        Raises:
            TypeError: `package` is not a path.
            NotFound: there is no such file, or no such model in it.
            InvalidInput: the file is not a package, is not compiled for a CPU, or has no writable constants.
        """
        check_type("CompiledModule(package)", "package", package, str, PathLike, remedy="the path of a .pt2 file")
        super().__init__()
        self._load(_Library(fspath(package), name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model."""
        inputs = pytree.tree_leaves((args, reorder_kwargs(kwargs, self._inputs)))
        outputs = self._runner.run([each for each in inputs if isinstance(each, torch.Tensor)])
        return pytree.tree_unflatten(outputs, self._outputs)

    def served(self, name: str) -> torch.Tensor:
        """The constant `name` that forwards read, even if the module's attribute was replaced."""
        return self._served[name]

    def spare(self, name: str) -> torch.Tensor:
        """The spare copy of a constant, for a release to write to; the first call copies all served constants."""
        if not self._staged:
            # Copy everything, not only the last changes: served constants may have been loaded or damaged.
            with torch.inference_mode():
                for each, spare in self._spare.items():
                    spare.copy_(self._served[each])
            self._staged = True
        return self._spare[name]

    def discard(self) -> None:
        """Discard changes in spare constants after a failed release."""
        self._staged = False

    def swap(self) -> None:
        """Serve the spare constants, while there are no readers. Further calls for a release do nothing."""
        if self._staged:
            self._runner.swap_constant_buffer()
            self._served, self._spare = self._spare, self._served
            self._register()
            self._staged = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        nn.Module.__init__(copied)
        others = {name: each for name, each in vars(self).items() if name not in _LOADED}  # Such as hooks.
        vars(copied).update(copy.deepcopy(others, memo))
        copied._load(self._library)
        with torch.inference_mode():
            for name, tensor in copied._served.items():
                tensor.copy_(self._served[name])
        return copied.train(self.training)

    def _load(self, library: "_Library") -> None:
        self._library = library
        # One instance is enough: torch 2.13 keeps the GIL during a run, so forwards do not overlap.
        self._runner = AOTIModelContainerRunnerCpu(library.path, 1)
        self._inputs, self._outputs = map(pytree.treespec_loads, self._runner.get_call_spec())
        library.check(self._runner)
        # Use the runner, because torch's package loader cannot swap constants.
        keys = {name: key for key, name in self._runner.get_constant_names_to_original_fqns().items()}
        constants = self._runner.extract_constants_map(False)
        self._runner.update_constant_buffer({keys[name]: each for name, each in constants.items()}, True, True)
        self._served, self._spare = (
            {
                name: _kept(each, self._runner)
                for name, each in self._runner.extract_constants_map(inactive).items()
            }
            for inactive in (False, True)
        )
        self._register()

    def _register(self) -> None:
        for name, tensor in self._served.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for each in path:
                if each not in owner._modules:
                    owner.add_module(each, nn.Module())
                owner = owner.get_submodule(each)
            # A constant of the code is not part of the state, so no table needs to update it.
            owner.register_buffer(leaf, tensor, persistent=not name.startswith(_CODE_CONSTANT))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        for name, each in self._served.items():
            empty = torch.empty(0, dtype=each.dtype)
            changed = fn(empty)
            if (changed.dtype, changed.device) != (empty.dtype, empty.device):
                raise Contradiction(
                    f"{name} was compiled as {each.dtype} on the CPU, and cannot become {changed.dtype} on "
                    f"{changed.device}: convert the other modules separately, or compile the model again"
                )
        return self


def compiled_modules(module: nn.Module) -> list[CompiledModule]:
    """The compiled modules in a module."""
    return [each for each in module.modules() if isinstance(each, CompiledModule)]


def compiled_module_of(module: nn.Module, name: str) -> tuple[CompiledModule, str] | None:
    """The compiled module with the tensor `name` of a module, and its name there; None if it is not compiled."""
    owner, rest = module, name
    while rest and not isinstance(owner, CompiledModule):
        first, _, rest = rest.partition(".")
        owner = getattr(owner, first)
    return (owner, rest) if isinstance(owner, CompiledModule) and rest in owner._served else None


def absence(module: nn.Module, table: str) -> str:
    """Why a module has no tensor for a table."""
    for name, each in module.named_modules():
        inside = f".{table}".partition(f".{name}." if name else ".")[2]
        if inside and isinstance(each, CompiledModule):
            return (
                f"the compiled module {name or '(the target)'} has no constant {inside}: either it is part of the "
                f"code (then compile with {_KEEP} and without freezing), or it has another of its names, or the "
                "compiled code does not read it, like num_batches_tracked (then leave it out)"
            )
        if inside and isinstance(each, torch.jit.ScriptModule) and not [*each.parameters(), *each.buffers()]:
            return (
                f"the TorchScript module {name or '(the target)'} has no parameters, because torch.jit.freeze and "
                "optimize_for_inference write them into the code: use the module from torch.jit.script or trace"
            )
    return "the module has no parameter or buffer of that name"


def check_not_frozen(module: nn.Module) -> None:
    """Raise Contradiction if inductor writes values of a module into code, as far as torch shows it."""
    inductor = sys.modules.get("torch._inductor.config")
    if inductor and inductor.freezing:
        raise Contradiction(f"torch._inductor.config.freezing is on{_FREEZING}")
    for name, each in module.named_modules():
        # Of `torch.compile(module)`, and of `module.compile()`.
        context, function = vars(each).get("dynamo_ctx"), vars(each).get("_compiled_call_impl")
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if any(_options(code).get("freezing") for code in (getattr(context, "callback", None), *cells)):
            raise Contradiction(f"module {name or '(the target)'} is compiled with the option freezing{_FREEZING}")


_FREEZING = (
    ": the compiler writes values into the code, where no release reaches them, so predictions would keep old "
    "weights: compile without freezing"
)


def _options(code: object) -> Mapping[str, Any]:
    """The options of inductor in a compiled callable of torch; none if it uses another backend."""
    while (inner := getattr(code, "_torchdynamo_orig_backend", None)) is not None:
        code = inner
    options = getattr(code, "config", None)
    return options if isinstance(options, Mapping) else {}


class _Library:
    """The shared library of a model in a package, in a temporary folder that exists as long as this object."""

    def __init__(self, package: str, name: str) -> None:
        self._of = f"model {name!r} of {package}"
        self._folder = tempfile.mkdtemp(prefix="deltasync-")
        weakref.finalize(self, _remove, self._folder, os.getpid())
        try:
            files = [Path(self._folder, each) for each in self._unpack(package, name)]
        except FileNotFoundError:
            raise NotFound(f"{self._of}: there is no such file") from None
        except BadZipFile as error:
            raise InvalidInput(f"{self._of}: the file is not a package ({error})") from None
        libraries = [str(each) for each in files if each.suffix == ".so"]
        if len(libraries) != 1:
            raise NotFound(f"{self._of}: the package has {len(libraries)} libraries of that name, expected one")
        self.path = libraries[0]
        metadata = [json.loads(each.read_text()) for each in files if each.name.endswith(".wrapper_metadata.json")]
        if others := {each.get("AOTI_DEVICE_KEY", "cpu") for each in metadata} - {"cpu"}:
            raise InvalidInput(f"{self._of}: compiled for {', '.join(others)}; only CPU packages are supported")

    def check(self, runner: AOTIModelContainerRunnerCpu) -> None:
        """Raise InvalidInput if there are no constants, or derived ones, which would go out of date."""
        constants = runner.extract_constants_map(False)
        if not constants:
            raise InvalidInput(
                f"{self._of}: it has no constants; compile with aot_inductor.package_constants_in_so"
            )
        derived = {name for name, each in constants.items() if each.layout is not torch.strided}
        derived |= set(runner.get_constant_names_to_original_fqns().values()) - constants.keys()
        if derived:
            raise InvalidInput(
                f"{self._of}: {', '.join(sorted(derived))} are derived from other constants and would go out of "
                "date: compile without freezing and aot_inductor.use_runtime_constant_folding"
            )

    def _unpack(self, package: str, name: str) -> Iterator[str]:
        with ZipFile(package) as archive:
            for each in archive.namelist():
                path = PurePosixPath(each)
                if path.parts[1:-1] == ("data", "aotinductor", name):
                    Path(self._folder, path.name).write_bytes(archive.read(each))
                    yield path.name


def _remove(folder: str, owner: int) -> None:
    # A forked process must not remove the folder, because its parent still uses it.
    if os.getpid() == owner:
        shutil.rmtree(folder)


class _Memory:
    """Memory of a runner, which stays alive as long as there is a view of it."""

    def __init__(self, tensor: torch.Tensor, runner: AOTIModelContainerRunnerCpu) -> None:
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        self.__array_interface__ = flat.numpy().__array_interface__
        self._runner = runner


def _kept(tensor: torch.Tensor, runner: AOTIModelContainerRunnerCpu) -> torch.Tensor:
    """A constant of a runner as a tensor that keeps the runner alive."""
    flat = torch.from_numpy(np.asarray(_Memory(tensor, runner)))
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
