"""What ranks have to decide alike, so that their collectives meet."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import ShardedModule


class Ranks:
    """Those that train a model together."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self.group = _group_of(model)

    def on_any(self, flags: list[bool]) -> list[bool]:
        """Which of the flags are set on at least one rank. Called by all ranks together."""
        if not flags or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            return flags
        found = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in found.tolist()]


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Of what all ranks hold a copy of, or else of what they hold together; None is the default group."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group: dist.ProcessGroup = module.process_group
            return group
    environments = (
        getattr(module, "_env", None) for module in model.modules() if isinstance(module, ShardedModule)
    )
    return next((environment.process_group for environment in environments if environment), None)
