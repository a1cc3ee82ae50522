"""What dense optimizers keep of the rows of tables whose optimizer is not fused.

No module knows its optimizer. PyTorch calls a function after every optimizer's step: those that have stepped are
known from then on. In the thread that trains.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class DenseOptimizers:
    """The optimizers of this process that have stepped since `listen`."""

    def __init__(self) -> None:
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def listen(self) -> Callable[[], None]:
        """Note optimizers as they step; what is returned ends it."""
        return register_optimizer_step_post_hook(self._note).remove

    def reset(self, weight: torch.Tensor, ids: torch.Tensor) -> None:
        """Make what they keep of rows of a table what it is of new rows.

        Args:
            weight: [rows, dim], the table, which lies in the memory of a parameter.
            ids: int64 [n], of its rows.
        """
        for optimizer in list(self._stepped):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, state in _rows(weight, parameter, optimizer.state.get(parameter, {})):
                        # Adagrad's sum is the only state that need not begin with zeros.
                        first = group.get("initial_accumulator_value", 0) if key == "sum" else 0
                        state.data.index_fill_(0, ids, first)

    def _note(self, optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
        self._stepped.add(optimizer)


def _rows(weight: torch.Tensor, parameter: torch.Tensor, states: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The parts of a parameter's states that belong to a table in its memory, by row; none if it is not there."""
    start = weight.storage_offset() - parameter.storage_offset()
    same_memory = weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    if not same_memory or not 0 <= start <= parameter.numel() - weight.numel():
        return []
    whole = weight.numel() == parameter.numel()
    found = []
    for key, state in states.items():
        if not isinstance(state, torch.Tensor):
            continue
        if state.numel() == parameter.numel():
            found.append((key, state.view(-1)[start : start + weight.numel()].view(len(weight), -1)))
        elif whole and state.numel() == len(weight):  # One value per row.
            found.append((key, state.view(-1, 1)))
    return found
