"""Rows of a table that were gathered where the table is, on their way to host memory."""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class GatheredRows:
    """Rows of one table.

    Attributes:
        ids: int64 [n], local row ids, ascending.
        values: of these rows, [n, d], by shard, if those are read.
        digests: of these rows, int64 [n], by shard, if they lie on a device.
        count: how many of them are meant, the first ones, int64 [1]; None = all.
    """

    ids: torch.Tensor
    values: list[torch.Tensor]
    digests: list[torch.Tensor]
    count: torch.Tensor | None = None

    def in_host_memory(self) -> Self:
        """The same in host memory: on a GPU, once its stream is done."""
        if not self.ids.is_cuda:
            return self
        values, digests = ([to_host(each) for each in both] for both in (self.values, self.digests))
        count = None if self.count is None else to_host(self.count)
        return type(self)(to_host(self.ids), values, digests, count)

    def trimmed(self) -> Self:
        """The rows that are meant, of those that are in host memory.

        Raises:
            RuntimeError: they are more than were thought possible.
        """
        if self.count is None:
            return self
        count = int(self.count)
        if count > len(self.ids):
            raise RuntimeError(f"{count} rows are due, at most {len(self.ids)} were expected: this is a defect")
        values, digests = ([each[:count] for each in both] for both in (self.values, self.digests))
        return type(self)(self.ids[:count], values, digests)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in host memory, once the current stream is done; itself where it is there already."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
