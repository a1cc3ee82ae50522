"""Agreement between ranks: all of them or none publish a cut, or start another collective."""

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.core.position import Position
from deltasync.trainer.distributed.ranks import RankStore, named, some, wait_aloud

_SAME_CALLS = "all ranks must make the same calls"


@dataclass(frozen=True, kw_only=True)
class Consensus:
    """The state of a rank, or of all ranks: what at least one of them says, and the lowest `deletes`."""

    busy: bool  # The rank has a cut that is not sealed, or pauses.
    resync: bool  # It must publish every row.
    unpublished: bool  # It has something to publish.
    failed: bool  # It cannot continue.
    refused: bool = False  # The service refused its part because it lacks the version below it.
    late: bool = False  # Its timeout has expired.
    again: bool = False  # It has already made a part of this step.
    over: bool = False  # The service refuses its run for good.
    deletes: int = 0  # It has the open delete requests up to this number; 0 if there are none.


def on_any_rank(
    flags: list[bool], what: str | None, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[bool]:
    """For each flag, whether at least one rank of a group has set it. A collective of the group (None = all).

    A rank that waits long logs that it waits for the others to reach `what`. `device` must suit the backend.
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
class _Progress:
    """The collectives that a rank has started, the number that it last passed to `note`, and whether it closed."""

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
        """Wait until all ranks construct the same agreement. Messages have its name; `note` counts in `unit`."""
        self._name, self._unit = name, unit
        self._progress = RankStore(name)
        self.rank, self.world_size = self._progress.rank, len(self._progress.ranks)
        self.closed = False
        self._count = self._collectives = 0
        self._due = 0.0
        self._write_progress()
        self._progress.wait_for_all()
        self._ranks = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def close(self) -> None:
        """Destroy the group and its threads. Not a collective: ranks that wait for this one fail at once."""
        # A gloo thread that frees memory of the last collective would abort a process that exits (torch 2.13).
        ranks, self._ranks, self.closed = self._ranks, None, True
        self._write_progress()
        self._progress.settle()  # Others read it when their collective fails.
        if ranks and dist.is_initialized():
            with suppress(ValueError):  # The group was already destroyed together with the default group.
                dist.destroy_process_group(ranks)

    def note(self, count: int) -> None:
        """Record this rank's progress for the log of ranks that wait for it. Takes microseconds."""
        self._count = count
        if (started := time.perf_counter()) >= self._due:
            self._write_progress()
            ended = time.perf_counter()
            self._due = ended + 1000 * (ended - started)  # With a slow store, a thousandth of the time.

    def reach(self, count: int, state: Consensus) -> Consensus:
        """Combine the states of all ranks, whose `count` must be the same. A collective of all ranks."""
        self.note(count)
        *flags, deletes = map(int, astuple(state))
        *largest, fewest, last, first = self._largest([*flags, -deletes, count, -count])
        if last != -first:
            ranks: dict[int, list[int]] = {}
            for rank, (each,) in zip(self._progress.ranks, self._every([count]), strict=True):
                ranks.setdefault(each, []).append(rank)
            places = [f"{named(of)} at {self._unit} {each}" for each, of in ranks.items()]
            raise DeltasyncError(
                f"{self._name}: {some(places)}: {_SAME_CALLS}, and close it after the same {self._unit}"
            )
        busy, resync, unpublished, failed, refused, late, again, over = map(bool, largest)
        return Consensus(
            busy=busy,
            resync=resync,
            unpublished=unpublished,
            failed=failed,
            refused=refused,
            late=late,
            again=again,
            over=over,
            deletes=-fewest,
        )

    def any_of(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. A collective of all ranks."""
        return bool(self._largest([int(flag)])[0])

    def lowest(self, position: Position) -> Position:
        """The lowest of the ranks' positions, without its history. A collective of all ranks.

        Returns `Position()` if the position of any rank has no version or no seal.
        """
        number = position.number if position.seal else 0
        every = self._every([number, int.from_bytes(position.seal.to_bytes(8), signed=True)])
        number, seal = min((number, seal) for number, seal in every)
        return Position("", number, int.from_bytes(seal.to_bytes(8, signed=True))) if number else Position()

    def differing(self, digests: Mapping[str, int]) -> list[str]:
        """The names whose digests (signed, 64 bits) differ between ranks; none if ranks pass different names.

        A collective of all ranks.
        """
        names = hashlib.blake2b("\n".join(digests).encode(), digest_size=8).digest()
        if self._differ([int.from_bytes(names, signed=True)]) == [True]:
            return []
        differ = self._differ(list(digests.values()))
        return [name for name, differs in zip(digests, differ, strict=True) if differs]

    def new_run(self) -> tuple[str, int]:
        """The id and the start (nanoseconds since 1970) of a new run, chosen by the first rank. A collective."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        self._run(lambda group: dist.broadcast(values, 0, group=group, async_op=True))
        return values[:2].numpy().tobytes().hex(), int(values[2])

    def _differ(self, numbers: list[int]) -> list[bool]:
        every = torch.tensor(self._every(numbers))
        return [bool(differs) for differs in (every != every[0]).any(dim=0).tolist()]

    def _every(self, numbers: list[int]) -> list[list[int]]:
        """The numbers (signed, 64 bits) of each rank. All ranks pass equally many. A collective."""
        values = torch.tensor(numbers, dtype=torch.int64)
        every = [values.clone() for _ in range(self.world_size)]
        if numbers:
            self._run(lambda group: dist.all_gather(every, values, group=group, async_op=True))
        return [each.tolist() for each in every]

    def _largest(self, values: list[int]) -> list[int]:
        """The maximum of each value over all ranks. A collective."""
        tensor = torch.tensor(values, dtype=torch.int64)
        self._run(lambda group: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True))
        largest: list[int] = tensor.tolist()
        return largest

    def _run(self, begin: Callable[[dist.ProcessGroup | None], dist.Work]) -> None:
        """Run a collective to its end; an error names the ranks that have closed this, or says that one ended."""
        if self.closed:
            raise InvalidInput("this DeltaSync is closed and no longer publishes: make a new one")
        if self.world_size == 1:
            return
        self._collectives += 1
        self._write_progress()
        try:
            _finish(begin(self._ranks), self._awaited)
        except RuntimeError as error:
            closed = [progress for progress in self._read_progress() if progress.closed]
            needed = self._listed(closed) if closed else "a rank that has ended, or cannot be reached"
            raise DeltasyncError(
                f"{self._name}, at {self._unit} {self._count}, needs {needed}: all ranks must close it after the "
                f"same {self._unit}"
            ) from error

    def _awaited(self) -> str:
        every = self._read_progress()
        late = [progress for progress in every if progress.collectives < self._collectives]
        where = f"in {self._name}, at {self._unit} {self._count}: {_SAME_CALLS}"
        if not late:
            return f"the other ranks, which {'have arrived' if every else 'have left no state to read'}, {where}"
        return f"{self._listed(late)}, {where}"

    def _listed(self, every: Sequence[_Progress]) -> str:
        return some(
            [
                f"rank {each.rank} ({'closed' if each.closed else 'last seen'} at {self._unit} {each.count})"
                for each in every
            ]
        )

    def _write_progress(self) -> None:
        self._progress.write(f"{self._collectives} {self._count} {self.closed:d}")

    def _read_progress(self) -> list[_Progress]:
        """The progress of all ranks; nothing if it cannot be read."""
        try:
            texts = self._progress.read()
        except RuntimeError:
            return []
        ranks = zip(self._progress.ranks, texts, strict=True)
        return [_Progress(rank, *map(int, text.split())) for rank, text in ranks]
