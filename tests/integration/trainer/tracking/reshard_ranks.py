"""The ranks of test_reshard: a tracker's state is saved under one plan, and loaded under others by other ranks."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.models import META, bag, bags, distributed, sequence, sequences
from tests.support.deltas import first_of, values_of
from tests.support.ranks import leave
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checkpoints import load_checkpoint, state_of, write_checkpoint
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking import Delta, Tracker, TrackingMode
from deltasync.trainer.tracking.shards import TrackedTable

ROWS, DIM, BATCH = 61, 16, 3
BAGS = ("first", "second", "copies")
FEATURES = (*BAGS, "sequence")
MODES = {
    "done": TrackingMode.EMBEDDING,
    "behind": TrackingMode.EMBEDDING,
    "unacknowledged": TrackingMode.EMBEDDING_LAST,
    "nothing": TrackingMode.EMBEDDING,
    "split": TrackingMode.EMBEDDING,
}
# How tables are cut up, given the last rank.
PLANS: dict[str, Callable[[int], list[Any]]] = {
    "rows": lambda _last: [_rows(), _rows()],
    "columns": lambda last: [_columns([0, last]), _columns([last, last])],
    "quarters": lambda last: [_columns([0, last, 0, last]), _columns([last, last, 0, 0])],
    "whole": lambda last: [table_wise(rank=last, compute_kernel="fused"), _rows()],
}
# Here ranks disagree on how much time has passed since their cursors: one has read more often.
UNEVEN = ("columns", "whole")


def _rows() -> Any:
    return row_wise(compute_kernel="fused")


def _columns(ranks: list[int]) -> Any:
    return column_wise(ranks=ranks, compute_kernel="fused")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(*(bag(name, rows=ROWS, dim=DIM) for name in BAGS))
        self.sequences = sequences(sequence("sequence", rows=ROWS, dim=DIM))
        self.dense = nn.Linear(DIM * len(BAGS), 3, device=META)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(features).values()
        sequence = self.sequences(features)["sequence"].values()
        loss: torch.Tensor = pooled.sum() + self.dense(pooled).pow(2).mean() + sequence.sum()
        return loss


class Training:
    """A model under a plan, and DeltaSync, which publishes nothing here."""

    def __init__(self, plan: str) -> None:
        first, second = PLANS[plan](dist.get_world_size() - 1)
        sharding = {"first": first, "second": second, "copies": data_parallel(), "sequence": second}
        # Rowwise Adagrad has one momentum for each shard of columns: it cannot be cut anew.
        self.model = distributed(Model(), sharding, EmbOptimType.EXACT_ADAGRAD, learning_rate=0.1)
        rest = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        self.sync = DeltaSync(self.model, SyncOptions(service="localhost:1", model="m", publish_every=10**6))
        self.tracker: Tracker = self.sync.tracker

    def step(self, generator: torch.Generator) -> None:
        self.optimizer.zero_grad()
        self.model(batch(generator)).backward()
        self.optimizer.step()
        self.sync.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {table.name: _weights(table).clone() for table in self.tracker.tables}


def batch(generator: torch.Generator) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 3, (len(FEATURES) * BATCH,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths)


@dataclass
class Expected:
    """What one consumer holds of this rank's rows, and which are due to it."""

    held: dict[str, torch.Tensor]
    due: dict[str, torch.Tensor]

    def changed(self, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
        for name, due in self.due.items():
            due |= (before[name] != after[name]).any(dim=1)

    def take(self, tables: list[TrackedTable], delta: Delta) -> None:
        for table in tables:
            if table.name in delta.ids:
                rows = delta.ids[table.name] - table.row_offset
                self.held[table.name][rows] = values_of(delta, table.name)
                self.due[table.name][rows] = False


def save_checkpoint(folder: Path, training: Training) -> None:
    write_checkpoint(folder, state_of(training.model, training.optimizer), training.sync.state_dict())


def save_all(folder: Path) -> None:
    for plan in PLANS:
        training, generator = Training(plan), torch.Generator().manual_seed(7 + dist.get_rank())
        expected = train(training, generator, uneven=plan in UNEVEN)
        save_checkpoint(folder / plan, training)
        tables = {table.name: (table.row_offset, table.columns) for table in training.tracker.tables}
        pieces = {name: (one.held, one.due) for name, one in expected.items()}
        torch.save((tables, pieces), folder / plan / f"expected-{dist.get_rank()}.pt")
        dist.barrier()


def train(training: Training, generator: torch.Generator, *, uneven: bool) -> dict[str, Expected]:
    tracker = training.tracker
    for _ in range(3 * dist.get_rank()):
        tracker.get_delta("publisher")  # The clocks of the ranks differ.
    expected = {name: _added(tracker, name, mode) for name, mode in MODES.items()}
    for step in range(6):
        before = training.weights()
        training.step(generator)
        for one in expected.values():
            one.changed(before, training.weights())
        if step in (0, 2):
            _acknowledge(tracker, "behind", expected)
            _acknowledge(tracker, "unacknowledged", expected)
        if step == 3:
            tracker.get_delta("unacknowledged")
            for _ in range(10 if uneven and dist.get_rank() == 1 else 0):
                tracker.get_delta("unacknowledged")
    split = tracker.get_delta("split")
    if dist.get_rank() == 1:
        assert tracker.acknowledge(split)
        expected["split"].take(tracker.tables, split)
    _acknowledge(tracker, "done", expected)
    tracker.resync("nothing")
    for name, due in expected["nothing"].due.items():
        due.fill_(True)
        expected["nothing"].held[name].fill_(float("nan"))
    return expected


def _added(tracker: Tracker, name: str, mode: TrackingMode) -> Expected:
    tracker.add_consumer(name, mode)
    due = {table.name: torch.zeros(table.rows, dtype=torch.bool) for table in tracker.tables}
    return Expected({table.name: _weights(table).clone() for table in tracker.tables}, due)


def _acknowledge(tracker: Tracker, name: str, expected: dict[str, Expected]) -> None:
    delta = tracker.get_delta(name)
    assert tracker.acknowledge(delta)
    expected[name].take(tracker.tables, delta)


def load_all(folder: Path, plans: list[str]) -> None:
    for source in PLANS:
        for target in plans:
            where = f"{source} -> {target}, rank {dist.get_rank()} of {dist.get_world_size()}"
            check_loaded(folder / source, target, where, exact=source not in UNEVEN)


def check_loaded(folder: Path, plan: str, where: str, *, exact: bool) -> None:
    training = Training(plan)
    load_checkpoint(folder, training.model, training.optimizer, training.sync)
    tracker = training.tracker
    assert set(tracker.consumers) == {"publisher", *MODES}
    copies = {}
    for name in MODES:
        held, due = merged(folder, tracker.tables, name)
        delta = tracker.get_delta(name)
        for table in tracker.tables:
            check_due(
                table, delta, due[table.name], f"{name}, {table.name}: {where}", exact=exact and name != "split"
            )
            check_first(table, delta, held[table.name], f"{name}, {table.name}: {where}")
        copies[name] = Expected(held, due)
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    for _ in range(2):
        training.step(generator)
    for name, copy in copies.items():
        delta = tracker.get_delta(name)
        copy.take(tracker.tables, delta)
        assert tracker.acknowledge(delta)
        for table in tracker.tables:
            assert torch.equal(copy.held[table.name], _weights(table)), f"{name}, {table.name}: {where}"


def check_due(table: TrackedTable, delta: Delta, due: torch.Tensor, where: str, *, exact: bool) -> None:
    ids = torch.from_numpy(delta.ids.get(table.name, np.empty(0, np.int64)))
    offered = torch.zeros(table.rows, dtype=torch.bool).index_fill_(0, ids - table.row_offset, value=True)
    assert not (due & ~offered).any(), f"lost {where}"
    if exact:
        assert torch.equal(offered, due), f"more than is due {where}"
    assert due.all() or not offered.all(), f"everything {where}"


def check_first(table: TrackedTable, delta: Delta, held: torch.Tensor, where: str) -> None:
    if table.name in delta.ids and delta.first:
        expected = held[delta.ids[table.name] - table.row_offset]
        assert torch.equal(first_of(delta, table.name).nan_to_num(-7.0), expected.nan_to_num(-7.0)), where


def merged(
    folder: Path, tables: list[TrackedTable], consumer: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What all ranks that saved expect of a consumer, for the rows and columns held here."""
    held = {table.name: torch.empty(table.table.rows, table.table.dim) for table in tables}
    due = {table.name: torch.zeros(table.table.rows, dtype=torch.bool) for table in tables}
    for file in sorted(folder.glob("expected-*.pt")):
        places, pieces = torch.load(file, weights_only=True)
        for name in places.keys() & held.keys():
            (row_offset, columns), rows = places[name], pieces[consumer][0][name]
            at = slice(row_offset, row_offset + len(rows))
            due[name][at] |= pieces[consumer][1][name]
            for values, (first, width) in zip(rows.split([its for _, its in columns], 1), columns, strict=True):
                held[name][at, first : first + width] = values
    for table in tables:
        at = slice(table.row_offset, table.row_offset + table.rows)
        mine = [held[table.name][at, first : first + width] for first, width in table.columns]
        held[table.name], due[table.name] = torch.cat(mine, dim=1), due[table.name][at]
    return held, due


def check_formats(folder: Path) -> None:
    newer, training = folder / "newer", Training("rows")
    shutil.copytree(folder / "rows", newer)
    (newer / "format").write_text("2\n")
    with pytest.raises(
        InvalidInput, match=f"the checkpoint in {newer} is of format 2, this version reads 1: update"
    ):
        load_checkpoint(newer, training.model, training.optimizer, training.sync)
    save_checkpoint(newer, training)
    load_checkpoint(newer, training.model, training.optimizer, training.sync)  # It was overwritten.


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def check_interrupted_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are newer than what is known of them would be taken for published."""
    interrupted, training = folder / "interrupted", Training("rows")
    save_checkpoint(interrupted, training)
    with monkeypatch.context() as patched:
        patched.setattr("deltasync.trainer.checkpoints.save", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(interrupted, training)
    with pytest.raises(InvalidInput, match="got rank none"):
        load_checkpoint(interrupted, training.model, training.optimizer, training.sync)


def _weights(table: TrackedTable) -> torch.Tensor:
    return torch.cat([tracked.weight for tracked in table.shards], dim=1)


def main(what: str, folder: Path, plans: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    if what == "save":
        save_all(folder)
    load_all(folder, plans)
    if dist.get_world_size() == 1:
        check_formats(folder)
        check_interrupted_save(folder, pytest.MonkeyPatch())
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
