"""Ranking rows by how much they have changed."""

from collections.abc import Mapping

import torch

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modes import TrackingMode


def check_ranked(mode: TrackingMode, k: int = 1) -> None:
    """Check that a mode tells by how much a row has changed, and that `k` is a number of rows.

    Raises:
        InvalidInput: it does not tell, or `k` is below 1.
    """
    if mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING_LAST):
        raise InvalidInput(
            f"mode {mode.value!r} does not tell by how much a row has changed: "
            f"use {TrackingMode.EMBEDDING.value!r}"
        )
    if k < 1:
        raise InvalidInput(f"k: {k}, expected at least 1")


def largest(norms: Mapping[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    """Which rows have the `k` largest norms of all tables, as a bool mask [n] by FQN. NaN is the largest."""
    every = torch.cat(list(norms.values())) if norms else torch.empty(0)
    chosen = torch.zeros(len(every), dtype=torch.bool)
    chosen[torch.topk(every, min(k, len(every))).indices] = True
    masks = torch.split(chosen, [len(part) for part in norms.values()])
    return dict(zip(norms, masks, strict=True))
