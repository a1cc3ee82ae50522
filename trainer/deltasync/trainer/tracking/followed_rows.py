"""Rows of which nothing tells when they change: they are compared with a copy."""

import numpy as np
import torch

from deltasync.core.digests import words_of
from deltasync.kernels.changes import follow_numbers, follow_rows

# Integers as wide as other numbers.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Which rows of two [n, d] tensors of a type differ in a bit: bool [n]. A NaN equals itself, 0.0 not -0.0."""
    bits = BITS[rows.element_size()]
    return (rows.view(bits) != others.view(bits)).any(dim=1)


def follow(rows: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Make a copy [n, d] of rows [n, d] as they are now; which of them differed: int64, ascending.

    The copy has no gaps.
    """
    if not rows.is_cuda and rows.shape[1]:
        words = words_of(rows.numpy())
        ids = np.empty(len(rows), np.int64)
        held = words_of(copy.numpy()).reshape(-1)
        return torch.from_numpy(ids[: follow_rows(words.reshape(-1), words.shape[1], held, ids)])
    changed = torch.nonzero(differing_rows(rows, copy)).squeeze(1)
    copy.index_copy_(0, changed, rows.index_select(0, changed))
    return changed


def follow_raw_ids(identities: torch.Tensor, raw_ids: torch.Tensor) -> torch.Tensor:
    """Make `raw_ids` [n] 1 more than `identities` [n], both int64; the numbers of those that differed, int64."""
    if not identities.is_cuda:
        ids = np.empty(len(identities), np.int64)
        return torch.from_numpy(ids[: follow_numbers(identities.numpy(), 1, raw_ids.numpy(), ids)])
    return follow((identities + 1).view(-1, 1), raw_ids.view(-1, 1))
