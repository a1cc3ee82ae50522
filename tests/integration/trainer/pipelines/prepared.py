"""Models that make the ids of their lookups in forward, and modules to do so."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from tests.integration.trainer.pipelines.training import ROWS, WIDTH, batches
from tests.integration.trainer.torchrec_defects.models import DIM, bags
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

# Makes what each collection of a model is called with.
Prepare = Callable[[Any, Any], Sequence[Any]]


@dataclass
class Inner:
    amount: torch.Tensor


@dataclass
class Rich(Pipelineable):  # type: ignore[misc]  # torchrec's types are not followed
    """A batch of all that a batch may hold."""

    sparse: KeyedJaggedTensor
    dense: torch.Tensor
    label: torch.Tensor
    amount: torch.Tensor
    named: dict[str, torch.Tensor]
    listed: list[torch.Tensor]
    inner: Inner
    number: int
    extra: torch.Tensor | None = None

    @property
    def rebuilt(self) -> KeyedJaggedTensor:
        """The same ids, in other memory each time."""
        lengths = self.sparse.lengths()
        return KeyedJaggedTensor(self.sparse.keys(), self.sparse.values().clone(), lengths=lengths.clone())

    @property
    def wrapped(self) -> KeyedJaggedTensor:
        """The same ids, in another wrapper each time."""
        return KeyedJaggedTensor(self.sparse.keys(), self.sparse.values(), lengths=self.sparse.lengths())

    def to(self, device: torch.device, non_blocking: bool = False) -> "Rich":
        moved: Rich = _moved(self, device)
        return moved

    def record_stream(self, stream: torch.Stream) -> None:
        raise NotImplementedError("on a CPU there are no streams")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, Rich | Inner):
        return type(value)(*(_moved(getattr(value, f.name), device) for f in fields(value)))
    return value.to(device) if hasattr(value, "to") else value


def rich(count: int, *, extras: bool = True) -> Iterator[Rich]:
    """This rank's: each has amounts of its own, and every other one has an extra, if there are `extras`."""
    generator = torch.Generator().manual_seed(7)
    for number, batch in enumerate(batches(count)):
        amounts = torch.randint(1, ROWS, (6, 1), generator=generator)
        yield Rich(
            sparse=batch.sparse,
            dense=batch.dense,
            label=batch.label,
            amount=amounts[0],
            named={"one": amounts[1], "other": amounts[2]},
            listed=[amounts[3], amounts[4]],
            inner=Inner(amounts[5]),
            number=number,
            extra=amounts[0] + 1 if extras and number % 2 == 0 else None,
        )


# How often modules have been called. Those that kept this themselves would not be called ahead.
_CALLS = WeakKeyDictionary[nn.Module, int]()


class Counting(nn.Module):
    """Counts its calls."""

    def count(self) -> None:
        _CALLS[self] = self.calls + 1

    @property
    def calls(self) -> int:
        return _CALLS.get(self, 0)


class Shift(Counting):
    """Adds to all ids what the other arguments amount to."""

    def forward(self, features: KeyedJaggedTensor, *amounts: Any, **named: Any) -> KeyedJaggedTensor:
        self.count()
        return shifted(features, amount([*amounts, named]))


class Together(Counting):
    """Adds up the ids of several, each times its place."""

    def forward(self, several: Any) -> KeyedJaggedTensor:
        self.count()
        values = [one.values() * place for place, one in enumerate(several, start=1)]
        return with_values(several[0], torch.stack(values).sum(0) % ROWS)


class Does(Counting):
    """Does what a function does, unseen by a trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        self.count()
        return self._function(*args)


def does(function: Callable[..., Any]) -> dict[str, Callable[[], nn.Module]]:
    return {"does": lambda: Does(function), "shift": Shift}


def shifted(features: KeyedJaggedTensor, by: Any) -> KeyedJaggedTensor:
    return with_values(features, (features.values() + by) % ROWS)


def with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), values, lengths=features.lengths())


def amount(value: Any) -> int:
    """A number that stands for a value: others have other ones, mostly."""
    if isinstance(value, KeyedJaggedTensor):
        return int(value.values().sum())
    if isinstance(value, torch.Tensor):
        return int(value.sum())
    if isinstance(value, Mapping):
        return sum(amount(key) + amount(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(place * amount(item) for place, item in enumerate(value, start=1))
    return crc32(repr(value).encode()) % 1000


@dataclass
class Prepared:
    """How a model makes what its collections are called with, and the modules that it has for that."""

    prepare: Prepare
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    collections: Sequence[str] = ("bags",)
    buffers: Mapping[str, int] = field(default_factory=dict)

    def __call__(self) -> "PreparedModel":
        return PreparedModel(self)


class PreparedModel(nn.Module):
    """Predicts labels from dense values, and rows looked up by ids that are made in forward."""

    shift: Any
    does: Any
    bags: Any
    more: Any

    def __init__(self, spec: Prepared) -> None:
        super().__init__()
        for name, make in spec.modules.items():
            self.add_module(name, make())
        for name, value in spec.buffers.items():
            self.register_buffer(name, torch.tensor([value]))
        for name in spec.collections:
            self.add_module(name, bags("f", "g"))
        self._spec = spec
        self.over = nn.Linear(2 * DIM * len(spec.collections) + WIDTH, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        features = self._spec.prepare(self, batch)
        found = [
            getattr(self, name)(one).values() for name, one in zip(self._spec.collections, features, strict=True)
        ]
        predicted = self.over(torch.cat([*found, batch.dense], dim=1)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, batch.label)
        return loss, loss.detach()
