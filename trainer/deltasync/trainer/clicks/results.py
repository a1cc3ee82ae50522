"""Results of a training process, to be compared with those of replicas: scores and tables."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltasync.trainer.clicks.model_state import EvictionCount, ModelState
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.tracking.shards import TrackedShard

Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Results:
    """Collects index, logit and label of every event a rank has trained on, when each step ended, and how many
    rows have changed hands.

    Made before the first step of `model`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._scored: list[Scored] = []
        self._step_ends_unix_ns: list[int] = []
        self._evictions = EvictionCount(model)

    def add(self, scored: Scored, *, step_ended: bool) -> None:
        """Keep the scores of a batch, made before it was learnt, and the time, if it has just ended a step."""
        self._scored.append(scored)
        if step_ended:
            self._step_ends_unix_ns.append(time.time_ns())
            self._evictions.note_step()

    def write(self, folder: Path, rank: int, sync: DeltaSync, last: Any) -> None:
        """Write this rank's scores, shards, state, outputs and numbers into `folder`.

        Called by all ranks together, once no pipeline is attached to the model. Outputs are those of the batch
        `last`.
        """
        index, logit, label = (torch.cat(column).cpu().numpy() for column in zip(*self._scored, strict=True))
        np.savez(folder / f"scores-trainer-{rank}.npz", index=index, logit=logit, label=label)
        shards, arrays = [], dict[str, Any]()
        for number, tracked in enumerate(_trained(sync)):
            shard = tracked.shard
            shards.append([shard.table.name, shard.row_offset, shard.col_offset])
            arrays[f"shard{number}"] = tracked.weight.detach().cpu().numpy()
        np.savez(folder / f"tables-trainer-{rank}.npz", **arrays)
        np.savez(folder / f"outputs-trainer-{rank}.npz", allow_pickle=False, **self._outputs(last))
        ModelState.of(self._model).save(folder / f"state-trainer-{rank}.npz")
        (folder / f"trainer-{rank}.json").write_text(json.dumps(self._facts(sync) | {"shards": shards}))

    def _outputs(self, batch: Any) -> dict[str, Any]:
        """Index and logit of a batch's events, by the model as it is now, in evaluation."""
        with torch.no_grad():
            _, (index, logit, _) = self._model.eval()(batch)
        return {"index": index.cpu().numpy(), "logit": logit.cpu().numpy()}

    def _facts(self, sync: DeltaSync) -> dict[str, Any]:
        tables, stats = {tracked.shard.table for tracked in _trained(sync)}, sync.stats
        return {
            "tables": [(table.name, table.rows, table.dim, table.dtype.str) for table in tables],
            "parameters": [table.name for table in tables if not table.kind.ranked],
            "steps": sync.tracker.steps,
            "step_ends_unix_ns": self._step_ends_unix_ns,
            "versions": len(stats.cuts),
            "rows": stats.rows,
            "bytes": stats.bytes,
            "absorbed": stats.absorbed,
            "evictions": self._evictions.evictions,
        }


def _trained(sync: DeltaSync) -> list[TrackedShard]:
    """The shards that are weights: buffers and maps are compared as the modules have them."""
    return [tracked for tracked in sync.tracker.shards if tracked.shard.table.kind.trained]
