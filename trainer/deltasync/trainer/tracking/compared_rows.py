"""Finds changed rows by comparing them with a copy, for tables whose changes no hook reports."""

import numpy as np
import torch

from deltasync.core.digests import words_of
from deltasync.kernels import tracking

# The integer type by width in bytes, to compare values by their bits.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The rows of two [n, d] tensors that differ in any bit: bool [n]. NaN equals itself, 0.0 is not -0.0."""
    bits = BITS[rows.element_size()]
    return (rows.view(bits) != others.view(bits)).any(dim=1)


class FollowedRows:
    """A copy of rows [n, d], which each comparison updates.

    Attributes:
        copy: the rows at the last comparison.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.copy = rows.clone(memory_format=torch.contiguous_format)
        self._words = None if rows.is_cuda else words_of(self.copy.numpy()).reshape(-1)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.copy.nbytes

    def follow(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy the current rows [n, d]; return the ids of those that differed, int64, ascending."""
        if self._words is None:
            return _follow(rows, self.copy)
        if not len(self._words):
            return torch.empty(0, dtype=torch.int64)
        ids = np.empty(len(self.copy), np.int64)
        words = rows.numpy().reshape(-1).view(self._words.dtype)
        return torch.from_numpy(ids[: tracking.follow_rows(words, len(words) // len(ids), self._words, ids)])

    def follow_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Like `follow`, but return a bool mask [n], because the host would wait for a GPU to list ids."""
        changed = differing_rows(rows, self.copy)
        self.copy.copy_(rows)
        return changed


def _follow(rows: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    changed = torch.nonzero(differing_rows(rows, copy)).squeeze(1)
    copy.index_copy_(0, changed, rows.index_select(0, changed))
    return changed


def follow_numbers(numbers: torch.Tensor, flip: int, none: int, copy: torch.Tensor) -> torch.Tensor:
    """Copy `numbers` [n] to `copy` [n], each XORed with `flip`, and `none` replaced by 0. All are int64.

    Returns:
        Ids of the numbers that differed: int64, ascending.
    """
    if numbers.is_cuda:
        return _follow(torch.where(numbers == none, 0, numbers ^ flip).view(-1, 1), copy.view(-1, 1))
    ids = np.empty(len(numbers), np.int64)
    return torch.from_numpy(ids[: tracking.follow_numbers(numbers.numpy(), flip, none, copy.numpy(), ids)])
