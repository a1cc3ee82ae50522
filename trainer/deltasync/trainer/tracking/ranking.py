"""Ranking rows by how much they have changed."""

import math
from collections.abc import Mapping

import numpy as np
import torch

from deltasync.core.errors import InvalidInput
from deltasync.core.policy_fields import Amount
from deltasync.trainer.tracking.modes import TrackingMode


def check_ranked(mode: TrackingMode, k: float = 1) -> None:
    """Check that a mode tells by how much a row has changed, and that `k` is a number of rows or a share of them.

    Raises:
        InvalidInput: it does not tell, or `k` is neither.
    """
    if mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING_LAST):
        raise InvalidInput(
            f"mode {mode.value!r} does not tell by how much a row has changed: "
            f"use {TrackingMode.EMBEDDING.value!r}"
        )
    Amount().read("k", k.item() if isinstance(k, np.generic) else k)


def largest(norms: Mapping[str, torch.Tensor], k: float, *, per_table: bool) -> dict[str, torch.Tensor]:
    """Which rows have the largest norms, as a bool mask [n] by FQN. NaN is the largest.

    Args:
        norms: of the rows that have changed, [n] by FQN.
        k: how many rows, or below 1 which share of them, rounded up.
        per_table: of each table, instead of all together.
    """
    if per_table:
        return {fqn: _largest(of_table, k) for fqn, of_table in norms.items()}
    every = torch.cat(list(norms.values())) if norms else torch.empty(0)
    masks = torch.split(_largest(every, k), [len(of_table) for of_table in norms.values()])
    return dict(zip(norms, masks, strict=True))


def _largest(norms: torch.Tensor, k: float) -> torch.Tensor:
    # As floats, 0.07 of 100 rows are 7.000000000000001.
    rows = max(1, math.ceil(round(k * len(norms), 6))) if k < 1 else int(k)
    chosen = torch.zeros(len(norms), dtype=torch.bool)
    chosen[torch.topk(norms, min(rows, len(norms))).indices] = True
    return chosen
