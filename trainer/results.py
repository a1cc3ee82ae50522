"""What a training process leaves behind for whoever compares it with the replicas: scores and tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.publishing import DeltaSync

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Results:
    """Collects index, logit and label of every event a rank has trained on."""

    def __init__(self) -> None:
        self._scored: list[Scored] = []

    def add(self, scored: Scored) -> None:
        """Keep the scores of a batch, made before it was learnt."""
        self._scored.append(scored)

    def write(self, folder: Path, rank: int, sync: DeltaSync, facts: dict[str, Any]) -> None:
        """Write this rank's scores, shards and numbers into `folder`."""
        index, logit, label = (torch.cat(column).cpu().numpy() for column in zip(*self._scored, strict=True))
        np.savez(folder / f"scores-trainer-{rank}.npz", index=index, logit=logit, label=label)
        tables = {s.shard.table for s in sync.tracker.shards}
        facts |= {"tables": [(t.name, t.rows, t.dim, t.dtype.str) for t in tables]}
        shards, arrays = [], dict[str, Any]()
        for number, tracked in enumerate(sync.tracker.shards):
            shard = tracked.shard
            shards.append([shard.table.name, shard.row_offset, shard.col_offset])
            arrays[f"shard{number}"] = tracked.weight.detach().cpu().numpy()
        np.savez(folder / f"tables-trainer-{rank}.npz", **arrays)
        stats = sync.stats
        facts |= {"shards": shards, "cuts": stats.cuts, "rows": stats.rows, "bytes": stats.bytes}
        facts |= {"absorbed": stats.absorbed, "sync_seconds": stats.step_seconds, "cost": vars(sync.tracker.cost)}
        (folder / f"trainer-{rank}.json").write_text(json.dumps(facts))
