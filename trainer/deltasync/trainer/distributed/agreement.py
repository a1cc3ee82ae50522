"""What ranks agree on: before a cut, so that their parts always meet, and wherever their collectives have to."""

import time
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Agreed:
    """What holds for the ranks together.

    Attributes:
        ready: no rank has a part under way.
        resync: at least one must publish every row.
        unpublished: at least one has something to publish.
        failed: at least one cannot go on.
    """

    ready: bool
    resync: bool
    unpublished: bool
    failed: bool


def on_any_rank(
    flags: list[bool], group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[bool]:
    """Which of the flags are set on at least one rank of a group. Called by all of its ranks together.

    Args:
        flags: of this rank, equally many on all.
        group: None is the default group; without any there is one rank, which agrees with itself.
        device: that the group's backend exchanges tensors of; None is the CPU.
    """
    if not flags or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found.tolist()]


class Agreement:
    """One small collective, over a gloo group of its own: it stays off the GPUs and out of training's way.

    Without a process group there is one rank, which agrees with itself.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if self._group else 0
        self.world_size = dist.get_world_size() if self._group else 1

    def of(self, *, ready: bool, resync: bool, unpublished: bool, failed: bool) -> Agreed:
        """What holds for all ranks, given what holds for this one."""
        busy, *others = on_any_rank([not ready, resync, unpublished, failed], self._group)
        return Agreed(not busy, *others)

    def run(self) -> tuple[str, int]:
        """A new run id, and when the run began (nanoseconds since 1970): the first rank's, on all ranks."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        if self._group:
            dist.broadcast(values, 0, group=self._group)
        return values[:2].numpy().tobytes().hex(), int(values[2])
