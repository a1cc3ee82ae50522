"""The ranks of a model: joining them, short texts that they share through the store, and starting together."""

import gc
import json
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, repeat
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import ShardedModule

from deltasync.base import errors
from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.base.events import error_text
from deltasync.base.words import counted

logger = logging.getLogger(__name__)

# A longer wait for other ranks is logged after this time, and then each minute.
_FIRST_SECONDS, _EACH_SECONDS = 10.0, 60.0
_MOST_NAMES = 8
# A rank that has started to wait reads within this time, unless it has ended.
_READ_SECONDS = 60


def choose_device(gpus: int, local_ranks: int, cuda_kernels: bool) -> tuple[str, str]:
    """The device to train on, "cuda" or "cpu", and the reason; the numbers are of this machine."""
    if gpus == 0:
        return "cpu", "there is no GPU"
    if not cuda_kernels:
        return "cpu", "fbgemm is installed without kernels for GPUs: `make install CUDA=1` installs them"
    if gpus < local_ranks:
        return "cpu", f"{local_ranks} ranks need a GPU each, but there are only {gpus}"
    return "cuda", f"{local_ranks} ranks have a GPU each"


def join_ranks() -> torch.device:
    """Join torchrun's process group; returns the device of this rank."""
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda_kernels = False
    for package in ("fbgemm-gpu", "fbgemm-gpu-nightly"):
        with suppress(PackageNotFoundError):
            cuda_kernels = bool(version(package))
    kind, reason = choose_device(torch.cuda.device_count(), local_ranks, cuda_kernels)
    logger.info("rank %s trains on %s: %s", os.environ["RANK"], kind, reason)
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def leave_ranks() -> None:
    """Leave the process group and end its threads. First drop the model and all other users of a group."""
    # A gloo thread that still frees memory of the last collective would abort a process that exits (torch 2.13).
    dist.destroy_process_group()
    gc.collect()  # Modules in reference cycles keep the group alive until they are collected.


def this_rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_ranks() -> list[int]:
    """The ranks of the process group; without one, rank 0."""
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def ranks_of(model: nn.Module) -> list[int]:
    """The ranks that share a model; only this rank if the model is not distributed."""
    group = group_of(model)
    return dist.get_process_group_ranks(group) if group else [this_rank()]


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of a model's DistributedDataParallel, or else of its sharded tables; None if it has neither."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group: dist.ProcessGroup = module.process_group
            return group
    environments = (
        getattr(module, "_env", None) for module in model.modules() if isinstance(module, ShardedModule)
    )
    return next((environment.process_group for environment in environments if environment), None)


