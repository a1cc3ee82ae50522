"""Agreements of ranks: before a cut, of which all or none publish a part, and before other collectives."""

import hashlib
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deltasync.core.errors import InvalidInput
from deltasync.core.position import Position


@dataclass(frozen=True)
class Consensus:
    """The state of all ranks together.

    Attributes:
        ready: no rank has a cut that is not sealed.
        resync: at least one rank must publish every row.
        unpublished: at least one rank has something to publish.
        failed: at least one rank cannot go on.
        deletes: up to this number, every rank has the requests to delete rows that were not met yet; 0 for none.
        refused: the part of at least one rank was refused, since the service does not hold what it builds on.
        late: at least one rank waits no longer.
        again: at least one rank has made a part of this step already.
    """

    ready: bool
    resync: bool
    unpublished: bool
    failed: bool
    deletes: int
    refused: bool = False
    late: bool = False
    again: bool = False


def on_any_rank(
    flags: list[bool], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[bool]:
    """Which of the flags are set on at least one rank of a group. A collective: all of its ranks call it.

    Args:
        flags: of this rank; all ranks have the same number of them.
        group: None is the default group. Without a process group there is one rank.
        device: where the group's backend takes tensors from; None is the CPU.
    """
    return [bool(flag) for flag in _largest([int(flag) for flag in flags], group, device)]


def _largest(values: list[int], group: dist.ProcessGroup | None, device: torch.device | None = None) -> list[int]:
    """The largest that any rank of a group has of each value. A collective."""
    if not values or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    largest: list[int] = tensor.tolist()
    return largest


class Agreement:
    """Small collectives, over a gloo group of its own: it uses no GPU, and no group that training uses.

    Without a process group there is one rank, and nothing is exchanged. In the thread that trains.
    """

    def __init__(self) -> None:
        self._ranks = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._ranks else 0
        self.world_size = dist.get_world_size() if self._ranks else 1
        self.closed = False

    def close(self) -> None:
        """End the group and its threads: one that still drops what the last collective has used would abort a
        process that exits (torch 2.13). Each rank on its own; others that wait for this one fail at once.
        """
        ranks, self._ranks, self.closed = self._ranks, None, True
        if ranks and dist.is_initialized():
            with suppress(ValueError):  # Destroyed already, with the default group.
                dist.destroy_process_group(ranks)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self.closed:
            raise InvalidInput("this DeltaSync is closed, and publishes nothing more: make another one")
        return self._ranks

    def reach(
        self,
        *,
        ready: bool,
        resync: bool,
        unpublished: bool,
        failed: bool,
        deletes: int = 0,
        refused: bool = False,
        late: bool = False,
        again: bool = False,
    ) -> Consensus:
        """The state of all ranks together, from this rank's. A collective: all ranks call it."""
        flags = [not ready, resync, unpublished, failed, refused, late, again]
        *found, largest = _largest([*map(int, flags), -deletes], self._group)
        busy, any_resync, any_unpublished, any_failed, *others = map(bool, found)
        return Consensus(not busy, any_resync, any_unpublished, any_failed, -largest, *others)

    def any_of(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. A collective: all ranks call it."""
        return on_any_rank([flag], self._group)[0]

    def lowest(self, position: Position) -> Position:
        """The lowest of the versions that ranks name, by its seal; none where one names none, or no seal. A
        collective: all ranks call it.
        """
        named = position.number if position.seal else 0
        every = self._every([named, int.from_bytes(position.seal.to_bytes(8), signed=True)])
        number, seal = min((number, seal) for number, seal in every)
        return Position("", number, int.from_bytes(seal.to_bytes(8, signed=True))) if number else Position()

    def differing(self, digests: Mapping[str, int]) -> list[str]:
        """The names of which ranks have different digests (signed, 64 bits). A collective: all ranks call it.

        All have the same names; where they do not, none is told.
        """
        names = hashlib.blake2b("\n".join(digests).encode(), digest_size=8).digest()
        if self._differ([int.from_bytes(names, signed=True)]) == [True]:
            return []
        differ = self._differ(list(digests.values()))
        return [name for name, differs in zip(digests, differ, strict=True) if differs]

    def _differ(self, numbers: list[int]) -> list[bool]:
        every = torch.tensor(self._every(numbers))
        return [bool(differs) for differs in (every != every[0]).any(dim=0).tolist()]

    def _every(self, numbers: list[int]) -> list[list[int]]:
        """The numbers (signed, 64 bits) of each rank, which has as many as the others. A collective."""
        if not self._group or not numbers:
            return [numbers] * self.world_size
        values = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(found, values, group=self._group)
        return [each.tolist() for each in found]

    def new_run(self) -> tuple[str, int]:
        """The id of a new run and when it began (nanoseconds since 1970): the first rank's. A collective."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        if self._group:
            dist.broadcast(values, 0, group=self._group)
        return values[:2].numpy().tobytes().hex(), int(values[2])
