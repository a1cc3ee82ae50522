"""Tables in shared memory as torch tensors, so that a module serves from them without a copy.

with reader.reading() as now:
    logits = torch.func.functional_call(model, tensors_for(model, now), (batch,))
"""

import warnings

import torch
from torch import nn

from deltasync.base.errors import Contradiction, DeltasyncError
from deltasync.base.words import listed
from deltasync.client.shared.reader import SharedReading
from deltasync.client.targets.torch_binding import bind
from deltasync.client.targets.torch_tensors import CastTensor, Tensor, named_tensor, torch_type


def tensors(reading: SharedReading) -> dict[str, torch.Tensor]:
    """The tables of a version as tensors [rows, dim] over the shared memory, by table name.

    Valid in the block of `reading`. Writing to them ends the process, because the memory is read-only.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the arrays cannot be written.
        return {name: torch.from_numpy(rows) for name, rows in reading.tables.items()}


def tensors_for(module: nn.Module, reading: SharedReading) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, for `torch.func.functional_call`, over the shared memory.

    Tables that the module does not have are left out. The tensors are found once for the arrays of a side, and not
    again for each version. So do not change the module's types and shapes later.

    Args:
        module: a module with parameters and buffers of the types of the tables, on the CPU.
        reading: a version; the tensors are valid in its block.

    Returns:
        Tensors by the name of the parameter or buffer.

    Raises:
        Contradiction: the module has a table in another type or shape, quantised, or with managed collision: use a
            `TorchTarget` in this process, which keeps a copy.
    """
    if module not in reading.bindings:
        reading.bindings[module] = _tensors_for(module, reading)
    found: dict[str, torch.Tensor] = reading.bindings[module]
    return found


def _tensors_for(module: nn.Module, reading: SharedReading) -> dict[str, torch.Tensor]:
    specs = {each.name: each for each in reading.specs}
    binding, rows = bind(module, list(specs.values())), tensors(reading)
    found = dict[str, torch.Tensor]()
    problems: dict[str, DeltasyncError | str] = {
        name: error for name, error in binding.problems.items() if isinstance(error, Contradiction)
    }
    for name, place in binding.places.items():
        if not isinstance(place, Tensor) or isinstance(place, CastTensor):
            problems[name] = (
                f"table {name!r} has type {torch_type(specs[name])}, and the module needs a copy of it"
            )
            continue
        found[place.name] = rows[name].view(named_tensor(module, place.name).shape)
    if problems:
        raise Contradiction(f"the module cannot use the shared memory: {listed(map(str, problems.values()), 3)}")
    return found
