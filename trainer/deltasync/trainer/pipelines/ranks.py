"""The ranks that train a model together."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import ShardedModule


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Of what all ranks hold a copy of, or else of what they hold together; None is the default group."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group: dist.ProcessGroup = module.process_group
            return group
    environments = (
        getattr(module, "_env", None) for module in model.modules() if isinstance(module, ShardedModule)
    )
    return next((environment.process_group for environment in environments if environment), None)
