"""What a trainer publishes that restarts from a checkpoint, against the rows that were published after it.

A table of 1 M rows x 16, of which each step changes at most 2,000, some more often; a cut every 10 steps.
The trainer ends 50 steps after its checkpoint; another one goes on from there, with 10 steps on other data.
"""

import copy
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from tests.bench.children import Children
from torch import nn

from deltasync.trainer.sync import DeltaSync, SyncOptions

ROWS, DIM, STEP_ROWS, BEHIND, EVERY = 1_000_000, 16, 2_000, 50, 10
_ID_BYTES = 8


OPTIONS = (click.option("--rows", type=click.IntRange(STEP_ROWS), default=ROWS, help="Rows of the table."),)


def run(console: Console, rows: int) -> dict[str, Any]:
    with Children() as children:
        service = children.service("--consumer", "bench=bench")
        trainer = _Trainer(service.grpc, rows, seed=0)
        trainer.sync.flush()
        everything = trainer.sync.stats.bytes
        checkpoint = copy.deepcopy(trainer.model.state_dict()), trainer.sync.state_dict()
        lost = trainer.train(BEHIND)
        trainer.sync.close()
        again = _Trainer(service.grpc, rows, seed=1)
        again.go_on_from(*checkpoint)
        own = again.train(EVERY)
        again.sync.close()
    row_bytes = _ID_BYTES + 4 * DIM
    figures = {
        "resent_ratio": again.sync.stats.bytes / (len(lost) * row_bytes),
        "resent_bytes": again.sync.stats.bytes,
        "lost_bytes": len(lost) * row_bytes,
        "own_bytes": len(own) * row_bytes,
        "everything_bytes": everything,
    }
    _print(console, figures, rows)
    return figures


class _Table(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, DIM))


class _Trainer:
    """Changes some rows with each step."""

    def __init__(self, service: str, rows: int, seed: int) -> None:
        self.model = _Table(rows)
        self.sync = DeltaSync(self.model, SyncOptions(service=service, model="bench", publish_every=EVERY))
        self._random = np.random.default_rng(seed)

    def go_on_from(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        self.model.load_state_dict(weights)
        self.sync.load_state_dict([state])

    def train(self, steps: int) -> set[int]:
        """Take some steps, and publish them; the rows that they have changed."""
        changed = set[int]()
        for _ in range(steps):
            ids = np.unique(self._random.zipf(1.1, STEP_ROWS) % len(self.model.table))
            with torch.no_grad():
                self.model.table[torch.from_numpy(ids)] += 1
            self.sync.step()
            changed.update(ids.tolist())
        self.sync.flush()
        return changed


def _print(console: Console, figures: dict[str, Any], rows: int) -> None:
    size = {name: figures[f"{name}_bytes"] / 1e6 for name in ("everything", "lost", "own", "resent")}
    console.print(f"restart: a table of {rows:,} rows x {DIM} fp32, {BEHIND} steps behind what is published")
    console.print(f"  the whole table                 {size['everything']:8.2f} MB")
    console.print(f"  rows that those steps changed   {size['lost']:8.2f} MB")
    console.print(f"  rows of {EVERY} steps since         {size['own']:8.2f} MB")
    console.print(f"  published after the restart     {size['resent']:8.2f} MB")
    console.print(f"  ratio {figures['resent_ratio']:.2f}  (aim 2)")