def named(ranks: Sequence[int]) -> str:
    """Ranks as text: `rank 3`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 5 others`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some([*map(str, ranks)])}"


def some(names: Sequence[str]) -> str:
    """The first eight names, and the number of the others."""
    left = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {counted(left, 'other')}" if left > 0 else "")


def wait_aloud(arrived: Callable[[float], bool], what: Callable[[], str]) -> None:
    """Wait until `arrived(seconds)`, which waits itself, returns True. Warns that it waits for `what()`."""
    waited = 0.0
    for seconds in chain([_FIRST_SECONDS], repeat(_EACH_SECONDS)):
        if arrived(seconds):
            return
        waited += seconds
        logger.warning("rank %d has waited %.0f s for %s", this_rank(), waited, what())


# Number of stores by key. All ranks make stores in the same order, and so find each other's texts by number.
_MADE = Counter[str]()


class RankStore:
    """The latest text of each of some `ranks` (None = all), which make their stores in the same order."""

    def __init__(self, name: str, ranks: Sequence[int] | None = None) -> None:
        self._name, self.rank = name, this_rank()
        self.ranks = all_ranks() if ranks is None else list(ranks)
        self._text = ""
        self._store: Any = None
        if len(self.ranks) > 1:
            # After a restart by torchrun, the store still has the texts of the earlier processes.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            key = f"deltasync/{attempt}/{name}/{crc32(repr(self.ranks).encode())}"
            _MADE[key] += 1
            world: Any = dist.group.WORLD
            self._store = PrefixStore(f"{key}/{_MADE[key]}", world.get_group_store())

    def write(self, text: str) -> None:
        """Write this rank's text, in microseconds: a TCPStore does not answer. Does nothing without a store."""
        self._text = text
        if self._store:
            with suppress(RuntimeError):
                self._store.set(str(self.rank), text)

    def settle(self) -> None:
        """Wait up to a second until the store has this rank's text."""
        if self._store:
            with suppress(RuntimeError):
                self._store.wait([str(self.rank)], timedelta(seconds=1))

    def wait_for_all(self) -> None:
        """Wait until each rank has written a text, at most for the store's timeout."""
        if self._store is None:
            return
        store, keys, started = self._store, [*map(str, self.ranks)], time.monotonic()
        underlying = store
        while isinstance(underlying, PrefixStore):
            underlying = underlying.underlying_store
        longest: timedelta = underlying.timeout

        def missing() -> str:
            return named([rank for rank in self.ranks if not store.check([str(rank)])])

        def arrived(seconds: float) -> bool:
            with suppress(dist.DistStoreError):
                store.wait(keys, timedelta(seconds=seconds))
                return True
            if time.monotonic() - started > longest.total_seconds():
                raise DeltasyncError(f"{missing()} did not reach {self._name} within {longest}")
            return False

        wait_aloud(arrived, lambda: f"{missing()} to reach {self._name}, as all ranks must")

    def read(self) -> list[str]:
        """The texts in the order of `ranks`, once each has written one. A RuntimeError if the store is gone."""
        if self._store is None:
            return [self._text]
        return [text.decode() for text in self._store.multi_get([*map(str, self.ranks)])]

    def leave(self) -> None:
        """After `read`: wait until all ranks have read, because the process of one of them may host the store."""
        if self._store:
            with suppress(RuntimeError):  # The host has ended, which it did after all had read.
                self._store.set(f"{self.rank} has read", "")
                self._store.wait([f"{rank} has read" for rank in self.ranks], timedelta(seconds=_READ_SECONDS))


@contextmanager
def begun_together(
    what: str, options: Mapping[str, Any] | None = None, ranks: Sequence[int] | None = None
) -> Iterator[None]:
    """Raise the same error on all `ranks` (None = all) if one fails in the block or has other options.

    All ranks enter the block, and wait for each other at its end. The error names the ranks, and has the class of
    a rank's error if it is one of deltasync's.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # all ranks raise it below
        failure = error
    store = RankStore(what, ranks)
    if len(store.ranks) == 1:
        if failure:
            raise failure
        return
    shown = {name: _shown(value) for name, value in (options or {}).items()}
    reason = [type(failure).__name__, error_text(failure)] if failure else None
    store.write(json.dumps([shown, reason]))
    store.wait_for_all()
    states = [json.loads(text) for text in store.read()]
    if refusal := _error_of_all(what, store.ranks, states):
        store.leave()  # Now each rank may end.
        raise refusal from failure


def _error_of_all(what: str, ranks: Sequence[int], states: Sequence[Any]) -> DeltasyncError | None:
    """The error that all ranks raise, from the options and the failure of each; None if there is none."""
    names = {name: None for options, _ in states for name in options}
    values = {name: _by_value(ranks, [options.get(name, "missing") for options, _ in states]) for name in names}
    differing = "; ".join(
        f"{name} is " + ", ".join(f"{value} on {named(of)}" for value, of in by_value.items())
        for name, by_value in values.items()
        if len(by_value) > 1
    )
    if differing:
        return InvalidInput(f"{what}: {differing}; all ranks need the same")
    reasons = _by_value(ranks, [reason and tuple(reason) for _, reason in states])
    if not reasons:
        return None
    kind: Any = getattr(errors, next(iter(reasons))[0], None)
    ours = isinstance(kind, type) and issubclass(kind, DeltasyncError)
    text = "; ".join(f"{named(of)}: {text}" for (_, text), of in reasons.items())
    return kind(text) if ours else DeltasyncError(text)


def _by_value(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks by value, except those with None."""
    by_value = defaultdict[Any, list[int]](list)
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            by_value[value].append(rank)
    return by_value


def _shown(value: Any) -> str:
    """The value of an option as text; equal values give equal texts."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, AbstractSet | tuple):
        value = sorted(value) if isinstance(value, AbstractSet) else list(value)
    return str(value) if isinstance(value, Enum) else repr(value)
