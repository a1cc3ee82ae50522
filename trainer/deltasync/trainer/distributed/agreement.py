"""Agreement between ranks: all of them or none publish a cut, or start another collective."""

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.core.position import Position
from deltasync.trainer.distributed.rank_store import RankStore, named, some, wait_aloud

_SAME_CALLS = "all ranks must make the same calls"


@dataclass(frozen=True)
class Consensus:
    """The combined state of all ranks.

    Attributes:
        ready: no rank has a cut that is not sealed.
        resync: at least one rank must publish every row.
        unpublished: at least one rank has something to publish.
        failed: at least one rank cannot continue.
        over: the service refuses the run of at least one rank for good.
        deletes: every rank has the open delete requests up to this number; 0 if there are none.
        refused: the service refused the part of at least one rank because it lacks the version below it.
        late: the timeout of at least one rank has expired.
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
    over: bool = False


def on_any_rank(
    flags: list[bool], what: str | None, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[bool]:
    """For each flag, whether at least one rank of a group has set it. A collective of the group.

    Args:
        flags: the flags of this rank; all ranks pass the same number of flags.
        what: what ranks are about to do, for the log of a rank that waits long; None logs nothing.
        group: the group; None = the default group. Without any process group there is one rank.
        device: a device that the group's backend supports; None = the CPU.
    """
    values = [int(flag) for flag in flags]
    if not values or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return flags
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
    if what and tensor.device.type == "cpu":
        _finish(work, lambda: f"the other ranks to reach {what}")
    else:  # On a device, a wait that times out would abort the group.
        work.wait()
    return [bool(flag) for flag in tensor.tolist()]


def _finish(work: dist.Work, what: Callable[[], str]) -> None:
    """Wait for the end of a collective on the CPU (`wait_aloud`)."""

    def arrived(seconds: float) -> bool:
        with suppress(RuntimeError):  # The wait has timed out, or the collective has failed.
            return work.wait(timedelta(seconds=seconds))
        return work.is_completed() and work.wait()

    wait_aloud(arrived, what)


@dataclass(frozen=True)
class _State:
    """The progress of a rank.

    Attributes:
        rank: the rank.
        collectives: number of collectives that it has started.
        count: the number that it last passed to `note`.
        closed: whether it has closed its agreement.
    """

    rank: int
    collectives: int
    count: int
    closed: int


class Agreement:
    """Small collectives over a separate gloo group, independent of GPUs and of the groups for training.

    For the training thread. Without a process group there is one rank, and nothing is exchanged. A rank that waits
    long logs which ranks it waits for, and their last known progress.
    """

    def __init__(self, name: str, unit: str) -> None:
        """Wait until all ranks construct the same agreement.

        Args:
            name: what the ranks agree for, in messages.
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
        """Destroy the group and its threads. Not a collective: ranks that wait for this one fail at once.

        A gloo thread that still frees memory of the last collective would abort a process that exits (torch 2.13).
        """
        ranks, self._ranks, self.closed = self._ranks, None, True
        self._write_state()
        self._states.settle()  # Others read it when their collective fails.
        if ranks and dist.is_initialized():
            with suppress(ValueError):  # The group was already destroyed together with the default group.
                dist.destroy_process_group(ranks)

    def note(self, count: int) -> None:
        """Record this rank's progress for the log of ranks that wait for it.

        Takes microseconds. With a slow store, it skips calls to take at most a thousandth of the time.
        """
        self._count = count
        if (started := time.perf_counter()) >= self._due:
            self._write_state()
            ended = time.perf_counter()
            self._due = ended + 1000 * (ended - started)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if self.closed:
            raise InvalidInput("this DeltaSync is closed and no longer publishes: make a new one")
        return self._ranks

    def reach(
        self,
        count: int,
        *,
        ready: bool,
        resync: bool,
        unpublished: bool,
        failed: bool,
        deletes: int = 0,
        refused: bool = False,
        late: bool = False,
        again: bool = False,
        over: bool = False,
    ) -> Consensus:
        """Combine this rank's state with that of all other ranks. A collective of all ranks.

        Args:
            count: what `note` counts. It must be the same on all ranks.
            ready: see `Consensus`, like the others.

        Raises:
            DeltasyncError: ranks pass different counts, or another rank has closed its agreement or has ended.
        """
        self.note(count)
        flags = [not ready, resync, unpublished, failed, refused, late, again, over]
        *largest_flags, largest, last, first = self._largest([*map(int, flags), -deletes, count, -count])
        if last != -first:
            self._refuse_apart(count)
        busy, any_resync, any_unpublished, any_failed, *others = map(bool, largest_flags)
        return Consensus(not busy, any_resync, any_unpublished, any_failed, -largest, *others)

    def _refuse_apart(self, count: int) -> NoReturn:
        """Raise the same error on all ranks, which have passed different counts. A collective of all ranks."""
        ranks: dict[int, list[int]] = {}
        for rank, (each,) in zip(self._states.ranks, self._every([count]), strict=True):
            ranks.setdefault(each, []).append(rank)
        places = [f"{named(of)} at {self._unit} {each}" for each, of in ranks.items()]
        raise DeltasyncError(
            f"{self._name}: {some(places)}: {_SAME_CALLS}, and close it after the same {self._unit}"
        )

    def any_of(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. A collective of all ranks."""
        return bool(self._largest([int(flag)])[0])

    def lowest(self, position: Position) -> Position:
        """The lowest of the ranks' positions, without its history. A collective of all ranks.

        Returns `Position()` if the position of any rank has no version or no seal.
        """
        named = position.number if position.seal else 0
        every = self._every([named, int.from_bytes(position.seal.to_bytes(8), signed=True)])
        number, seal = min((number, seal) for number, seal in every)
        return Position("", number, int.from_bytes(seal.to_bytes(8, signed=True))) if number else Position()

    def differing(self, digests: Mapping[str, int]) -> list[str]:
        """The names whose digests (signed, 64 bits) differ between ranks. A collective of all ranks.

        Returns an empty list if ranks pass different names.
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
        """The numbers (signed, 64 bits) of each rank. All ranks pass equally many. A collective."""
        group = self._group
        if self.world_size == 1 or not numbers:
            return [numbers] * self.world_size
        values = torch.tensor(numbers, dtype=torch.int64)
        every = [torch.empty_like(values) for _ in range(self.world_size)]
        self._run(lambda: dist.all_gather(every, values, group=group, async_op=True))
        return [each.tolist() for each in every]

    def new_run(self) -> tuple[str, int]:
        """The id and the start (nanoseconds since 1970) of a new run, chosen by the first rank. A collective."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        group = self._group
        if self.world_size > 1:
            self._run(lambda: dist.broadcast(values, 0, group=group, async_op=True))
        return values[:2].numpy().tobytes().hex(), int(values[2])

    def _largest(self, values: list[int]) -> list[int]:
        """The maximum of each value over all ranks. A collective."""
        tensor = torch.tensor(values, dtype=torch.int64)
        group = self._group
        if self.world_size > 1:
            self._run(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))
        largest: list[int] = tensor.tolist()
        return largest

    def _run(self, begin: Callable[[], dist.Work]) -> None:
        """Run a collective to its end.

        Raises:
            DeltasyncError: another rank has closed its agreement or has ended, and does not take part.
        """
        self._collectives += 1
        self._write_state()
        try:
            _finish(begin(), self._awaited)
        except RuntimeError as error:
            closed = [state for state in self._read_states() if state.closed]
            needed = self._listed(closed) if closed else "a rank that has ended, or cannot be reached"
            raise DeltasyncError(
                f"{self._name}, at {self._unit} {self._count}, needs {needed}: all ranks must close it after the "
                f"same {self._unit}"
            ) from error

    def _awaited(self) -> str:
        states = self._read_states()
        late = [state for state in states if state.collectives < self._collectives]
        where = f"in {self._name}, at {self._unit} {self._count}: {_SAME_CALLS}"
        if not late:
            return f"the other ranks, which {'have arrived' if states else 'have left no state to read'}, {where}"
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
