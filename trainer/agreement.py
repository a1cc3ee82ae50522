"""What ranks agree on before a cut, so that their parts always meet."""

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
        # One minimum does for all: "any rank" is the minimum of the negation.
        answers = torch.tensor([ready, not resync, not unpublished, not failed], dtype=torch.int32)
        if self._group:
            dist.all_reduce(answers, dist.ReduceOp.MIN, group=self._group)
        all_ready, none_resync, none_unpublished, none_failed = (bool(answer) for answer in answers.tolist())
        return Agreed(all_ready, not none_resync, not none_unpublished, not none_failed)

    def run(self) -> tuple[str, int]:
        """A new run id, and when the run began (nanoseconds since 1970): the first rank's, on all ranks."""
        run = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.int64)
        values = torch.cat([run, torch.tensor([time.time_ns()])])
        if self._group:
            dist.broadcast(values, 0, group=self._group)
        return values[:2].numpy().tobytes().hex(), int(values[2])
