"""What ranks have to decide alike, so that their collectives meet."""

import torch
import torch.distributed as dist


def on_any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """Which of the flags are set on at least one rank. Called by all ranks together."""
    if not flags or not dist.is_initialized() or dist.get_world_size() == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]
