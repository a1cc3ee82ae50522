"""Agreements of ranks: on a cut, which all or none publish, and before other collectives."""

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.core.position import Position
from deltasync.trainer.distributed.rank_store import RankStore, some, wait_aloud


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
        late: the time of at least one rank is up.
        again: at least one rank has already made a part of this step.
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
    flags: list[bool], what: str | None, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[bool]:
    """Return the flags that are set on at least one rank of a group. A collective of its ranks.

    Args:
        flags: of this rank; all ranks have the same number of them.
        what: what ranks are about to do, for the log of a rank that waits long; None logs nothing.
        group: None is the default group. Without a process group there is one rank.
        device: where the group's backend takes tensors from; None is the CPU.
    """
    values = [int(flag) for flag in flags]
    if not values or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return flags
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
    if what and tensor.device.type == "cpu":
        _finish(work, lambda: f"the other ranks to come to {what}")
    else:  # On a device, an end of the wait would end the group.
        work.wait()
    return [bool(flag) for flag in tensor.tolist()]


def _finish(work: dist.Work, what: Callable[[], str]) -> None:
    """Wait for the end of a collective on the CPU (`wait_aloud`)."""

    def arrived(seconds: float) -> bool:
        with suppress(RuntimeError):  # It goes on, or it has failed.
            return work.wait(timedelta(seconds=seconds))
        return work.is_completed() and work.wait()

    wait_aloud(arrived, what)


@dataclass(frozen=True)
class _State:
    """How far a rank is.

    Attributes:
        rank: its number.
        collectives: how many it has begun.
        count: the number that it passed to `note` last.
        closed: whether it has closed its agreement.
    """

    rank: int
    collectives: int
    count: int
    closed: int


class Agreement:
    """Small collectives over a gloo group of its own, apart from GPUs and from groups of training.

    Without a process group there is one rank, and nothing is exchanged. In the thread that trains. A rank that
    waits logs the ranks it waits for, and how far these were when last seen.
    """

    def __init__(self, name: str, unit: str) -> None:
        """Wait until all ranks make theirs.

        Args:
            name: what agrees, in messages.
            unit: what `note` counts, in messages.
        """
        self._name, self._unit = name, unit
        self._states = RankStore(name)
        self.rank, self.world_size = self._states.rank, len(self._states.ranks)
        self.closed = False
        self._count = self._collectives = 0
        self._due = 0.0
        self._write_state()
        self._states.wait_for_all()
        self._ranks = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def close(self) -> None:
        """End the group and its threads: one that still drops what the last collective has used would abort a
        process that exits (torch 2.13). Each rank on its own; others that wait for this one fail at once.
        """
        ranks, self._ranks, self.closed = self._ranks, None, True
        self._write_state()
        self._states.settle()  # Others read it when their collective fails.
        if ranks and dist.is_initialized():
            with suppress(ValueError):  # Destroyed already, with the default group.
                dist.destroy_process_group(ranks)

    def note(self, count: int) -> None:
        """Note how far this rank is, for others that wait for it. Takes microseconds; where the store is slow, a
        thousandth of the time at most.
        """
        self._count = count
        if (started := time.perf_counter()) >= self._due:
            self._write_state()
            ended = time.perf_counter()
            self._due = ended + 1000 * (ended - started)

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
        *largest_flags, largest = self._largest([*map(int, flags), -deletes])
        busy, any_resync, any_unpublished, any_failed, *others = map(bool, largest_flags)
        return Consensus(not busy, any_resync, any_unpublished, any_failed, -largest, *others)

    def any_of(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. A collective: all ranks call it."""
        return bool(self._largest([int(flag)])[0])

    def lowest(self, position: Position) -> Position:
        """The lowest of the versions that ranks name, by its seal; none where one names none, or no seal. A
        collective: all ranks call it.
        """
        named = position.number if position.seal else 0
        every = self._every([named, int.from_bytes(position.seal.to_bytes(8), signed=True)])
        number, seal = min((number, seal) for number, seal in every)
        return Position("", number, int.from_bytes(seal.to_bytes(8, signed=True))) if number else Position()

    def differing(self, digests: Mapping[str, int]) -> list[str]:
        """The names whose digests (signed, 64 bits) differ between ranks. A collective: all ranks call it.

        All ranks have the same names; if they do not, the list is empty.
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
        group = self._group
        if self.world_size == 1 or not numbers:
            return [numbers] * self.world_size
        values = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(values) for _ in range(self.world_size)]
        self._run(lambda: dist.all_gather(every, values, group=group, async_op=True))
        return [each.tolist() for each in every]

    def new_run(self) -> tuple[str, int]:
        """The id of a new run and when it began (nanoseconds since 1970): the first rank's. A collective."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        group = self._group
        if self.world_size > 1:
            self._run(lambda: dist.broadcast(values, 0, group=group, async_op=True))
        return values[:2].numpy().tobytes().hex(), int(values[2])

    def _largest(self, values: list[int]) -> list[int]:
        """The largest that any rank has of each value. A collective."""
        tensor = torch.tensor(values, dtype=torch.int64)
        group = self._group
        if self.world_size > 1:
            self._run(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))
        largest: list[int] = tensor.tolist()
        return largest

    def _run(self, begin: Callable[[], dist.Work]) -> None:
        """Run a collective to its end.

        Raises:
            DeltasyncError: another rank has closed its own, and takes no part.
        """
        self._collectives += 1
        self._write_state()
        try:
            _finish(begin(), self._awaited)
        except RuntimeError as error:
            closed = [state for state in self._read_states() if state.closed]
            if not closed:
                raise
            raise DeltasyncError(
                f"{self._name}, at {self._unit} {self._count}, needs {self._listed(closed)}: all ranks have to "
                "close theirs together"
            ) from error

    def _awaited(self) -> str:
        states = self._read_states()
        late = [state for state in states if state.collectives < self._collectives]
        where = f"in {self._name}, at {self._unit} {self._count}: all ranks have to make the same calls"
        if not late:
            return f"the other ranks, which have {'come' if states else 'left no state to read'}, {where}"
        return f"{self._listed(late)}, {where}"

    def _listed(self, states: Sequence["_State"]) -> str:
        said = [
            f"rank {state.rank} ({'closed' if state.closed else 'last seen'} at {self._unit} {state.count})"
            for state in states
        ]
        return some(said)

    def _write_state(self) -> None:
        self._states.write(f"{self._collectives} {self._count} {self.closed:d}")

    def _read_states(self) -> list["_State"]:
        """The states of all ranks; none if they cannot be read."""
        try:
            texts = self._states.read()
        except RuntimeError:
            return []
        return [
            _State(rank, *map(int, text.split())) for rank, text in zip(self._states.ranks, texts, strict=True)
        ]
