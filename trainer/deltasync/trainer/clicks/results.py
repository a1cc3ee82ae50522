"""Results of a training process, to be compared with those of replicas: scores and tables."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.trainer.sync import DeltaSync

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Results:
    """Collects index, logit and label of every event a rank has trained on, and when each step ended."""

    def __init__(self) -> None:
        self._scored: list[Scored] = []
        self._step_ends_unix_ns: list[int] = []

    def add(self, scored: Scored, *, step_ended: bool) -> None:
        """Keep the scores of a batch, made before it was learnt, and the time, if it has just ended a step."""
        self._scored.append(scored)
        if step_ended:
            self._step_ends_unix_ns.append(time.time_ns())

    def write(self, folder: Path, rank: int, sync: DeltaSync) -> None:
        """Write this rank's scores, shards and numbers into `folder`."""
        index, logit, label = (torch.cat(column).cpu().numpy() for column in zip(*self._scored, strict=True))
        np.savez(folder / f"scores-trainer-{rank}.npz", index=index, logit=logit, label=label)
        shards, arrays = [], dict[str, Any]()
        for number, tracked in enumerate(sync.tracker.shards):
            shard = tracked.shard
            shards.append([shard.table.name, shard.row_offset, shard.col_offset])
            arrays[f"shard{number}"] = tracked.weight.detach().cpu().numpy()
        np.savez(folder / f"tables-trainer-{rank}.npz", **arrays)
        (folder / f"trainer-{rank}.json").write_text(json.dumps(self._facts(sync) | {"shards": shards}))

    def _facts(self, sync: DeltaSync) -> dict[str, Any]:
        tables, stats = {tracked.shard.table for tracked in sync.tracker.shards}, sync.stats
        return {
            "tables": [(table.name, table.rows, table.dim, table.dtype.str) for table in tables],
            "steps": sync.tracker.steps,
            "step_ends_unix_ns": self._step_ends_unix_ns,
            "versions": len(stats.cuts),
            "rows": stats.rows,
            "bytes": stats.bytes,
            "absorbed": stats.absorbed,
        }
