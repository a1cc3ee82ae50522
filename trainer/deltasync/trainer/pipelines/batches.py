"""Batches on their way from the data to the device."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import torch
from tensordict import TensorDictBase, is_tensor_collection, is_tensorclass
from torch.nested._internal.nested_tensor import NestedTensor
from torchrec.distributed.train_pipeline.utils import _to_device
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Multistreamable, Pipelineable

from deltasync.base.errors import InvalidInput
from deltasync.trainer.distributed.agreement import Agreement

Batch = TypeVar("Batch")


class LockstepBatches(Iterator[Batch], Generic[Batch]):
    """This rank's batches, for as long as every rank has one.

    A rank that continued alone would wait forever in its next collective. When one rank has no batch, this
    iterator ends on all ranks. Batches that other ranks had already loaded come first when iteration continues.
    Costs one small collective per batch, over a separate gloo group.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Wrap an iterable. All ranks construct this and call `next` together.

        After the iterable has ended, each `next` asks it again.
        """
        self._batches = iter(batches)
        self._next: Batch | None = None
        self._agreement = Agreement("LockstepBatches", "batch")
        self._count = 0

    def __next__(self) -> Batch:
        if self._next is None:
            self._next = next(self._batches, None)
        self._count += 1
        self._agreement.note(self._count)
        missing = self._agreement.any_of(self._next is None)
        if self._next is None or missing:
            raise StopIteration
        batch, self._next = self._next, None
        return batch


# The keys, indices and attribute names that lead to a tensor inside a value.
Path = tuple[Any, ...]
_PLAIN = frozenset({int, float, bool, str, type(None)})
# The parts of a jagged tensor, from which it computes its other attributes.
_OF_JAGGED = ("_values", "_weights", "_lengths", "_offsets", "_stride_per_key_per_rank", "_inverse_indices")


@dataclasses.dataclass
class FieldsBatch(Pipelineable):  # type: ignore[misc]  # torchrec's types are not followed
    """Base class of batches for TorchRec's pipelines: a dataclass of tensors."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until `stream` has finished its current work."""
        for each in dataclasses.fields(self):
            getattr(self, each.name).record_stream(stream)

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, for asynchronous copies to an accelerator."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, function: Callable[[Any], Any]) -> Self:
        return type(self)(**{each.name: function(getattr(self, each.name)) for each in dataclasses.fields(self)})


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to the device, on the current stream, without waiting."""
    if is_tensorclass(batch):
        return type(batch).from_tensordict(to_device(batch.to_tensordict(), device))
    if not isinstance(batch, TensorDictBase):
        if not isinstance(batch, torch.Tensor | Pipelineable):
            raise InvalidInput(
                f"a batch is a {type(batch).__name__}, expected a TensorDict, a tensor, or a class that inherits "
                f"from torchrec.streamable.Pipelineable"
            )
        return _to_device(batch, device, non_blocking=True)
    if all(tensor.device == device for _, tensor in tensors_in(batch)):
        return batch.copy()  # `to` would go through Python for each nested tensor.
    copied = batch.to(device, non_blocking=True).copy()  # A copy has the same tensors, and is not locked.
    for key in list(copied.keys()):
        value = copied[key]
        if isinstance(value, Pipelineable) or is_tensor_collection(value):  # `to` leaves these where they are.
            copied[key] = to_device(value, device)
    return copied


def hand_over(value: Any, stream: torch.Stream | None) -> None:
    """Make the current stream wait for another stream, and keep the value's memory for the current stream."""
    if stream is None:
        return
    current = torch.get_device_module(stream.device).current_stream()
    current.wait_stream(stream)
    record_stream(value, current)


def record_stream(value: Any, stream: torch.Stream) -> None:
    """Keep the memory of a value that is freed later until `stream` has finished its work up to that point."""
    if isinstance(value, Multistreamable):
        value.record_stream(stream)
        return
    for _, tensor in tensors_in(value):
        if tensor.device.type == stream.device.type:
            tensor.record_stream(stream)


def tensors_in(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """The tensors inside a batch, a container or a dataclass, each with its path."""
    return [(path, leaf) for path, leaf in leaves_in(value) if isinstance(leaf, torch.Tensor)]


def leaves_in(value: Any) -> list[tuple[Path, Any]]:
    """Like `tensors_in`, but also with numbers, strings and None."""
    leaves: list[tuple[Path, Any]] = []
    _collect(value, (), leaves)
    return leaves


def _collect(value: Any, path: Path, leaves: list[tuple[Path, Any]]) -> None:
    # Nested tensors are slow: all but their attributes goes through Python.
    if type(value) in _PLAIN or (isinstance(value, torch.Tensor) and not isinstance(value, NestedTensor)):
        leaves.append((path, value))
        return
    for name, part in _parts(value):
        _collect(part, (*path, name), leaves)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, NestedTensor):  # Its own version does not count writes to its values.
        return [(name, getattr(value, name)) for name in ("_values", "_offsets", "_lengths")]
    if isinstance(value, JaggedTensor | KeyedJaggedTensor):  # It computes its other attributes on demand.
        return [(name, part) for name in _OF_JAGGED if (part := vars(value).get(name)) is not None]
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return [(key, value[key]) for key in value.keys()]  # noqa: SIM118  # A TensorDict iterates over examples.
    if isinstance(value, Multistreamable) or dataclasses.is_dataclass(value):
        return vars(value).items()
    return ()
